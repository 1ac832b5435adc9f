"""Drafters, one a file, and the policies by which a tree grows.

contrib/          rarer drafters, each with the modules that only it needs
policy.py         tree policies, and how a tree grows: chain, static, dynamic, best-first, sampled
registry.py       all drafters by name
plain.py          no draft: autoregressive decoding
head.py           a trained head, and the checkpoint's own MTP module
host.py           drafters on the host, one sequence at a time, padded into a batch
hybrid.py         a model-free draft where it promises more than the head
assistant.py      a smaller model, with the same tokenizer or by the tokens that both know
prompt_lookup.py  what followed the last n-gram before
suffix.py         what most often followed the longest known suffix
recycling.py      the top candidates after each token, from the target's own logits
lookahead.py      n-grams from a Jacobi window of look-ahead tokens
"""
