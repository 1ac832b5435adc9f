#!/usr/bin/env bash
# transformers 5.24.0: a checkpoint whose config.json names a quant_method that transformers does not know, as modelopt, loads
# without an error. Its FP8 weights are cast to the dtype asked for and the tensors weight_scale are left out, so that every such
# layer is wrong by its scale. Seen: the warning "Unknown quantization type, got modelopt" and a load report that calls the scale
# UNEXPECTED; the layer's norm is 50 times the true one (scale 0.02).
# headstart refuses such a checkpoint by the method's name, at loading (inference/target/loading.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import logging
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=32
)
AutoModelForCausalLM.from_config(config).save_pretrained("packed")
file, name, scale = Path("packed/model.safetensors"), "model.layers.0.mlp.up_proj.weight", 0.02
tensors = load_file(file)
weight = tensors[name].float()
tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
tensors[f"{name}_scale"] = torch.tensor(scale)
save_file(tensors, file, {"format": "pt"})
values = json.loads(Path("packed/config.json").read_text())
values["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
Path("packed/config.json").write_text(json.dumps(values))

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
transformers.utils.logging.get_logger("transformers").addHandler(handler)
model = AutoModelForCausalLM.from_pretrained("packed", dtype=torch.float32)
loaded = model.model.layers[0].mlp.up_proj.weight
unscaled = tensors[name].float()
print("warned:", *(line[:110] for line in lines if "quant" in line.lower()), sep="\n  ")
print(f"loaded {loaded.dtype}; equals the unscaled FP8 values: {torch.equal(loaded.float(), unscaled)}")
print(f"its norm over that of the true weight: {(loaded.float().norm() / weight.norm()).item():.1f}")
assert torch.equal(loaded.float(), unscaled)
assert any(line.startswith("Unknown quantization type, got modelopt") for line in lines)
PYTHON
