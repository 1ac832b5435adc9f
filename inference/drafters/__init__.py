"""Drafters, one per file, and tree policies.

contrib/          rarer drafters, each with the modules that only it needs
policy.py         tree policies, and how a tree grows: chain, static, dynamic, best-first, sampled
registry.py       drafters without a head, by name
plain.py          no draft: autoregressive decoding
head.py           a trained head, and the checkpoint's own MTP module
host.py           drafters on the host, one sequence at a time, padded into a batch
hybrid.py         a model-free draft if it has a higher expected acceptance than the head
assistant.py      a smaller model, with the same tokenizer or over the shared tokens
prompt_lookup.py  the tokens after an earlier occurrence of the last n-gram
suffix.py         the most frequent continuation of the longest known suffix
recycling.py      the top candidates after each token, from the target's own logits
lookahead.py      n-grams from a Jacobi window of look-ahead tokens
"""
