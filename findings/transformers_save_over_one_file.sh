#!/usr/bin/env bash
# transformers 5.24.0: saving a model in shards into a folder that holds it as one file keeps that file, and loading
# reads the file, so the saved weights are not the loaded ones. No warning is printed. (Saved as one file over shards, the
# old index stays, which loading ignores.) Seen: "loaded: old".
# headstart reads a folder in the same order, and says so where both generations are there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$folder"
venv/bin/python - <<'PYTHON'
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
old, new = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
assert not torch.equal(old.lm_head.weight, new.lm_head.weight)
old.save_pretrained("model")
new.save_pretrained("model", max_shard_size="20KB")
names = {path.name for path in Path("model").iterdir()}
assert {"model.safetensors", "model.safetensors.index.json"} <= names, names
loaded = AutoModelForCausalLM.from_pretrained("model").lm_head.weight
print("loaded:", "old" if torch.equal(loaded, old.lm_head.weight) else "new")
assert torch.equal(loaded, old.lm_head.weight)
PYTHON
