"""Where settings are compared, each field counts: a new one changes the comparison, or is named here as without effect.

Every field of a record is turned in its turn, so that no condition of a tuple stands for the others.
"""

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.batches import Batches, Packed
from data.features.store import MUST_AGREE, FeatureStore, StoreSpec
from data.text.prompts import cache_key
from heads.formats.store import TargetSpec, assert_same_target
from inference.decode import RequestParams
from inference.drafters.policy import TreeConfig
from inference.protocol import DraftPlan
from inference.step import DeviceStep
from inference.verification.sample import Sampling
from tests import toys
from tests.data import stores
from tests.train import jobs
from train import checkpoint
from train.config import RunConfig
from train.loop import AcceptanceEvaluator
from train.start import LoraAdapterConfig

# Values of fields that the turned one of their type would not be allowed in.
ALLOWED: dict[str, Any] = {
    "optimizer": "adamw", "precision": "bf16", "on_bad_step": "stop", "spike": 9.0, "trackers": ["tensorboard"],
    "rule": "coupled", "sampling": Sampling(0.5, 0, 1.0), "stop": ("x",), "dtype": "fp8",
    "turns": "last", "reasoning": "cut", "on_bad": "fail", "where": {"a": 1}, "layers": (0, 1),
    "betas": (0.5, 0.6), "kind": "static",
    "paths": [[0], [1]], "widths": [2], "weights": [2.0], "path": "other", "prompts": "other", "quantize": "int8",
}  # fmt: skip


def turned(record: Any, name: str) -> Any:
    """Return a record with another value of a field."""
    value = getattr(record, name)
    if name not in ALLOWED or isinstance(value, int):
        kinds: dict[type, Callable[[Any], Any]] = {
            bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: (x + 1) / 2 if x != 1 else 0.5,
            str: lambda x: f"{x}x", type(None): lambda _: 3, list: lambda x: [*x, 0],
        }  # fmt: skip
        return replace(record, **{name: kinds[type(value)](value)})
    return replace(record, **{name: ALLOWED[name]})


def without_effect(record: Any, of: Callable[[Any], Any]) -> set[str]:
    """Return the fields of a record that `of` it does not change with."""
    before = of(record)
    return {field.name for field in fields(record) if of(turned(record, field.name)) == before}


@pytest.fixture(scope="module")
def run() -> RunConfig:
    return jobs.configured(["head=mtp", "data.path=x", "trainer.micro_tokens=512"])


def batches(**changed: Any) -> Batches:
    packed = Packed(torch.arange(12).view(2, 6), torch.zeros(2, 6, dtype=torch.long), torch.ones(2, 6).long())
    return Batches(packed._replace(**changed), 2, 2, 0, 0, 1)


def test_a_run_goes_on_with_the_settings_that_it_began_with(run: RunConfig) -> None:
    """Of the trainer's fields some identify a run, some are reported, some tell what the best τ was measured on."""
    prompts = [toys.prompt(seed) for seed in range(9)]
    settled = without_effect(run.trainer, lambda trainer: checkpoint.settings(trainer, {}, "a", batches()))
    reported = without_effect(run.trainer, lambda trainer: checkpoint.numerics(trainer, {}, "ddp", 1))
    measured = without_effect(
        run.trainer,
        lambda trainer: AcceptanceEvaluator(toys.target(), prompts, trainer, toys.TREES["chain"], "x").eval_settings,
    )
    every = {field.name for field in fields(run.trainer)}
    assert every - settled == {"batch_tokens", "seed", "optimizer", "ema"}
    assert every - reported == {
        "steps", "lr", "lr_width", "min_lr", "warmup", "cooldown", "betas", "momentum", "weight_decay", "clip",
        "precision", "micro_tokens", "spike",
    }  # fmt: skip
    assert every - measured == {"eval_prompts", "eval_tokens", "seed"}
    assert settled & reported & measured == {
        "recompute", "compile", "eval_every", "save_every", "keep", "patience", "log_every",
        "trackers", "peak_tflops", "on_bad_step", "bad_steps", "timeout",
    }  # fmt: skip
    none = without_effect(
        TreeConfig("chain", 2, 2, 2, [[0]], [1]),
        lambda tree: AcceptanceEvaluator(toys.target(), prompts, run.trainer, tree, "x").eval_settings,
    )
    assert none == set()


def test_other_data_another_head_and_another_target_are_another_run(run: RunConfig) -> None:
    peft = LoraAdapterConfig("lora", 2, 4, 0.0, rslora=False, target_modules=None)

    def identity(
        head: Any = run.head, peft: Any = peft, target: str = "a", of: Batches | None = None
    ) -> dict[str, Any]:
        return checkpoint.settings(run.trainer, {"head": head, "peft": peft}, target, of or batches())

    def numerics(loss: Any, strategy: str = "ddp", world: int = 1) -> dict[str, Any]:
        return checkpoint.numerics(run.trainer, loss, strategy, world)

    assert without_effect(run.head, identity) == set()
    assert without_effect(peft, lambda peft: identity(peft=peft)) == set()
    token, document, mask = batches().packed
    for other in ({"token": token + 1}, {"document": document + 1}, {"loss_mask": mask * (token != 3)}):
        assert "data's fingerprint" in checkpoint.differences(identity(), identity(of=batches(**other)))
    shorter = {name: tensor[:, :5] for name, tensor in batches().packed._asdict().items()}
    assert "data.length (6, now 5)" in checkpoint.differences(identity(), identity(of=batches(**shorter)))
    assert checkpoint.differences(identity(), identity(target="b")) == 'target\'s fingerprint ("a", now "b")'
    assert checkpoint.differences(numerics({"loss": 1}), numerics({"loss": 2}, "fsdp2", 2)) == (
        'loss (1, now 2), processes (1, now 2), strategy ("ddp", now "fsdp2")'
    )


def test_what_is_not_sampled_alike_shares_no_step_and_no_graph() -> None:
    """Whichever of the two comes first; what a sequence keeps for itself shares a step."""
    target, cache = SimpleNamespace(longrope=None), SimpleNamespace(length=9)
    step: Any = SimpleNamespace(
        compiles=False, fixed_shapes=True, masks_eos=False, has_idle=False, plan=DraftPlan(tree_id=1), target=target
    )
    one = RequestParams(9, Sampling(0.8, 5, 0.9, 0.1, 1.2))

    def alike(other: RequestParams) -> bool:
        pairs: Any = [
            [SimpleNamespace(params=each, cache=cache) for each in pair] for pair in ((one, other), (other, one))
        ]
        step.current, (first, second) = pairs[0], pairs
        groups = DeviceStep.groups(step, first)
        step.current = second
        assert len(groups) == len(DeviceStep.groups(step, second))
        return len(groups) == 1

    alone = {"max_new_tokens", "stop", "seed", "lossy", "min_new_tokens", "keep_passes"}
    assert without_effect(one, alike) == alone
    assert without_effect(one, lambda other: DeviceStep.graph_key(step, 4, other)) == alone
    assert without_effect(one.sampling, lambda sampling: alike(replace(one, sampling=sampling))) == set()
    for change in ({"masks_eos": True}, {"has_idle": True}, {"plan": DraftPlan(tree_id=2)}):
        assert DeviceStep.graph_key(SimpleNamespace(**vars(step) | change), 4, one) != DeviceStep.graph_key(
            step, 4, one
        )
    assert DeviceStep.graph_key(step, 5, one) != DeviceStep.graph_key(step, 4, one)


def refuses(check: Callable[[], Any]) -> bool:
    try:
        check()
    except ValueError:
        return True
    return False


def test_what_is_stored_belongs_to_its_own_target_and_data(run: RunConfig, tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path, stores.spec())
    assert without_effect(stores.spec(), lambda spec: refuses(lambda: store.check(spec))) == {"name", "shard_rows"}
    assert MUST_AGREE.keys() | {"name", "shard_rows"} == {field.name for field in fields(StoreSpec)}
    spec = TargetSpec("a", 5, 6, 7, "print", None)
    named = without_effect(spec, lambda other: refuses(lambda: assert_same_target(tmp_path, spec, other)))
    assert named == {"name", "adapter"}  # an adapter changes the fingerprint
    data, chat = replace(run.data, path="x", weights=[1.0], min_tokens=1, limit=4), toys.tokenizer()
    assert without_effect(data, lambda data: cache_key(data, chat, ["a"])) == {"length", "cache"}
    assert asdict(data).keys() >= {"turns", "reasoning"}
    assert cache_key(data, chat, ["a"]) != cache_key(data, chat, ["b"])
