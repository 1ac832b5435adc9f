#!/usr/bin/env bash
# transformers 5.24.0: a 4D attention_mask, which a draft tree needs, replaces the sliding window of a model that has one, with sdpa
# and eager alike: layers of a window of 4 attend to all tokens that the mask allows, without a warning. Seen, the mask of plain
# causal order against no mask, 12 tokens: logits differ by 6.2 in Mistral, by 2.7 in Gemma 3; by 0 with the window in the mask.
# Gemma 3 takes a dictionary of masks, one for each kind of layer.
# headstart gives each kind of layer its window's mask (inference/target/model.py), and a probe of each target checks its trees.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

N, WINDOW = 12, 4
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2, "head_dim": 8, "sliding_window": WINDOW, "initializer_range": 0.3}
mixed = {"layer_types": ["sliding_attention", "full_attention"]}
torch.manual_seed(0)
models = MistralForCausalLM(MistralConfig(**sizes)), Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **mixed))
tokens = torch.randint(64, (1, N))
back = torch.arange(N)[:, None] - torch.arange(N)
causal, windowed = [
    torch.zeros(1, 1, N, N).masked_fill(~allowed, float("-inf")) for allowed in (back >= 0, (back >= 0) & (back < WINDOW))
]
for model in models:
    name = type(model).__name__
    right = windowed if name.startswith("Mistral") else {"sliding_attention": windowed, "full_attention": causal}
    for attention in ("sdpa", "eager"):
        model.eval().set_attn_implementation(attention)
        with torch.no_grad():
            plain = model(tokens).logits
            gaps = [(model(tokens, attention_mask=mask).logits - plain).abs().max().item() for mask in (causal, right)]
        print(f"{name}, {attention}: mask of causal order {gaps[0]:.1f}, mask with the window {gaps[1]:.0e}")
        assert gaps[0] > 1 and gaps[1] < 1e-4
PYTHON
