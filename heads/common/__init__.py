"""Utilities of every layer: typed configurations, one-line errors, redaction of secrets, parsing of untrusted files.

files.py          atomic writes of files and folders, checksums, locks
typed.py          the one border between YAML or JSON and dataclasses, with ranges and choices
resolvers.py      computed values in conf/, as ${root:…} and ${by_device:…}
command.py        the entry point of every command: Hydra, without the secrets of the command line
target_config.py  a target's configuration, checked before transformers reads it; its context length
gguf.py           a target's GGUF file: configuration and tokenizer from its metadata, weights dequantised once
connection.py     the connection to the Hub, or only its local cache without one
errors.py         an error as one line for its user
progress.py       bars on a terminal, lines in a log
rope.py           rotary positions, read and scaled as transformers does
untrusted.py      parsing untrusted files: depth limits, no code references, no path traversal
"""
