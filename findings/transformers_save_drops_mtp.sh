#!/usr/bin/env bash
# transformers 5.24.0: loading a checkpoint with an MTP module (GLM-4-MoE, num_nextn_predict_layers=1) and saving it drops
# every tensor of the module, while the saved config.json still promises it. Seen: "27 tensors of the module before, 0
# after; num_nextn_predict_layers=1". So a fine-tune that was saved by transformers serves without its module.
# headstart says so in one line when it loads such a checkpoint, and its doctor does; docs/mtp.md brings the module back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig

config = Glm4MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, first_k_dense_replace=1, num_nextn_predict_layers=1, max_position_embeddings=64,
)
AutoModelForCausalLM.from_config(config).save_pretrained("base")
file, layer = Path("base/model.safetensors"), "model.layers.2."  # behind the last decoder layer, as GLM publishes it
tensors = load_file(file)
module = {k.replace("layers.1.", "layers.2."): v.clone() for k, v in tensors.items() if k.startswith("model.layers.1.")}
module[layer + "eh_proj.weight"] = torch.randn(32, 64)
for norm in ("enorm", "hnorm", "shared_head.norm"):
    module[f"{layer}{norm}.weight"] = torch.ones(32)
save_file(tensors | module, file, metadata={"format": "pt"})
AutoModelForCausalLM.from_pretrained("base").save_pretrained("saved")
after = [name for name in load_file("saved/model.safetensors") if name.startswith(layer)]
promised = json.loads(Path("saved/config.json").read_text())["num_nextn_predict_layers"]
print(f"{len(module)} tensors of the module before, {len(after)} after; num_nextn_predict_layers={promised}")
assert (len(module), len(after), promised) == (27, 0, 1)
PYTHON
