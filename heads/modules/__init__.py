"""Modules that heads share: attention, decoder layers, the draft vocabulary, the KV cache.

layers.py          the decoder layer that heads share, and compiling a head's
tree_attention.py  masked attention of few queries on CUDA, with split keys
tree_kernels.py    its Triton kernels
flex.py            the attention of attention.py as one fused kernel, and its mask
attention.py       training-time-test attention over packed sequences: exact, block-wise, linear memory
autoregressive.py  unroll, extend and expand of heads that draft one token after another
per_depth.py       unroll, extend and expand of heads with a module for each depth
kv_cache.py        the head's KV cache of verified rows, and its sliding window
fusion.py          default feature layers, and the fusion of their states into one
vocab.py           the draft vocabulary, the lm_head over it, and the argmax of logits
"""
