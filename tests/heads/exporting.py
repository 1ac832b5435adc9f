"""Toy heads for a toy target that is deep enough for every format, and what both sides draft."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from heads import HEADS
from heads.base import DraftHead
from heads.formats.published.export import TargetFacts, export
from inference.target.target import Target
from tests import drafting, toys
from tests.heads import foreign

LAYERS = 8
TOKENS = [*toys.prompt(4, 9), 3]  # the last one is the root
SAID = {
    "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 160, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


@functools.cache
def target() -> Target:
    """Return a target whose lm_head is not its embedding."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**toys.SIZES | {"num_hidden_layers": LAYERS}))
    return Target(model, toys.tokenizer(), "deep")


def made(kind: str, **options: Any) -> Any:
    """Return a toy head with random weights."""
    torch.manual_seed(5)
    config = {"name": kind, **toys.HEAD_CONFIGS[kind], **options}
    if "length" in config:
        config["length"] = options.get("length")
    head: Any = HEADS[kind](HEADS[kind].Config(**config), target().embeddings)
    if head.vocab is not None:
        head.vocab.choose(torch.randint(100, (toys.VOCAB,), generator=torch.Generator().manual_seed(3)))
    for name, parameter in head.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return head.requires_grad_(False)


def served(**options: Any) -> TargetFacts:
    values = {"name": "me/deep", "config": SAID, "dtype": torch.float32, "draft_tokens": 3}
    return TargetFacts(**values | options)


def exported(head: nn.Module, form: str, folder: Path, **options: Any) -> Path:
    export(head, form, served(**options), folder)
    return folder


def told() -> foreign.Served:
    """Return what engines have of the target."""
    model: Any = target().model
    with torch.inference_mode():
        found = model(torch.tensor([TOKENS[:-1]]), output_hidden_states=True).hidden_states
    return foreign.Served([each[0] for each in found], model.get_input_embeddings().weight, model.lm_head.weight)


def chain(head: Any, steps: int) -> list[Tensor]:
    """Return our own logits of a greedy chain."""
    of, token, drafted = target(), torch.tensor([TOKENS[:-1]]), head
    assert isinstance(drafted, DraftHead)
    features = of.features(token, torch.zeros_like(token), head.feature_layers)
    state, level = drafting.extend(drafted, None, features, torch.tensor(TOKENS[1:]))
    found = [drafting.logits(drafted, level)[0]]
    for step in range(1, steps):
        token, parent = found[-1].argmax()[None], torch.tensor([0])
        level = drafting.expand(drafted, state, level, token, parent, torch.ones(1, step, dtype=torch.bool))
        found.append(drafting.logits(drafted, level)[0])
    return found


def assert_same(theirs: list[Tensor], ours: list[Tensor]) -> None:
    """Assert the same logits, as measured by the largest, and lower ones of ours where an engine has none.

    They change from step to step.
    """
    assert float((ours[0] - ours[-1]).nan_to_num().abs().max()) > 0.1
    for one, other in zip(theirs, ours, strict=True):
        largest = float(other[other.isfinite()].abs().max())
        there = one.isfinite()
        torch.testing.assert_close(one[there], other[there], rtol=0, atol=1e-5 * max(1.0, largest))
        assert bool((other[~there][:, None] <= other[there] + 1e-5).all())
