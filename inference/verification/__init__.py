"""Trees, verification rules, sampling and random numbers: pure functions of tensors.

tree.py    draft trees and pure functions on them
sample.py  logits to the probs that are sampled: repetition penalty, temperature, top-k, top-p, min-p
rng.py     randomness: seeded, or coupled to seed and position alone
rules.py   the acceptance rules: which path stands, which token follows
device.py  acceptance of a whole batch on the device
verify.py  the registry of rules, which drafts each is right for, and the verdict on a draft
"""
