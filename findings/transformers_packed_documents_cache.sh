#!/usr/bin/env bash
# transformers 5.24.0: documents packed into one row by position_ids that restart are told apart only if the call makes no cache.
# use_cache is true by default, in train() too, and then each document attends to those before it, without a warning; a mask of
# ones has the same effect. Seen, the second document's logits against those of the document alone: they differ by 9.1 by
# default, by 2e-06 with use_cache=False. So features of packed text depend on an option that reads like one of speed.
# headstart runs attention over the documents itself (inference/target/attention.py) and tests them against each alone.
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
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, initializer_range=0.3))
tokens, position = torch.randint(64, (1, 12)), torch.arange(6).repeat(2)[None]
ways = {"default": {}, "use_cache=False": {"use_cache": False}, "mask of ones": {"attention_mask": torch.ones(1, 12)}}
for mode in ("eval", "train"):
    getattr(model, mode)()
    with torch.no_grad():
        alone = model(tokens[:, 6:]).logits
        gaps = {
            way: (model(tokens, position_ids=position, **options).logits[:, 6:] - alone).abs().max().item()
            for way, options in ways.items()
        }
    print(mode, {way: f"{gap:.1e}" for way, gap in gaps.items()})
    assert gaps["default"] > 1 and gaps["mask of ones"] > 1 and gaps["use_cache=False"] < 1e-4
PYTHON
