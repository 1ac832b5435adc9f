"""TensorRT-LLM cannot be run here: its documented rules are walked, tensor by tensor, over what we export for it.

The rules are those of its PyTorch backend (modeling_speculative.py, llm_args.py of 1.4): how it knows an EAGLE-3 head,
which parameters it makes of config.json, what it takes from the target and which tensors it passes over. The numbers
that come of it are compared in test_export.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.heads.exporting import exported, made, target

HIDDEN, VOCAB = 32, 40  # of the toy target


def parameters(config: dict[str, Any], captured: int) -> dict[str, tuple[int, ...]]:
    """Return the parameters that it makes of a config.json, where it reads so many layers of the target."""
    inner, drafted = config["intermediate_size"], config["draft_vocab_size"] or config["vocab_size"]
    rows = config["head_dim"] * config["num_attention_heads"]
    kv_rows = config["head_dim"] * config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, captured * HIDDEN), "norm.weight": (HIDDEN,)}
    if config.get("bias"):
        found["fc.bias"] = (HIDDEN,)
    if config.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(captured)}
    if config["eagle_config"].get("norm_before_fc"):
        found["input_norm.weight"] = (captured * HIDDEN,)
    for i in range(config["num_hidden_layers"]):
        width, layer = HIDDEN if i else 2 * HIDDEN, f"layers.{i}."
        found |= {
            f"{layer}hidden_norm.weight": (HIDDEN,),
            f"{layer}post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}self_attn.q_proj.weight": (rows, width),
            f"{layer}self_attn.k_proj.weight": (kv_rows, width),
            f"{layer}self_attn.v_proj.weight": (kv_rows, width),
            f"{layer}self_attn.o_proj.weight": (HIDDEN, rows),
            f"{layer}mlp.gate_proj.weight": (inner, HIDDEN),
            f"{layer}mlp.up_proj.weight": (inner, HIDDEN),
            f"{layer}mlp.down_proj.weight": (HIDDEN, inner),
        }
        if i == 0:
            found[f"{layer}input_layernorm.weight"] = (HIDDEN,)
        if config.get("attention_bias"):
            found |= {f"{layer}self_attn.{kind}_proj.bias": (1,) for kind in "qkvo"}
    if drafted != config["vocab_size"]:
        found["d2t"] = (drafted,)
    return found | {"lm_head.weight": (drafted, HIDDEN)}


def passed_over(config: dict[str, Any]) -> set[str]:
    """Return the tensors that it has no parameter for and does not stop at."""
    later = range(1, config["num_hidden_layers"])
    return {"t2d", *(f"layers.{i}.input_layernorm.weight" for i in later)}


@pytest.mark.parametrize(
    "options",
    [
        {"feature_layers": None},
        {"feature_layers": None, "draft_vocab": None},
        {"feature_layers": None, "draft_vocab": None, "lm_head": "shared"},
        {"feature_layers": None, "feature_norm": True, "norm_output": True},
        {"feature_layers": [2, 6], "layers": 3},
        {"feature_layers": None, "joint_norm": True, "norm_output": True},
    ],
)
def test_tensorrt_llm_finds_every_parameter(options: dict[str, Any], tmp_path: Path) -> None:
    head = made("eagle3", **options)
    folder = exported(head, "trtllm", tmp_path, dtype=torch.bfloat16)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    assert "draft_vocab_size" in config  # by this key it knows EAGLE-3
    (name,) = config["architectures"]
    assert f"EAGLE3{name.replace('Eagle3', '')}" == "EAGLE3LlamaForCausalLM"  # the class that it looks up
    assert config["hidden_size"] == HIDDEN
    assert config["vocab_size"] == VOCAB
    captured = len(head.feature_layers)
    assert target().embeddings.num_layers > 5  # of a target with fewer it takes no default
    if options["feature_layers"] is None:
        assert head.feature_layers == (1, 3, 4)  # its own three, {1, n/2 - 1, n - 4}
    tensors = load_file(folder / "model.safetensors")
    expected = parameters(config, captured)
    assert expected.keys() - tensors.keys() == set()
    assert tensors.keys() - expected.keys() <= passed_over(config)
    for key, shape in expected.items():
        assert tuple(tensors[key].shape) == shape, key
    if "d2t" in tensors:
        assert int(tensors["d2t"].max()) < 2**31  # copied into int32
        assert tensors["d2t"].dtype == torch.int64


def test_what_it_always_does_otherwise_is_not_asked_of_it(tmp_path: Path) -> None:
    """Its residual is the state before the norm, whatever config.json says, and `rope` is read from the legacy keys."""
    config = json.loads((exported(made("eagle3", feature_layers=None), "trtllm", tmp_path) / "config.json").read_text())
    assert config["norm_before_residual"] is False
    assert config["tie_word_embeddings"] is False
    assert "rope_theta" in config
    assert config["rope_scaling"] is None
