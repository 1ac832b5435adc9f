"""Adapting a head by low-rank factors: it starts as it was, trains them alone, and leaves the trainer a plain head."""

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from benchmarks.training_kernels import embeddings_of
from heads import HEADS
from heads.base import Features, frozen_count, parameter_count
from heads.common.resolvers import ROOT
from heads.eagle import Eagle
from heads.formats.store import save_head
from inference.target.placement import REPLICATE
from inference.target.target import Target
from tests import toys
from tests.train import jobs
from train.config import RunConfig
from train.objective import chunked, loss_weights, objective, trainable
from train.optim import Ema, optimizer
from train.plan import plan
from train.resolve import on_machine
from train.run import train
from train.start import LoraAdapterConfig, adapt, check_init, merged_copy, peft_config

FACTORS = LoraAdapterConfig("lora", 4, 8, 0.0, False, None)
SEVERAL = ["medusa", "mtp", "mlp tied", "eagle pruned", "eagle3 deep", "block of DSpark"]
TREE = {"kind": "dynamic", "depth": 4, "top_k": 3, "nodes": 9, "paths": [], "widths": []}


@functools.cache
def run(*overrides: str) -> RunConfig:
    return jobs.configured(overrides)


def batch(of: Target, head: Any) -> Features:
    token = torch.tensor([toys.prompt(5, 14), toys.prompt(6, 14)])
    return of.features(token, torch.zeros_like(token), head.feature_layers)


def logits(head: Any, features: Features) -> list[Tensor]:
    with torch.no_grad():
        return [head.compute_logits(draft.state, d) for d, draft in enumerate(head.unroll(features, 4), 1)]


def fresh(name: str, of: Target) -> Any:
    return toys.head(name, of).requires_grad_(True).train()


def take(head: Any, features: Features, steps: int, average: Ema, optim: Any) -> None:
    """Take steps of the real objective, chunk by chunk."""
    config = run("head=eagle3", "objective.depths=4").objective
    found = loss_weights(features.document, trainable(features.document, features.token * 0 + 1, 4), None, config)
    for _ in range(steps):
        drafts = head.unroll(features, 4)
        chunks = chunked(found.trained, 5, found.row.device)
        loss, _ = objective(head, drafts, features, found.row / found.normalizer[:, None, None], config, chunks)
        optim.zero_grad()
        loss.backward()
        optim.step()
        average.update(head)


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", SEVERAL)
def test_an_adapted_head_starts_as_it_was_and_ends_plain(name: str) -> None:
    target = toys.target(dtype=torch.float64)
    head = fresh(name, target)
    features = batch(target, head)
    before, whole = logits(head, features), parameter_count(head)
    kept = {key: value.clone() for key, value in head.state_dict().items()}
    torch.manual_seed(0)
    adapt(head, FACTORS)
    assert frozen_count(head) == whole
    assert all(torch.equal(*both) for both in zip(logits(head, features), before, strict=True))
    trainer = run(
        "trainer.lr=0.02", "trainer.ema=0.5", f"trainer.optimizer={'muon' if ' ' in name else 'adamw'}"
    ).trainer
    average = Ema(head, trainer.ema)
    take(head, features, 2, average, optimizer(head, trainer))
    after = head.state_dict()
    base = {key.replace(".base_layer.", "."): value for key, value in after.items() if ".lora_" not in key}
    assert base.keys() == kept.keys()
    assert all(torch.equal(base[key], kept[key]) for key in kept)
    now = logits(head, features)
    assert max(float((a - b).abs().max()) for a, b in zip(now, before, strict=True)) > 1e-3
    merged = merged_copy(head, after)
    assert merged.state_dict().keys() == kept.keys()
    for a, b in zip(logits(merged, features), now, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert average.weights.keys() == {key for key in after if ".lora_" in key}
    averaged = merged_copy(head, after | average.weights)
    assert not torch.equal(logits(averaged, features)[0], logits(merged, features)[0])


@pytest.mark.parametrize(("rslora", "factor"), [(False, 2.0), (True, 4.0)])
def test_chosen_layers_alone_are_adapted_and_scaled_as_asked(rslora: bool, factor: float) -> None:
    head = fresh("eagle", toys.target())
    adapt(head, replace(FACTORS, rslora=rslora, dropout=0.25, target_modules=["q_proj", "fc"]))
    adapted = {name: module for name, module in head.named_modules() if hasattr(module, "lora_A")}
    assert set(adapted) == {"fc", "layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"}
    assert (adapted["fc"].scaling, adapted["fc"].lora_dropout["default"].p) == ({"default": factor}, 0.25)


def test_bad_values_are_one_line() -> None:
    lora: dict[str, Any] = {"method": "lora", "rank": 4, "alpha": 8, "dropout": 0.0, "rslora": False}
    lora["target_modules"] = None
    for key, value in {"rank": 0, "dropout": 1.0, "method": "dora"}.items():
        with pytest.raises(ValueError, match=key) as error:
            peft_config(DictConfig({**lora, key: value}))
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"target_modules=\['nonesuch'\]: .* choose among fc, layers\.0\.self_attn"):
        adapt(fresh("eagle", toys.target()), replace(FACTORS, target_modules=["fc", "nonesuch"]))
    head = Eagle.Config(name="eagle", **toys.HEAD_CONFIGS["eagle"])
    for init in (None, "auto"):
        with pytest.raises(ValueError, match="init names none"):
            check_init(FACTORS, head, init, REPLICATE)
    check_init(FACTORS, head, "outputs/x", REPLICATE)
    check_init(peft_config(DictConfig({"method": "none"})), head, None, REPLICATE)


def test_a_plan_counts_the_factors() -> None:
    plans = (plan(on_machine(run("launcher=inline", "head=eagle", f"peft={method}"))) for method in ("none", "lora"))
    whole, adapted = (found.cost for found in plans)
    embeddings = embeddings_of(AutoConfig.from_pretrained(ROOT / "examples/tiny"), torch.float32)
    head = HEADS["eagle"](run("head=eagle").head, embeddings)
    adapt(head, peft_config(DictConfig(asdict(run("peft=lora").peft))))
    assert adapted.whole == whole.whole == whole.trained == frozen_count(head)
    assert adapted.trained == parameter_count(head) < whole.whole


def test_a_run_adapts_a_head_and_leaves_a_plain_one(tmp_path: Path) -> None:
    overrides = [*jobs.make(tmp_path), "trainer.eval_prompts=0", "eval.prompts=0", "trainer.steps=2", "head=hass"]
    target = Target.load(str(tmp_path / "target"), "float32", "cpu")
    save_head(tmp_path / "base" / "head", toys.head("hass", target), target.spec, TREE)
    out, words = tmp_path / "out", ["peft=lora", "peft.rank=4", "peft.dropout=0.2", "trainer.ema=0.5"]
    train(jobs.resolved([*overrides, *words, f"init={tmp_path / 'base'}", f"out={out}"]))
    base, ours = (load_file(each / "head" / "model.safetensors") for each in (tmp_path / "base", out))
    assert base.keys() == ours.keys()
    changed = {name for name in base if not torch.equal(base[name], ours[name])}
    assert changed == {name for name in base if "proj" in name or name == "fc.weight"}
    cost = json.loads((out / "training.json").read_text())
    assert cost["frozen_parameters"] == sum(each.numel() for name, each in base.items() if name != "vocab.ids")
    origin = json.loads((out / "provenance.json").read_text())
    assert (origin["init"], origin["peft"]["rank"]) == (str(tmp_path / "base"), 4)
    assert origin["micro_tokens"] == 64
