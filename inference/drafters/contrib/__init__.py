"""Rarer draft sources, each with the modules that it alone needs.

skip_search.py     the sub-layers that a target drafts without, and the search for them
stream_layers.py   speculative streams: adapters on look-ahead tokens
assistant_slem.py  a smaller model with any tokenizer, by text
mirror.py          a smaller model on another device that drafts while the target verifies
early_exit.py      the target's first layers
layer_skip.py      the target without some sub-layers
streams.py         speculative streams as look-ahead tokens
"""
