"""Modules that heads share: attention, decoder layers, the draft vocabulary, the KV cache.

argmax.py          the argmax of logits, fast on a CPU
layers.py          the decoder layer that heads share, and compiling a head's
tree_attention.py  masked attention of few queries on CUDA, its keys split
tree_kernels.py    its Triton kernels
flex.py            the same attention as the next file's in one kernel of a device, and its mask
attention.py       training-time-test attention over packed sequences: exact, block-wise, in linear memory
autoregressive.py  unroll, extend and expand of heads that draft one token after another
kv_cache.py        the head's KV cache of verified rows, and how far back it looks
fusion.py          which target layers a head reads by default, and how their states are fused into one
vocab.py           the pruned draft vocabulary, and the lm_head over it
"""
