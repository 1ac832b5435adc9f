"""Rarer drafters, each with the modules that only it needs.

mirror.py          a smaller model on another device that drafts while the target verifies
layer_skip.py      the target without some sub-layers, and the search for these; its first layers
streams.py         speculative streams: adapters on look-ahead tokens
"""
