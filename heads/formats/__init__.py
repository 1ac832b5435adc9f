"""Heads on disk and on the Hub: our own format, and the formats that other projects publish and engines read.

custom_generate/  decoding in plain transformers, for heads that no engine loads
published/        draft heads in the formats of other projects and engines, one module per format
checkpoint.py     a target's tensors on disk or the Hub, its MTP module, and a copy with a trained head as that module
mtp_layouts.py    layouts of MTP modules in target checkpoints
lora.py           LoRA adapters of heads, in peft's layout
store.py          a head on disk: saving, loading, checking its target
weights.py        safetensors, checked before memory is allocated
hub.py            finding and loading a head: a run's, a folder's or the Hub's
"""
