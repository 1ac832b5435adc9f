"""Decoding: the frozen target, draft trees, the acceptance rules, the draft sources, and one engine for all of them."""
