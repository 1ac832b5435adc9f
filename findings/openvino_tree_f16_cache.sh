#!/usr/bin/env bash
# openvino-genai 2026.4.1.0 on a CPU: with INFERENCE_PRECISION_HINT=f32, the default of CPUs without bf16, and the f16 cache that
# optimum-intel 2.2.0 writes into each converted model, EAGLE-3 draft trees change the text, without an error. Chains do not, nor
# does a cache in f32. Texts of 8 that equal those without a head, seen: cache f16 chain 8, tree 1; cache f32 chain 8, tree 8.
# headstart's card gives KV_CACHE_PRECISION=f32 with the hint; tests/serving/test_openvino.py compares texts and passes with both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 optimum-intel==2.2.0 openvino-genai==2026.4.1.0 diffusers==0.39.0 einops
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision # of another build than torch's
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
V, H = 16, 64
sizes = {"vocab_size": V, "hidden_size": H, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
         "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None}
LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=12, initializer_range=0.2)).save_pretrained("target")
wide = {"self_attn.q_proj": (H, 2 * H), "self_attn.k_proj": (H, 2 * H), "self_attn.v_proj": (H, 2 * H),
        "self_attn.o_proj": (H, H), "mlp.gate_proj": (128, H), "mlp.up_proj": (128, H), "mlp.down_proj": (H, 128)}
shapes = {"fc": (H, 3 * H), "lm_head": (V, H)} | {f"midlayer.{name}": shape for name, shape in wide.items()}
tensors = {f"{name}.weight": 0.2 * torch.randn(shape) for name, shape in shapes.items()}
for name in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
    tensors[f"{name}.weight"] = torch.ones(H)
tensors |= {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.ones(V, dtype=torch.bool)}
Path("head").mkdir()
save_file(tensors, "head/model.safetensors", metadata={"format": "pt"})
kind = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": V,
        "torch_dtype": "float32", "tie_word_embeddings": False}
Path("head/config.json").write_text(json.dumps(sizes | kind))
PYTHON
for model in target head; do
    venv/bin/optimum-cli export openvino -m "$model" --task text-generation-with-past --trust-remote-code "$model-ov" >log 2>&1 || { cat log; exit 1; }
done
venv/bin/python - <<'PYTHON'
import numpy
import openvino
import openvino_genai as genai


def texts(tree, cache):
    exact = {"INFERENCE_PRECISION_HINT": "f32", **cache}
    draft = {"draft_model": genai.draft_model("head-ov", "CPU", **exact)} if tree else {}
    pipe = genai.LLMPipeline("target-ov", "CPU", **draft, **exact)
    config = genai.GenerationConfig(max_new_tokens=48, do_sample=False, apply_chat_template=False, **tree)
    prompts = [openvino.Tensor(numpy.array([[1, 2, 3 + i]])) for i in range(8)]
    return [list(pipe.generate(prompt, config).tokens[0]) for prompt in prompts]


chain, tree = {"num_assistant_tokens": 3}, {"num_assistant_tokens": 12, "tree_depth": 2, "branching_factor": 4}
for name, cache in {"f16": {}, "f32": {"KV_CACHE_PRECISION": "f32"}}.items():
    plain = texts({}, cache)
    same = [sum(map(list.__eq__, texts(drafts, cache), plain)) for drafts in (chain, tree)]
    print(f"cache {name}: chain {same[0]} of 8 texts as without a head, tree {same[1]}")
    assert same[0] == 8 and (same[1] == 8) == (name == "f32")
PYTHON
