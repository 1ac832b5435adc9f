#!/usr/bin/env bash
# transformers 5.24.0: the rotary base inside `rope_scaling`, where transformers 5 itself writes it, wins over `rope_theta`
# on top of config.json, also with rope_type "default", which scales nothing. A reader that takes the top-level key, or its
# default of 10,000 where there is none, rotates by another base. Seen: 500000.0 three times.
# headstart reads positions by transformers' own config class.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$folder"
venv/bin/python - <<'PYTHON'
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

scaling = {"rope_type": "default", "rope_theta": 500000.0}
for keys in ({"rope_scaling": scaling}, {"rope_parameters": scaling}, {"rope_theta": 10000.0, "rope_scaling": scaling}):
    frequencies = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=4, **keys)).inv_freq
    base = round(float(frequencies[1]) ** -4, -3)  # inv_freq[i] is base ** (-2 i / 8)
    print(f"{keys}: {base}")
    assert base == 500000.0
PYTHON
