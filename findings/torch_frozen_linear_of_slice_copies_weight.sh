#!/usr/bin/env bash
# torch 2.13.0 on a CPU: a linear layer of a slice such as hidden[:, -1:] copies its whole weight if the weight is frozen
# (requires_grad false) and in bfloat16, in inference mode too; with requires_grad true it does not. matmul folds the slice into
# rows only if the weight wants a gradient, else it runs a batched product. transformers 5.24.0 takes the prompt's last logits
# so (logits_to_keep=1, which generate sets): a target that a trainer has frozen copies its lm_head for every prompt.
# Seen: 0 copies, frozen 1, of 4096 x 64 numbers; bfloat16's batched product copies, float32's does not.
# headstart takes logits of rows "N D" (inference/target/embeddings.py), a third of a short prompt's time on SmolLM2-135M.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

V, H = 4096, 64
sizes = {"vocab_size": V, "hidden_size": H, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 1}
copies = {}
for dtype in (torch.bfloat16, torch.float32):
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype).eval()
    for trainable in (True, False):
        model.requires_grad_(trainable)
        with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
            model(torch.arange(10)[None], logits_to_keep=1)
        events = trace.key_averages(group_by_input_shape=True)
        copies[dtype, trainable] = sum(e.count for e in events if e.key == "aten::copy_" and e.input_shapes[0] == [1, H, V])
print(copies)
assert copies == {
    (torch.bfloat16, True): 0, (torch.bfloat16, False): 1, (torch.float32, True): 0, (torch.float32, False): 0
}, copies
PYTHON
echo "torch 2.13.0, transformers 5.24.0: as stated"
