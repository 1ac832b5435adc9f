"""The frozen target: loading, placement, KV cache, forward passes, and the checks of all these at loading.

config.py           configuration, dtypes and devices
target.py           `Target`: a loaded target with checked masks and cache
embeddings.py       embedding and lm_head, which heads read
embeddings_only.py  a target without its decoder layers
loading.py          loading by transformers, quantisation, and PEFT adapters
tokenizer.py        text to tokens and back, and errors of chat templates
placement.py        placement: replicated, tensor-parallel, over several devices, offloaded
packed.py           packed weights of linear layers on a CPU
attention.py        attention: grouped-query without repeated keys and values, and over packed documents
checkpoint.py       tensors on disk, and the fingerprint
cache.py            the KV cache, compacted after acceptance, and recurrent states, which are replayed
compiled.py         passes and stages, compiled or captured in CUDA graphs
probe.py            the checks of a loaded target
model.py            forward passes: tokens to features and logits, through all layers or some
"""
