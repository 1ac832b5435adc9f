"""Trees, verification rules, sampling and random numbers: pure functions of tensors.

tree.py    draft trees and pure functions on them
sample.py  logits to the probs that are sampled: repetition penalty, temperature, top-k, top-p, min-p
rng.py     randomness: hashes of a request's key and of counters
rules.py   the verification rules, for the trees of a batch at once
"""
