"""Plans of targets in host memory, which has to hold them, and of quantised ones, by the bytes of their weights."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from tests.train import jobs
from train.config import RunConfig
from train.planning import check
from train.planning.plan import GIB, SAFE, plan
from train.planning.resolve import resolve_placement, with_processes
from train.planning.shapes import target_shape
from train.planning.table import advice, in_words, table

SMALL = ("head=eagle", "data.length=64", "trainer.batch_tokens=64", "trainer.micro_tokens=64", "trainer.keep=1")
HERE = ("launcher.num_processes=1", "launcher.strategy=ddp", "device.count=1", "device.context_gb=0.1")


@pytest.fixture
def target(tmp_path: Path) -> str:
    """The override of a target whose layers are most of it."""
    LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=8
    ).save_pretrained(tmp_path)
    return f"model.path={tmp_path}"


def run(*overrides: str) -> RunConfig:
    return with_processes(jobs.configured([*SMALL, *overrides]))


def shown(given: RunConfig, planned: dict[str, Any]) -> str:
    console = Console(width=160)
    with console.capture() as text:
        console.print(table(given, planned))
    return text.get()


def at_a_machine(monkeypatch: pytest.MonkeyPatch, host: float) -> None:
    """Let the plan be made on a machine with an accelerator and so many bytes of host memory."""
    monkeypatch.setattr("train.planning.plan.device_named", lambda _: torch.device("cuda"))
    monkeypatch.setattr("train.planning.plan.host_bytes", lambda: round(host))


def test_layers_go_to_a_host_that_holds_them_and_else_stay_in_their_files(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_a_machine(monkeypatch, 100 * GIB)
    words = (target, *HERE, "eval.prompts=0", "trainer.eval_prompts=0")
    whole, streamed = (
        plan(resolve_placement(run(*words, "device.memory_gb=80", f"model.placement={kind}")))
        for kind in ("replicate", "offload")
    )
    small = f"device.memory_gb={(whole['peak_bytes'] + streamed['peak_bytes']) / 2 / SAFE / GIB}"
    needed = streamed["host"].peak / SAFE
    for host, disk in ((needed + GIB / 100, "cpu"), (needed - GIB / 100, "disk")):
        at_a_machine(monkeypatch, host)
        placed = resolve_placement(run(*words, small))
        assert (placed.model.placement, placed.model.offload) == ("offload", disk)
        assert f"model.placement=offload model.offload={disk} " in in_words(placed)
        assert plan(placed)["fits"]
    at_a_machine(monkeypatch, streamed["host"].peak / 2)  # nothing fits, and the host lacks most
    placed = resolve_placement(run(*words, f"device.memory_gb={streamed['peak_bytes'] / GIB}"))
    assert (placed.model.placement, placed.model.offload) == ("offload", "disk")


def test_what_the_host_does_not_hold_does_not_fit(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placement that is given stays, and the plan says what to change."""
    words = (target, *HERE, "device.memory_gb=80", "model.placement=offload", "eval.gate_dtype=bfloat16")
    at_a_machine(monkeypatch, 100 * GIB)
    room = plan(resolve_placement(run(*words, "model.offload=disk")))["host"].peak
    at_a_machine(monkeypatch, room)
    given = resolve_placement(run(*words))
    planned = plan(given)
    assert all(device.utilization <= 1 for device in planned["devices"])
    assert not planned["fits"]
    changes = {change.overrides: change for change in advice(given, planned)}
    assert changes["model.offload=disk"].fits
    text = shown(given, planned)
    assert re.search(rf"host memory of each node: \d.* of {room / GIB:.2f} GiB, does NOT fit", text)
    assert "the largest saving of host memory first" in text


def test_of_another_machine_a_plan_says_how_much_it_needs(target: str) -> None:
    """The final evaluation included, in whose dtype the layers may take twice as much."""
    needed = []
    for gate in ("bfloat16", "float32"):
        given = resolve_placement(run(target, "device=h100", "model.placement=offload", f"eval.gate_dtype={gate}"))
        planned = plan(given)
        assert planned["fits"]
        needed.append(planned["host"].peak)
        assert f"it fits if a node has {-(-needed[-1] // GIB)} GiB of host memory; without plan=true" in shown(
            given, planned
        )
    assert needed[1] > needed[0]


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GROUPS: dict[str, Any] = {"group_0": {"weights": {"num_bits": 8}}, "group_1": {"weights": {"num_bits": 4}}}


def saved(folder: Path, quantization: dict[str, Any] | None) -> str:
    """Save the configuration alone of a target of two layers, quantised in this way, and return its override."""
    config = LlamaConfig(vocab_size=2048, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2).to_dict()
    extra = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | extra))
    return f"model.path={folder}"


def there(*overrides: str) -> RunConfig:
    """Return a run on another machine."""
    return run("device=h100", "eval.prompts=0", *overrides)


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
    whole = resolve_placement(there(saved(tmp_path, quantization), "model.placement=replicate"))
    planned, inner = plan(whole), target_shape(whole.model).inner
    assert planned["devices"][0].resident["target: layers"] == pytest.approx(size * inner, abs=1)
    text = shown(whole, planned)
    assert ("the checkpoint is quantised" in text) == (said is not None)
    assert said is None or said in text


def test_what_is_loaded_whole_is_counted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.planning.shapes.find_spec", lambda _: None)
    for quantization, device, said in (
        ({"quant_method": "mxfp4"}, "device=h100", "without the package kernels it is loaded whole"),
        ({"quant_method": "fp8"}, "device=cpu", "a CPU loads it whole"),
    ):
        words = saved(tmp_path, quantization), device, "model.placement=replicate", "model.dtype=bfloat16"
        planned = plan(resolve_placement(there(*words)))
        parameters = target_shape(there(*words).model).inner
        assert planned["devices"][0].resident["target: layers"] == 2 * parameters
        assert said in planned["quantization"]


def test_it_goes_only_where_loading_places_it(tmp_path: Path) -> None:
    """And no change is suggested that loading refuses."""
    words = saved(tmp_path, AWQ), "device.memory_gb=1.1"
    placed = resolve_placement(there(*words))
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
    given = there(saved(tmp_path, AWQ), *words)
    for refuses in (lambda: plan(resolve_placement(given)), lambda: check.check_target(given)):
        with pytest.raises(ValueError, match=re.escape(said)) as error:
            refuses()
        assert "\n" not in str(error.value)


def test_its_embeddings_bring_its_layers(tmp_path: Path) -> None:
    """What is quantised is loaded whole, even where a store has the features."""
    stored = "features=stored", "trainer.eval_prompts=0", "features.path=x", "model.placement=replicate"
    held = [
        plan(resolve_placement(there(saved(tmp_path, quantization), *stored)))["devices"][0].resident
        for quantization in (None, AWQ)
    ]
    assert ["target: layers" in sizes for sizes in held] == [False, True]
