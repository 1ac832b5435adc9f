"""What heads share: attention, decoder layers, positions, the draft vocabulary, the KV cache.

top_k.py           the target's law by its likeliest tokens
rope.py            rotary positions, scaled as published heads' are
layers.py          the decoder layer that heads share
attention.py       attention of rows that draft on from their own row: exact, blockwise, in linear memory
autoregressive.py  unroll, extend and expand of heads that draft one token after another
kv_cache.py        the verified rows a head keeps, and how far back it looks
fusion.py          hidden states of several target layers made one
vocab.py           the pruned draft vocabulary, and the lm_head that is read out through
"""
