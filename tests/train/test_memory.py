"""What a plan is made of, on cases that can be counted by hand, and against what really runs."""

import collections
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch._subclasses import FakeTensorMode

from heads.base import LayerShape
from heads.common.resolvers import ROOT, register_resolvers
from heads.modules.attention import BLOCK, Pattern
from heads.modules.layers import Recomputing
from heads.modules.vocab import GradientSum
from inference.target.placement import HERE
from inference.target.target import Target
from tests import families, toys
from tests.train import jobs
from train.adapt import WholeConfig
from train.config import TrainerConfig, run_config
from train.distributed.processes import LARGE
from train.losses import ObjectiveConfig, OnPolicyConfig
from train.objective import weights
from train.planning import memory
from train.planning.memory import Layout, MemoryUse, head_state, measure_stage, pass_stage, target_state, total
from train.planning.path import path_of
from train.planning.plan import by_driver_name
from train.planning.shapes import TargetShape, target_shape
from train.planning.trace import NONE, Job, Shadow, Trace, trace
from train.step import Loss
from train.tracking.flops import Flops

MIB = 2**20
Counter: Any = Flops  # a dispatch mode is a context of an untyped kind
ON_POLICY = OnPolicyConfig(0, 1, 64, 0.0, "text", 1.0, None)
OBJECTIVE = ObjectiveConfig({"soft_ce": 1.0}, "decay", 1.0, 0.5, 4, "token", None, 0.0, 3.0, 10, None, ON_POLICY)
SHAPE = TargetShape(
    LayerShape(8, 2, 16, 512), 512, 10, 128, 1000, 2 * 128 * 1000, 10_000_000, 4_000_000, True, 10, 0, True, None,
)  # fmt: skip


def trainer(*overrides: str) -> TrainerConfig:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return run_config(compose("train", jobs.with_head(overrides))).trainer


TRAINER, RECOMPUTING = trainer(), trainer("trainer.recompute=true")


def size(large: int, small: int) -> Any:
    return collections.Counter(large=large, small=small)


TRACE = Trace(1000, 1000, 0, 3, size(4000, 0), 200, NONE, NONE, 0, NONE, 0)


def followed(run: Any) -> Shadow:
    with FakeTensorMode(), Shadow() as shadow:
        run()
    return shadow


def test_a_trace_counts_what_is_there_at_once() -> None:
    def run() -> None:
        x = torch.empty(MIB)  # 4 MiB
        for _ in range(3):
            y = x + 1
            del y

    assert followed(run).peak == size(0, 8 * MIB)


def test_views_and_results_in_place_take_nothing() -> None:
    shadow = followed(lambda: torch.empty(MIB).add_(1).view(2, -1).t().mul_(2))
    assert (shadow.peak, shadow.live) == (size(0, 4 * MIB), NONE)


def test_what_was_there_before_does_not_count() -> None:
    with FakeTensorMode():
        there = torch.empty(MIB)
        with Shadow() as shadow:
            there.add_(1).view(2, -1)
    assert shadow.peak == NONE


def test_large_and_small_blocks_have_moments_of_their_own() -> None:
    def run() -> None:
        for count in (LARGE // 4, 10):
            torch.empty(count)

    shadow = followed(run)
    assert (shadow.peak, shadow.most) == (size(LARGE, 40), LARGE)


def job(target: Target, name: str, **changes: Any) -> Job:
    made = Job(
        toys.head(name, target).config, WholeConfig("none"), OBJECTIVE, TRAINER, target.embeddings.config,
        torch.float32, False, "cpu", 2, 64, True,
    )  # fmt: skip
    return made._replace(**changes)


@pytest.mark.parametrize("name", list(toys.HEAD_CONFIGS))
def test_the_operations_are_those_of_a_real_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "block":  # its attention leaves out rows before a block's documents, which numbers alone show
        monkeypatch.setattr(Pattern, "lows", property(lambda seen: [0] * len(seen.first.split(BLOCK, 1))))
    target = toys.target()
    head: Any = toys.head(name, target).float().requires_grad_(True)
    depths = min(4, head.max_depth)
    config = ObjectiveConfig(**{**vars(OBJECTIVE), "depths": depths})
    token, document = torch.randint(toys.VOCAB, (2, 64)), torch.zeros(2, 64, dtype=torch.long)
    features = target.features(token, document, head.feature_layers)
    weight = weights(document, torch.ones_like(token), None, config).row
    with Counter() as count:
        loss, _ = Loss(head, config, compiled=False)(features, weight, None)
        loss.backward()
    wanted = trace(job(target, name, head=head.config, objective=config)).flops
    assert wanted == pytest.approx(count.total, rel=0.05)


def test_recomputation_keeps_less_and_computes_more() -> None:
    target = toys.target()
    kept, again = (trace(job(target, "eagle", trainer=each)) for each in (TRAINER, RECOMPUTING))
    assert again.activations.total() < kept.activations.total()
    assert again.flops > kept.flops


def test_what_is_recomputed_is_what_a_run_recomputes() -> None:
    """Norms and projections too, and not the MLPs alone."""
    target = toys.target()
    head: Any = toys.head("eagle", target).float().requires_grad_(True)
    for module in head.modules():
        if isinstance(module, Recomputing):
            module.recompute = True
    token, document = torch.randint(toys.VOCAB, (2, 64)), torch.zeros(2, 64, dtype=torch.long)
    weight = weights(document, torch.ones_like(token), None, OBJECTIVE).row
    with Counter() as count:
        features = target.features(token, document, head.feature_layers)
        Loss(head, OBJECTIVE, compiled=False)(features, weight, None)[0].backward()
    with Counter() as extracted:
        target.features(token, document, head.feature_layers)
    planned = trace(job(target, "eagle", trainer=RECOMPUTING)).flops
    assert planned == pytest.approx(count.total - extracted.total, rel=0.02)


def test_on_a_gpu_the_attention_keeps_the_keys_of_all_steps_side_by_side() -> None:
    """The kernel's own inputs, at depth d those of d rows for each; blocks keep each row's once.

    The keys as they were remain as well, since they were rotated in one tensor with the queries.
    """
    target, depths = toys.target(), OBJECTIVE.depths
    config = replace(job(target, "eagle3").head, head_dim=128)  # so that its masks are little beside them
    blocks, fused = (trace(job(target, "eagle3", head=config, device=device)) for device in ("cpu", "cuda"))
    of_rows = 4 * 2 * (2 * 64) * target.embeddings.layer.num_kv_heads * 128  # keys and values of a step
    kept = fused.activations.total() - blocks.activations.total()
    assert kept == pytest.approx((depths * (depths + 1) / 2 - depths / 2) * of_rows, rel=0.02)


@pytest.mark.parametrize(("device", "taken"), [("cpu", 2 * 700 * 40), ("cuda", 0)])
def test_a_gpu_sums_the_lm_heads_gradient_without_a_product_beside_it(device: str, taken: int) -> None:
    with FakeTensorMode(), path_of(device):
        gradient = GradientSum(torch.empty(700, 40))
        products = torch.empty(700, 3, dtype=torch.bfloat16), torch.empty(3, 40, dtype=torch.bfloat16)
        with Shadow():
            gradient.add(*products)
        with Shadow() as shadow:
            gradient.add(*products)
    assert shadow.peak.total() == taken


def test_an_optimiser_takes_what_its_step_takes() -> None:
    """On a CPU AdamW makes a tensor after the other, and has that of the parameter before still; a fused one none."""
    target = toys.target()
    head: Any = toys.head("eagle3", target)
    largest = sorted(4 * p.numel() for p in head.parameters())
    on_cpu, on_cuda = (trace(job(target, "eagle3", device=device)).update for device in ("cpu", "cuda"))
    assert 2 * largest[-1] < on_cpu.total() <= 2 * largest[-1] + largest[-2]
    assert on_cuda.total() == 0
    muon = trace(job(target, "eagle3", trainer=trainer("trainer.optimizer=muon"), device="cuda"))
    assert muon.update.total() > 0


def test_memory_grows_with_the_rows_alone() -> None:
    target = toys.target()
    one, two, four = (trace(job(target, "eagle", rows=rows)).activations.total() for rows in (2, 4, 8))
    assert four - two == pytest.approx(2 * (two - one), rel=0.01)
    more = replace(OBJECTIVE, anchors=65)  # than a row has, which are then all drafted from
    assert trace(job(target, "eagle", objective=more)) == trace(job(target, "eagle"))


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
    layout = Layout(strategy, HERE, processes, 1, processes, 1)
    held = head_state(TRACE, layout, False, False)
    assert sum(each.total() for each in held.values()) == round(1000 * bytes_each)
    monkeypatch.setattr(memory, "BUCKET", 300)  # of DeepSpeed, fewer than the parameters
    less = total(held) - total(head_state(TRACE, layout, False, False))
    assert less == (2 * 4 * 700 if strategy.startswith("zero") else 0)


def test_what_is_frozen_takes_its_weights_alone_in_fp32() -> None:
    layout = Layout("ddp", HERE, 1, 1, 1, 1)
    without, frozen = (total(head_state(TRACE._replace(frozen=n), layout, False, False)) for n in (0, 1000))
    assert frozen - without == 4000


def test_muon_keeps_one_moment_of_matrices() -> None:
    held = head_state(TRACE, Layout("ddp", HERE, 1, 1, 1, 1), True, True)
    assert held["head: optimiser"].total() == 4 * 800 + 8 * 200
    assert held["head: running average"].total() == 4000
    assert head_state(TRACE, Layout("fsdp2", HERE, 4, 1, 4, 1), True, True)["head: running average"].total() == 1000


def test_layers_lie_where_they_are_told_to() -> None:
    """A device map over others than the trainer's; layers that stay, or that lie on the disk, under offload."""

    def there(device: int, processes: int = 1, **given: Any) -> tuple[int, int]:
        layout = Layout("ddp", replace(HERE, **given), processes, 1, processes, 1)
        held, _, host = target_state(SHAPE, layout, 1600, 2, device)
        return held.get("target: layers", NONE).total(), host

    beside: dict[str, Any] = {"placement": "device_map", "devices": [1, 2]}
    assert [there(device, **beside)[0] for device in range(3)] == [0, 800, 800]
    shared: dict[str, Any] = {"placement": "device_map", "devices": [0, 2, 4, 5]}
    assert [there(device, 2, **shared)[0] for device in range(6)] == [800, 0, 800, 0, 800, 800]
    assert there(0, placement="offload", memory_gb=6e-7) == (600 + 320, 1000)
    assert there(0, placement="offload", offload="disk") == (320, 0)


def test_a_group_holds_one_other_turn_beside_its_own_rows() -> None:
    layout = Layout("ddp", replace(HERE, placement="tensor_parallel"), 4, 1, 4, 4)
    alone, found = (pass_stage(SHAPE, each, 64, 32, 2, 3, False) for each in (layout._replace(where=HERE), layout))
    assert found["features"] == found["features of another's turn"] == alone["features"]
    assert alone["features"].total() == 64 * 2 * 128 * (3 + 1)  # of the layers that the head reads, and the last
    wide, norm = 2 * 128 + 3 * 512, 6 * 128  # values of a token in the MLP, a quarter of whose inner states are here
    working = [each["target: activations, mask"].total() // (64 * 2) - 3 * 128 for each in (alone, found)]
    assert working == [wide, norm]
    assert {*pass_stage(SHAPE, layout, 64, 32, 2, 3, True)} == {*found, "features of the micro-batch before"}


@pytest.mark.parametrize("heap", [True, False])
def test_a_measurement_holds_a_copy_of_the_head_and_keys_in_doubled_buffers(heap: bool) -> None:
    layout = Layout("ddp", replace(HERE, placement="tensor_parallel"), 4, 1, 4, 4)
    copy, keys, _ = measure_stage(SHAPE, layout, TRACE, 7, 2, heap).values()
    assert (copy.total(), keys.total()) == (1000 * (2 + 4 * heap), SHAPE.cache(14, 2) // 4)


def test_a_mask_is_counted_where_there_is_one() -> None:
    masked = replace(SHAPE, packs=False)
    assert masked.working(64, 32, 2, 0) - SHAPE.working(64, 32, 2, 0) == 64 * 32 * 5


@pytest.mark.parametrize(
    ("placement", "there", "gathered", "host"),
    [
        ("replicate", 1600, 0, 0),
        ("tensor_parallel", 1600 // 8, 0, 0),
        ("fsdp", 1600 // 16, 320, 0),
        ("device_map", 1600, 0, 0),
        ("offload", 320, 0, 1600),
    ],
)
def test_a_placement_cuts_the_layers(placement: str, there: int, gathered: int, host: int) -> None:
    layout = Layout("ddp", replace(HERE, placement=placement), 8, 2, 8, 8)
    held, whole, offloaded = target_state(SHAPE, layout, 1600, 2)
    assert held["target: layers"].total() == there
    assert held["target: embedding, lm_head"].total() == 2 * SHAPE.embeddings
    part = {"tensor_parallel": 8, "fsdp": 16}.get(placement)
    assert held.get("target: its own part of these", NONE).total() == (2 * SHAPE.embeddings // part if part else 0)
    assert (total(whole), offloaded) == (gathered, host)


def test_stages_do_not_add_up() -> None:
    stages = {"one": {"x": size(50, 1)}, "two": {"y": size(5, 30), "z": size(1, 0)}}
    held = MemoryUse(1000, {"a": size(100, 10)}, stages, {})
    assert held.asked() == held.peak(0.0, heap=False) == 1000 + 110 + 51
    assert held.peak(0.1, heap=False) == 1000 + round(1.1 * 161)
    assert held.peak(1.0, heap=True) == 1000 + 110 + 50 + 2 * 30


def test_the_products_of_a_pass_are_counted() -> None:
    """A CPU's attention has no formula in torch's register, so the products alone are compared."""
    target = toys.target()
    token, document = torch.randint(toys.VOCAB, (2, 64)), torch.zeros(2, 64, dtype=torch.long)
    with Counter() as count:
        target.features(token, document, ())
    inner = sum(p.numel() for p in target.decoder_layers.parameters())
    shape = replace(SHAPE, active=inner, layers=0)
    assert shape.flops(128, 64) == pytest.approx(count.total, rel=0.05)


def test_a_pass_over_a_target_counts_products_and_attention() -> None:
    assert SHAPE.flops(64, 32) == 2 * 4_000_000 * 64 + 10 * 2 * 2 * 64 * 32 * 8 * 16
    assert SHAPE.cache(7, 2) == 2 * 10 * 2 * 16 * 7 * 2


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100_40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GH200 480GB", "h200"),
    ],
)
def test_a_device_is_known_by_the_name_of_its_driver(driver: str, name: str) -> None:
    found = by_driver_name(driver)
    assert found is not None
    assert (found.name, found.type) == (name, "cuda")


def test_an_unknown_device_is_none() -> None:
    assert by_driver_name("Riva TNT2") is None
    assert by_driver_name("NVIDIA A10G") is None, "no A10"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "falcon_h1"])
def test_a_plan_counts_the_states_of_recurrent_layers(name: str, tmp_path: Path) -> None:
    families.config(name).save_pretrained(tmp_path)
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        shape = target_shape(run_config(compose("train", [f"model.path={tmp_path}", "head=eagle"])).model)
    target = families.target(name, torch.bfloat16)
    cache: Any = target.cache()
    target.prefill(torch.tensor(toys.prompt(0)), cache)
    states = [
        state
        for layer in cache.recurrent.values()
        for held in (layer.conv_states, layer.recurrent_states)
        for state in held.values()
        if state is not None
    ]
    assert shape.states == sum(state.numel() * state.element_size() for state in states)
    assert shape.caching == len(cache.attention)
    assert shape.cache(10, 2) == 2 * shape.caching * 16 * 10 * 2 + 2 * shape.states
