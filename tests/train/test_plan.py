"""The plan's parameter counts are those of the published heads."""

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from transformers import LlamaConfig, Qwen3Config

from heads.resolvers import ROOT, register_resolvers
from train import plan as planning
from train.config import run_config
from train.plan import plan

VICUNA: dict[str, Any] = {"vocab_size": 32000, "tie_word_embeddings": False}
TARGETS = {
    "vicuna7b": LlamaConfig(**VICUNA),
    "vicuna13b": LlamaConfig(
        **VICUNA, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40
    ),
    "llama2_70b": LlamaConfig(
        **VICUNA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "llama8b": LlamaConfig(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8),
    "llama70b": LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "qwen3_8b": Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    ),
}  # fmt: skip
DFLASH = ("head.layers=5", "head.depths=15", "objective.depths=15")


@pytest.mark.parametrize(
    ("target", "overrides", "billions"),
    [
        ("vicuna7b", ("head=eagle",), 0.236),
        ("vicuna13b", ("head=eagle",), 0.370),
        ("llama2_70b", ("head=eagle",), 0.990),
        ("llama70b", ("head=eagle",), 0.990),
        ("llama8b", ("head=eagle3",), 0.425),
        ("llama70b", ("head=eagle3",), 1.403),
        ("vicuna7b", ("head=medusa", "head.heads=1", "objective.depths=1"), 0.148),
        ("vicuna7b", ("head=medusa", "head.heads=1", "objective.depths=1", "head.lm_head=shared"), 0.0168),
        ("vicuna7b", ("head=hydra", "head.layers=4"), 1.398),
        ("qwen3_8b", ("head=block", *DFLASH), 1.049),
    ],
)
def test_published_counts(
    target: str, overrides: tuple[str, ...], billions: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning.AutoConfig, "from_pretrained", lambda *_, **__: TARGETS[target])
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = run_config(compose("train", ["model=llama70b", *overrides]))
    assert plan(run)["head_parameters"] / 1e9 == pytest.approx(billions, rel=0.005)
