#!/usr/bin/env bash
# transformers 5.24.0: a GGUF file's rotary scaling is lost, of Llama and Qwen2 alike, without a warning: the metadata
# rope.scaling.* (YaRN, linear), and the tensor rope_freqs.weight in which llama.cpp's converter writes the llama3 scaling of
# Llama 3.1 and later. The model loads with rope_type "default": other rotations at every position for llama3's low frequencies.
# Seen: {'rope_theta': 500000.0, 'rope_type': 'default'} for a file with factors of 8, with YaRN and with linear scaling.
# headstart refuses to dequantise such a file (heads/common/gguf.py): use the original folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import logging
from pathlib import Path

import numpy as np
import torch
import transformers
from gguf import GGUFWriter, LlamaFileType, RopeScalingType
from transformers import AutoModelForCausalLM, GgufConfig

H, HEADS, GROUPS, D, MLP, V = 64, 4, 2, 16, 96, 64
shapes = {"attn_q": (HEADS * D, H), "attn_k": (GROUPS * D, H), "attn_v": (GROUPS * D, H), "attn_output": (H, HEADS * D),
          "ffn_gate": (MLP, H), "ffn_up": (MLP, H), "ffn_down": (H, MLP), "attn_norm": (H,), "ffn_norm": (H,)}


def write(path, architecture, scaling):
    writer, random = GGUFWriter(path, architecture), np.random.default_rng(0)
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_block_count(1)
    writer.add_context_length(4096)
    writer.add_embedding_length(H)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(D)
    writer.add_vocab_size(V)
    if isinstance(scaling, RopeScalingType):
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(512)
    else:
        writer.add_tensor("rope_freqs.weight", np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32))
    layer = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    if architecture == "qwen2":
        layer |= {f"blk.0.attn_{name}.bias": shapes[f"attn_{name}"][:1] for name in "qkv"}
    ends = {"token_embd.weight": (V, H), "output.weight": (V, H), "output_norm.weight": (H,)}
    for name, shape in (layer | ends).items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
transformers.utils.logging.get_logger("transformers").addHandler(handler)
Path("model").mkdir()
for architecture, scaling in (("llama", "llama3"), ("llama", RopeScalingType.LINEAR), ("qwen2", RopeScalingType.YARN)):
    write("model/model.gguf", architecture, scaling)
    model = AutoModelForCausalLM.from_pretrained(
        "model", gguf_file="model.gguf", quantization_config=GgufConfig(dequantize=True)
    )
    print(architecture, scaling, model.config.rope_parameters)
    assert model.config.rope_parameters == {"rope_theta": 500000.0, "rope_type": "default"}
    plain = 500000.0 ** -(torch.arange(0, D, 2) / D)
    assert torch.allclose(model.model.rotary_emb.inv_freq, plain)
assert not any("rope" in line for line in lines), lines
PYTHON
