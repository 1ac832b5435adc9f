"""Heads on disk and on the Hub: our own format, those that other projects publish, those that engines read.

custom_generate/  a head in plain transformers: the code that a published repository carries as its
                  custom_generate
published/        draft heads as other projects publish them and engines read them, one format a file, read and
                  written by it
layer_ids.py      how other projects count the layers that a head reads
store.py          a head on disk: save, load, refuse another target's
weights.py        safetensors checked before memory is taken for them
hub.py            where a head is found, a run, a folder or the Hub, and loaded
pickles.py        the one-off way from a pickle to safetensors
"""
