"""Heads on disk and on the Hub: our own format, those that other projects publish, those that engines read.

custom_generate/  decoding in plain transformers with the heads that no engine loads
published/        draft heads as other projects publish them and engines read them, one format a file, read and
                  written by it
mtp_layouts.py    how a target's checkpoint holds its own MTP module
lora.py           the low-rank factors that adapt another head, in peft's layout
store.py          a head on disk: saving, loading, refusing another target's
weights.py        safetensors, checked before memory is allocated
hub.py            finds and loads a head of a run, a folder or the Hub
"""
