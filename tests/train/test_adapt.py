"""Adapting a head by low-rank factors: it starts as it was, trains them alone, and leaves the trainer a plain head."""

import functools
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from heads import HEADS
from heads.base import Features, frozen_count, parameter_count
from heads.common.resolvers import ROOT, register_resolvers
from heads.eagle import Eagle
from heads.formats.store import save_head
from inference.target.placement import REPLICATE
from inference.target.target import Target
from tests import toys
from tests.train import jobs
from train.config import RunConfig, run_config
from train.objective import chunked, loss_weights, objective
from train.optim import Ema, optimizer
from train.planning.plan import plan
from train.planning.shapes import embeddings_of
from train.start import LoraAdapterConfig, adapt, check_init, merged_copy, peft_config

FACTORS = LoraAdapterConfig("lora", 4, 8, 0.0, False, None)
EVERY = [*toys.HEAD_CONFIGS, *toys.OPTIONS]
TREE = {"kind": "dynamic", "depth": 4, "top_k": 3, "nodes": 9, "paths": [], "widths": []}


@functools.cache
def run(*overrides: str) -> RunConfig:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return run_config(compose("train", jobs.with_head(overrides)))


def batch(of: Target, head: Any) -> Features:
    token = torch.tensor([toys.prompt(5, 14), toys.prompt(6, 14)])
    return of.features(token, torch.zeros_like(token), head.feature_layers)


def logits(head: Any, features: Features) -> list[Tensor]:
    with torch.no_grad():
        return [head.compute_logits(draft.state, d) for d, draft in enumerate(head.unroll(features, 4), 1)]


def fresh(name: str, of: Target) -> Any:
    head: Any = toys.head(name, of).requires_grad_(True).train()
    return head


def take(head: Any, features: Features, steps: int, average: Ema, optim: Any) -> None:
    """Take steps of the real objective, chunk by chunk."""
    config = run("head=eagle3", "objective.depths=4").objective
    found = loss_weights(features.document, torch.ones_like(features.token), None, config)
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
@pytest.mark.parametrize("name", EVERY)
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
    take(head, features, 4, average, optimizer(head, trainer))
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
    cases = {"rank": 0, "alpha": 0, "dropout": 1.0, "method": "dora", "stepz": 1}
    for key, value in cases.items():
        with pytest.raises(ValueError, match=key) as error:
            peft_config(DictConfig({**lora, key: value}))
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"target_modules=\['nonesuch'\]: .* choose among fc, layers\.0\.self_attn"):
        adapt(fresh("eagle", toys.target()), replace(FACTORS, target_modules=["fc", "nonesuch"]))
    head = Eagle.Config(name="eagle", **toys.HEAD_CONFIGS["eagle"])
    with pytest.raises(ValueError, match="init names none"):
        check_init(FACTORS, head, None, REPLICATE)
    with pytest.raises(ValueError, match="init names none"):
        check_init(FACTORS, head, "auto", REPLICATE)
    check_init(FACTORS, head, "outputs/x", REPLICATE)
    check_init(peft_config(DictConfig({"method": "none"})), head, None, REPLICATE)


def test_a_plan_counts_the_factors() -> None:
    plans = (plan(run("launcher=inline", "head=eagle", f"peft={method}")) for method in ("none", "lora"))
    whole, adapted = (found.cost for found in plans)
    embeddings = embeddings_of(AutoConfig.from_pretrained(ROOT / "examples/tiny"), torch.float32)
    head = HEADS["eagle"](run("head=eagle").head, embeddings)
    adapt(head, peft_config(DictConfig(asdict(run("peft=lora").peft))))
    assert adapted.whole == whole.whole == whole.trained == frozen_count(head)
    assert adapted.trained == parameter_count(head) < whole.whole


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A toy target, a head for it, and the overrides of a run that adapts that head; dropout makes resuming hard."""
    folder = tmp_path_factory.mktemp("toy")
    overrides = jobs.make(folder)
    target = Target.load(str(folder / "target"), "float32", "cpu")
    save_head(folder / "base" / "head", toys.head("hass", target), target.spec, TREE)
    start = [f"init={folder / 'base'}", "head=hass", "peft=lora", "peft.rank=4", "peft.dropout=0.2", "trainer.ema=0.5"]
    return folder, [*overrides, *start, "trainer.steps=16"]


@pytest.mark.slow
def test_a_run_adapts_resumes_bit_for_bit_and_leaves_a_plain_head(toy: tuple[Path, list[str]]) -> None:
    folder, overrides = toy
    whole, out = folder / "whole", folder / "killed"
    printed = jobs.finish(jobs.start([*overrides, f"out={whole}"]))
    job = jobs.start([*overrides, f"out={out}"])
    while len(jobs.losses(out) if (out / "metrics.jsonl").exists() else {}) < 6:
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.02)
    job.send_signal(signal.SIGKILL)
    job.communicate(timeout=60)
    assert len(jobs.losses(out)) < 16, "the run was over before the signal: nothing was tested"
    jobs.finish(jobs.start([*overrides, f"out={out}", "resume=true"]))
    assert jobs.losses(out) == jobs.losses(whole)
    base, ours, theirs = (load_file(each / "head" / "model.safetensors") for each in (folder / "base", out, whole))
    assert base.keys() == ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    changed = {name for name in base if not torch.equal(base[name], ours[name])}
    assert changed == {name for name in base if "proj" in name or name == "fc.weight"}
    cost = json.loads((whole / "training.json").read_text())
    assert cost["frozen_parameters"] == sum(each.numel() for name, each in base.items() if name != "vocab.ids")
    assert f"{cost['parameters']:,} trained parameters beside {cost['frozen_parameters']:,}" in " ".join(
        printed.split()
    )
    origin = json.loads((whole / "provenance.json").read_text())
    assert (origin["init"], origin["peft"]["rank"]) == (str(folder / "base"), 4)
    assert origin["micro_tokens"] == 64
    row = json.loads((whole / "report.json").read_text())["rows"][-1]
    assert row["lossless"]["identical"] == row["lossless"]["checked"] > 0


@pytest.mark.slow  # resumes the run of the test above
def test_what_cannot_be_adapted_or_resumed_is_refused_in_one_line(toy: tuple[Path, list[str]]) -> None:
    folder, overrides = toy
    without = [each for each in overrides if not each.startswith("init=")]
    whole = [each for each in overrides if not each.startswith("peft")]
    cases = {
        "init names none": [*without, f"out={folder / 'x'}"],
        "peft.dropout (0.2, now null)": [*whole, f"out={folder / 'whole'}", "resume=true"],
    }
    running = {text: jobs.start(words) for text, words in cases.items()}
    for text, job in running.items():
        printed, _ = job.communicate(timeout=120)
        errors = [line for line in printed.splitlines() if line.startswith("error:")]
        assert (job.returncode, len(errors)) == (2, 1), printed
        assert text in errors[0]
