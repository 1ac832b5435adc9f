"""A checkpoint that is quantised already is planned with its own bytes, and only where loading would place it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import LlamaConfig

from tests.train import jobs
from train.planning import check
from train.planning.plan import plan
from train.planning.resolve import resolve_placement, with_processes
from train.planning.shapes import target_shape
from train.planning.table import advice, table

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GROUPS: dict[str, Any] = {"group_0": {"weights": {"num_bits": 8}}, "group_1": {"weights": {"num_bits": 4}}}
SMALL = ("head=eagle", "data.length=64", "trainer.batch_tokens=64", "trainer.micro_tokens=64", "eval.prompts=0")


def saved(folder: Path, quantization: dict[str, Any] | None) -> str:
    """Save the configuration alone of a target of two layers, quantised in this way, and return its override."""
    config = LlamaConfig(vocab_size=2048, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2).to_dict()
    extra = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | extra))
    return f"model.path={folder}"


def run(*overrides: str) -> Any:
    return with_processes(jobs.configured([*SMALL, "device=h100", *overrides]))


@pytest.mark.parametrize(
    ("quantization", "size", "said"),
    [
        (None, 2.0, None),
        (AWQ, 0.56, "awq, 0.56 bytes"),
        ({"quant_method": "gptq", "bits": 8}, 1.0, "gptq, 1.00 bytes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1.0, "fp8, 1.00 bytes"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 0.56, "bitsandbytes, 0.56"),
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, 1.0, "compressed-tensors, 1.00 bytes"),
        ({"quant_method": "mxfp4"}, 0.53, "mxfp4, 0.53 bytes"),
        ({"quant_method": "hqq", "bits": True}, 2.0, "hqq, counted in full: it names no bits"),
        ({"quant_method": "quark", "config_groups": [3]}, 2.0, "counted in full: it names no bits"),
    ],
)
def test_a_weight_takes_what_its_checkpoint_says(
    quantization: dict[str, Any] | None, size: float, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.planning.shapes.find_spec", lambda name: name)
    whole = resolve_placement(run(saved(tmp_path, quantization), "model.placement=replicate"))
    planned, inner = plan(whole), target_shape(whole.model).inner
    assert planned["devices"][0].resident["target: layers"] == pytest.approx(size * inner, abs=1)
    console = Console(width=160)
    with console.capture() as shown:
        console.print(table(whole, planned))
    assert ("the checkpoint is quantised" in shown.get()) == (said is not None)
    assert said is None or said in shown.get()


def test_what_is_loaded_whole_is_counted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.planning.shapes.find_spec", lambda _: None)
    for quantization, device, said in (
        ({"quant_method": "mxfp4"}, "device=h100", "without the package kernels it is loaded whole"),
        ({"quant_method": "fp8"}, "device=cpu", "a CPU loads it whole"),
    ):
        words = saved(tmp_path, quantization), device, "model.placement=replicate", "model.dtype=bfloat16"
        planned = plan(resolve_placement(run(*words)))
        parameters = target_shape(run(*words).model).inner
        assert planned["devices"][0].resident["target: layers"] == 2 * parameters
        assert said in planned["quantization"]


def test_it_goes_only_where_loading_places_it(tmp_path: Path) -> None:
    """And no change is suggested that loading refuses."""
    words = saved(tmp_path, AWQ), "device.memory_gb=1.1"
    placed = resolve_placement(run(*words))
    planned = plan(placed)
    assert not planned["fits"]
    assert placed.model.placement in {"replicate", "device_map"}
    suggested = " ".join(change.overrides for change in advice(placed, planned))
    assert "trainer.optimizer" in suggested
    assert "model." not in suggested


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.placement=offload",), "cannot shard or move quantised weights (by its checkpoint)"),
        (("model.placement=fsdp", "launcher.num_processes=2"), "cannot shard or move quantised weights"),
        (("model.quantize=int8", "model.placement=device_map"), "is quantised already (awq); leave model.quantize out"),
    ],
)
def test_what_loading_refuses_is_refused_before(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    given = run(saved(tmp_path, AWQ), *words)
    for refuses in (lambda: plan(resolve_placement(given)), lambda: check.check_target(given)):
        with pytest.raises(ValueError, match=re.escape(said)) as error:
            refuses()
        assert "\n" not in str(error.value)


def test_its_embeddings_bring_its_layers(tmp_path: Path) -> None:
    """What is quantised is loaded whole, even where a store has the features."""
    stored = "features=stored", "trainer.eval_prompts=0", "features.path=x", "model.placement=replicate"
    held = [
        plan(resolve_placement(run(saved(tmp_path, quantization), *stored)))["devices"][0].resident
        for quantization in (None, AWQ)
    ]
    assert ["target: layers" in sizes for sizes in held] == [False, True]
