"""Drafters, one a file, and the policies by which a tree grows.

contrib/          rarer drafters, each with the modules that only it needs
policy.py         how a tree grows: chain, static, dynamic, best-first, sampled
runner.py         another model that reads along and drafts
vocabulary.py     between two tokenizers
suffix_tree.py    counted suffixes of all that was written
registry.py       all of them by name
head.py           a trained head
host.py           what drafts on the host, a sequence at a time, padded into a batch
deferred.py       what it has not taken in yet while nothing is drafted
assistant.py      a smaller model, with the same tokenizer or by the tokens both know
prompt_lookup.py  what followed the last n-gram before
suffix.py         what most often followed the longest known suffix
recycling.py      the top candidates after each token, from the target's own logits
lookahead.py      n-grams from a Jacobi window of look-ahead tokens
mtp.py            the checkpoint's own MTP module
hybrid.py         a model-free draft where it promises more than the head
plain.py          none: autoregressive decoding
"""
