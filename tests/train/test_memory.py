"""What a plan is made of, on cases that can be counted by hand, and against what really runs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import Features, LayerDims
from heads.modules.attention import BLOCK, Pattern
from heads.modules.layers import Recomputing
from heads.modules.vocab import freeze_around_candidates
from tests import toys
from tests.train import jobs
from train.config import RunConfig
from train.objective import loss_weights, trainable
from train.plan import HeadCost, TargetShape, head_cost, head_state, target_state
from train.resolve import peak_of, preset
from train.step import Flops, Loss

Counter: Any = Flops  # a dispatch mode is a context of an untyped kind
TEN_LAYERS: Any = SimpleNamespace(num_layers=10, hidden_size=128, layer_dims=LayerDims(8, 2, 16, 512))
SHAPE = TargetShape(toys.ARCHITECTURES["llama"], TEN_LAYERS, 512, 2 * 128 * 1000, 10_000_000, 4_000_000, True, True)
COST = HeadCost(1000, 1000, 0, 2000, (0, 1, 2), 0, 0, 0)
MARGIN = 1.3  # of a plan over what is measured


def run_of(head: str, *overrides: str) -> RunConfig:
    """Return a run of rows of 64 tokens."""
    return jobs.configured([f"head={head}", "data.length=64", "trainer.micro_tokens=64", *overrides])


def step_of(name: str, *overrides: str) -> tuple[RunConfig, Any, Any, Any]:
    """Return a run of a toy head, the head, and the features and weights of two rows of one document each."""
    target = toys.target()
    head: Any = toys.head(name, target).float().requires_grad_(True)
    run = run_of(head.config.name, *overrides)
    depths = min(run.objective.depths, head.max_depth) if head.max_depth == 64 else head.max_depth
    run = replace(run, head=head.config, objective=replace(run.objective, depths=depths, anchors=None))
    for module in head.modules():
        if isinstance(module, Recomputing):
            module.recompute = run.trainer.recompute
    token, document = torch.randint(toys.VOCAB, (2, 64)), torch.zeros(2, 64, dtype=torch.long)
    features = target.features(token, document, head.feature_layers)
    weight = loss_weights(document, trainable(document, token * 0 + 1, run.objective.depths), None, run.objective).row
    return run, head, features, weight


def cost_of(run: RunConfig, item: int = 4) -> HeadCost:
    return head_cost(run, toys.target().embeddings, 2, "cpu", item)


def kept(head: Any, features: Features, depths: int) -> int:
    """Return the bytes that a head's pass keeps for the backward pass, each storage once, parameters left out."""
    known = {x.untyped_storage().data_ptr() for x in (*head.parameters(), *features) if x is not None}
    found: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        drafts = head.unroll(features, depths)
    for draft in drafts:
        keep(draft.state)
    return sum(x.untyped_storage().nbytes() for at, x in found.items() if at not in known)


@pytest.mark.parametrize("name", [*toys.HEAD_CONFIGS, "eagle4 with candidates", "mtp with candidates"])
def test_the_operations_are_those_of_a_real_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "block":  # its attention leaves out rows before a block's documents, which numbers alone show
        monkeypatch.setattr(Pattern, "first_rows", property(lambda seen: [0] * len(seen.first.split(BLOCK, 1))))
    run, head, features, weight = step_of(name)
    freeze_around_candidates(head)
    losses = {"candidates": 1.0} if name.endswith("candidates") else run.objective.losses
    with Counter() as count:
        loss = Loss(head, replace(run.objective, losses=losses), compiled=False, autocast=False)
        loss(features, weight, None, loss.chunks(weight > 0, weight.device))[0].backward()
    assert count.total <= cost_of(run).flops * 1.02
    assert cost_of(run).flops <= MARGIN * count.total


@pytest.mark.parametrize(
    ("name", "recompute"), [*((name, False) for name in toys.HEAD_CONFIGS), ("eagle3", True), ("block", True)]
)
def test_a_head_keeps_for_the_backward_pass_no_more_than_planned(name: str, recompute: bool) -> None:
    run, head, features, _ = step_of(name, f"trainer.recompute={str(recompute).lower()}")
    features = features._replace(hidden=features.hidden.bfloat16(), last_hidden=features.last_hidden.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        taken = kept(head, features, run.objective.depths)
    planned = cost_of(run, item=2).activations
    assert taken <= planned <= MARGIN * taken


@pytest.mark.parametrize(("name", "recompute"), [("eagle", False), ("eagle3", True)])
def test_what_a_head_keeps_grows_with_the_length_not_its_square(name: str, recompute: bool) -> None:
    head = step_of(name, f"trainer.recompute={str(recompute).lower()}")[1]
    width, sizes = head.embeddings.hidden_size, []
    for length in (256, 512, 1024):
        token = torch.zeros(1, length, dtype=torch.long)
        states = torch.randn(1, length, len(head.feature_layers) + 1, width)
        document = torch.arange(length)[None] // (length // 2)
        sizes.append(kept(head, Features(token, states[:, :, 1:], states[:, :, 0], document), 3))
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.02)


def test_recomputation_keeps_less_and_computes_more() -> None:
    kept, again = (cost_of(step_of("eagle", *words)[0]) for words in ((), ("trainer.recompute=true",)))
    assert again.activations < kept.activations
    assert again.flops > kept.flops


def laid_out(processes: int = 1, nodes: int = 1, strategy: str = "ddp", **trainer: Any) -> RunConfig:
    """Return a run of so many processes on each of so many nodes."""
    run = run_of("eagle", "trainer.optimizer=adamw")
    launcher = replace(run.launcher, num_processes=processes, num_nodes=nodes, strategy=strategy)
    return replace(run, launcher=launcher, trainer=replace(run.trainer, **trainer))


@pytest.mark.parametrize(
    ("strategy", "processes", "bytes_each"),
    [
        ("ddp", 1, 4 + 4 + 8),
        ("ddp", 4, 4 + 4 + 8 + 4),
        ("zero2", 4, 4 + 4 / 4 + 4 / 4 + 8 / 4 + 2 * 4),
        ("zero3", 4, 4 / 4 + 4 / 4 + 4 / 4 + 8 / 4 + 2 * 4 + 2 * 4),
        ("fsdp2", 4, (4 + 4 + 8) / 4 + 2 * 4),
    ],
)
def test_a_parameter_takes_what_its_strategy_says(
    strategy: str, processes: int, bytes_each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is frozen takes its weights in fp32; Muon keeps one moment of matrices; an EMA is sharded as weights are."""
    run = laid_out(processes, strategy=strategy)
    held = sum(head_state(run.launcher, run.trainer, COST).values())
    assert held == round(1000 * bytes_each)
    assert sum(head_state(run.launcher, run.trainer, COST._replace(frozen=1000)).values()) - held == 4000
    averaged = head_state(run.launcher, replace(run.trainer, ema=0.9), COST._replace(moments=1200))
    shards = {"ddp": 1, "zero2": 1}.get(strategy, processes)
    assert averaged["head: EMA"] == 4000 / shards
    assert averaged["head: optimiser"] == 4 * 1200 / (processes if strategy != "ddp" else 1)
    monkeypatch.setattr("train.plan.BUCKET", 300)  # of DeepSpeed, fewer than the parameters
    less = held - sum(head_state(run.launcher, run.trainer, COST).values())
    assert less == (2 * 4 * 700 if strategy.startswith("zero") else 0)


@pytest.mark.parametrize(
    ("placed", "there", "gathered", "host"),
    [
        ({"placement": "replicate"}, 1600, 0, 0),
        ({"placement": "tensor_parallel"}, 1600 // 8, 0, 0),
        ({"placement": "tensor_parallel", "tensor_parallel": 4}, 1600 // 4, 0, 0),
        ({"placement": "fsdp"}, 1600 // 16, 320, 0),
        ({"placement": "device_map"}, 1600, 0, 0),
        ({"placement": "device_map", "devices": [0, *range(2, 17)]}, 800, 0, 0),
        ({"placement": "device_map", "devices": [1, 2, 3, 4, 5, 6, 7, 8]}, 0, 0, 0),
        ({"placement": "offload"}, 320, 0, 1600),
        ({"placement": "offload", "memory_gb": 6e-7}, 600 + 320, 0, 1000),
        ({"placement": "offload", "offload": "disk"}, 320, 0, 0),
    ],
)
def test_a_placement_cuts_the_layers(placed: dict[str, Any], there: int, gathered: int, host: int) -> None:
    run = laid_out(8, 2)
    run = replace(run, model=replace(run.model, **placed))
    held, whole, offloaded = target_state(run, SHAPE, 1600, 2)
    assert (held["target: layers"], whole, offloaded) == (there, gathered, host)
    part = {"tensor_parallel": placed.get("tensor_parallel", 8), "fsdp": 16}.get(placed["placement"])
    ends = 2 * SHAPE.embeddings
    assert held["target: embedding, lm_head"] == ends + (ends // part if part else 0)


def test_a_mask_is_counted_where_there_is_one() -> None:
    masked = replace(SHAPE, packs=False)
    assert masked.working(64, 32, 2, 0) - SHAPE.working(64, 32, 2, 0) == 64 * 32 * 5


def test_a_device_is_known_by_the_name_of_its_driver() -> None:
    for driver, name in {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-40GB": "a100_40", "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA L4": "l4", "NVIDIA L40S": "l40s", "NVIDIA GH200 480GB": "h200",
    }.items():  # fmt: skip
        assert peak_of(driver) == preset(name).tflops, driver
    assert peak_of("Riva TNT2") is None
    assert peak_of("NVIDIA A10G") is None, "no A10"
