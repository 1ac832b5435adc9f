"""The frozen target: loading, placement, cache, forward passes, and the proof that they are what the engine needs.

config.py           its configuration, dtypes and devices
target.py           a target loaded, its masks and cache proven
embeddings.py       its embedding and lm_head, all that a head needs besides
embeddings_only.py  a target of which only these are loaded
loading.py          what it is loaded with: transformers, and its quantisation
tokenizer.py        its tokenizer: the tokens of a text, and those that end an answer
placement.py        placement: replicated, tensor-parallel, over several devices, offloaded
placed.py           a placed target: its device, whole embeddings, fingerprint and process group
attention.py        its attention: grouped without copies of keys and values, and over packed documents
adapter.py          the PEFT adapter that it may carry, merged into it
checkpoint.py       its tensors on disk, and its fingerprint
cache.py            its key-value cache, compacted after acceptance, and its recurrent states, replayed
compiled.py         its verification passes, compiled
probe.py            what a target must prove when it is loaded
stack.py            its decoder stack in parts, for drafts by the target itself
model.py            the forward passes: tokens to features and logits
"""
