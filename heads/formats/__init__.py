"""Heads on disk and on the Hub: our own format, those that other projects publish, those that engines read.

custom_generate/  a head in plain transformers: the code that a published repository carries as its
                  custom_generate
export/           heads in the formats that engines and other projects read: one format a file, each checked as it
                  is written
published/        draft heads that other projects have published, one format a file, each recognised by the names
                  of its tensors
layer_ids.py      how other projects count the layers that a head reads
store.py          a head on disk: save, load, refuse another target's
weights.py        safetensors checked before memory is taken for them
hub.py            where a head is found, a run, a folder or the Hub, and loaded
pickles.py        the one-off way from a pickle to safetensors
"""
