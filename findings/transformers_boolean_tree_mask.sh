#!/usr/bin/env bash
# transformers 5.24.0: a boolean 4D attention_mask, as a draft tree wants it, is exact with attn_implementation="sdpa" and no mask at
# all with "eager", which adds it to the scores as 0 and 1: every token attends to those behind it, without an error. gpt-oss runs
# in eager by default. Seen: causal order as a boolean mask against no mask: logits differ by 0 with sdpa, by 5.4 with eager;
# there another last token moves the first token's logits by 3.1. A mask of 0 and -inf is exact with both.
# headstart's masks are additive (inference/target/model.py), and a probe of each target checks its trees.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, initializer_range=0.3)).eval()
tokens = torch.randint(64, (1, 12))
other = tokens.clone()
other[0, -1] = (tokens[0, -1] + 1) % 64
allowed = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
added = torch.zeros(1, 1, 12, 12).masked_fill(~allowed, float("-inf"))
for attention in ("sdpa", "eager"):
    model.set_attn_implementation(attention)
    with torch.no_grad():
        plain = model(tokens).logits
        gap = {kind: (model(tokens, attention_mask=mask).logits - plain).abs().max() for kind, mask in
               {"boolean": allowed, "added": added}.items()}
        pair = [model(ids, attention_mask=allowed).logits[:, 0] for ids in (tokens, other)]
    leak = (pair[0] - pair[1]).abs().max()
    print(f"{attention}: boolean {gap['boolean']:.1e}, added {gap['added']:.1e}; the last token moves the first logits by {leak:.1e}")
    assert gap["added"] < 1e-4
    assert (gap["boolean"] < 1e-4 and leak == 0) if attention == "sdpa" else (gap["boolean"] > 1 and leak > 0.1)
PYTHON
