"""A head in plain transformers: the code that a published repository carries as its custom_generate.

It is these files and the modules of headstart that they import, down to the head's own, written into one folder by
bundle.py. It runs with the standard library, torch, transformers and safetensors alone.

generate.py  the function that transformers calls
decoding.py  the chain: drafted by a head, scored in one forward pass, accepted or replaced
target.py    the model's forward passes, and the hidden states that heads read of them
reading.py   the head's folder or repository
typed.py     a head's configuration, without OmegaConf
bundle.py    the folder: modules, what of them is used, and their imports
"""
