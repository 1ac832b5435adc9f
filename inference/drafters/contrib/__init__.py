"""Rarer drafters, each with the modules that only it needs.

mirror.py          a smaller model on another device that drafts while the target verifies
early_exit.py      the target's first layers
layer_skip.py      the target without some sub-layers, and the search for these
streams.py         speculative streams: adapters on look-ahead tokens
"""
