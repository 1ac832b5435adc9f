"""Placed targets: the features, embeddings and fingerprint of the target on one device; and refusals."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from eval.inputs.drafters import model_of
from inference.decode import RequestParams, autoregress
from inference.target import placement
from inference.target.config import model_config
from inference.target.placement import HERE, Placement, check, check_shape, check_single_process, options, whole
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import assistants, toys
from tests.refusals import refuses

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
OFFLOAD = Placement("offload", None, None, "disk", None)
NEAR = 1e-5  # of the largest value, in fp32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return assistants.save(toys.target().model, toys.tokenizer(), tmp_path_factory.mktemp("plain"))


def together(folder: str, out: Path, processes: int, *kinds: str) -> list[dict[str, dict[str, float]]]:
    """Run `placing.py` on several processes; return what each found of each kind."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [sys.executable, *words, str(ROOT / "tests/inference/placing.py"), folder, str(out), *kinds],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(processes)]


def same(found: dict[str, float], share: float) -> bool:
    alike = all(found[key] for key in ("spec", "trees", "ends", "layer", "answer"))
    return alike and max(found["hidden"], found["last"]) < NEAR and 0 < found["share"] < share


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "parallel", "share"), [(2, "tensor_parallel:0", 0.55), (4, "tensor_parallel:2", 0.3)]
)
def test_processes_hold_a_target_together(
    processes: int, parallel: str, share: float, folder: str, tmp_path: Path
) -> None:
    for found in together(folder, tmp_path, processes, parallel, "fsdp:0"):
        assert same(found[parallel], 0.55), found
        assert same(found["fsdp:0"], share), found
        assert found["fsdp:0"]["last"] == 0 or processes > 2, "whole weights are gathered: nothing is rounded otherwise"


@pytest.mark.parametrize(
    "where", [OFFLOAD, replace(OFFLOAD, memory_gb=7e-5), replace(HERE, kind="device_map")], ids=str
)
def test_a_streamed_target_is_the_target(folder: str, where: Placement) -> None:
    plain, placed = Target.load(folder, "float32", "cpu"), Target.load(folder, "float32", "cpu", placement=where)
    there = [not each.is_meta for each in (next(layer.parameters()) for layer in placed.decoder_layers)]
    some = where.memory_gb is not None
    assert there == [where.kind == "device_map" or (some and i < 2) for i in range(3)]
    token = torch.tensor([toys.prompt(0, 20)])
    document = (torch.arange(20) > 6).long()[None]
    ours, theirs = placed.features(token, document, (0, 2)), plain.features(token, document, (0, 2))
    assert ours.hidden.equal(theirs.hidden)
    assert ours.last_hidden.equal(theirs.last_hidden)
    assert placed.spec == plain.spec
    assert placed.embeddings.lm_head_weight().equal(plain.embeddings.lm_head_weight())
    assert dict(whole(placed.decoder_layers[0]))["mlp.up_proj.weight"].equal(plain.decoder_layers[0].mlp.up_proj.weight)
    written = [autoregress(each, toys.prompt(1), RequestParams(12, GREEDY)).tokens for each in (placed, plain)]
    assert written[0] == written[1]
    assert toys.lively(written[0])


def test_a_tied_target_in_another_dtype_is_streamed(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**toys.SIZES, tie_word_embeddings=True))
    path = assistants.save(model.bfloat16(), toys.tokenizer(), tmp_path)
    plain, placed = Target.load(path, "float32", "cpu"), Target.load(path, "float32", "cpu", placement=OFFLOAD)
    token = torch.arange(12)[None]
    assert placed.features(token, torch.zeros_like(token), ()).last_hidden.equal(
        plain.features(token, torch.zeros_like(token), ()).last_hidden
    )
    assert placed.spec == plain.spec


def test_of_the_ends_only_what_is_cut_up_is_copied(folder: str) -> None:
    """Under tensor parallelism the embedding stays whole beside a cut-up lm_head: one copy of it is enough."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
        own = model.lm_head.weight.detach().clone()
        model.lm_head.weight = torch.nn.Parameter(distribute_tensor(own, init_device_mesh("cpu", (1,)), [Shard(0)]))
        embeddings = placement._embeddings(model, AutoConfig.from_pretrained(folder), CPU, False)
    finally:
        distributed.destroy_process_group()
    assert embeddings.lm_head_weight().equal(own)
    assert embeddings.embedding.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_what_cannot_work_is_one_line(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str, where: Placement, **given: str | None) -> None:
        refuses(words, check, where, given.get("quantized"), given.get("adapter"), CPU)

    parallel, sharded = replace(HERE, kind="tensor_parallel"), replace(HERE, kind="fsdp")
    refused(r"there is one: give launcher\.num_processes", parallel)
    refused(r"there is one: give launcher\.num_processes", sharded)
    for kind in (parallel, sharded):
        refused(r"cannot shard or move quantised weights \(int8\)", kind, quantized="int8")
    refused(r"model\.adapter=a is merged into whole weights", parallel, adapter="a")
    refused(r"give model\.offload=disk", replace(OFFLOAD, offload="cpu"))
    placement.check_offload(replace(OFFLOAD, offload="cpu"), "cuda")
    check(replace(parallel, tensor_parallel=1), None, None, CPU)
    monkeypatch.setattr(placement, "_world", lambda: 4)
    refused(r"model\.tensor_parallel=3 does not divide the 4 processes", replace(parallel, tensor_parallel=3))
    for shape, words in (({}, "2 key-value heads"), ({"num_key_value_heads": 4, "intermediate_size": 50}, "50 MLP")):
        with pytest.raises(ValueError, match=rf"model\.tensor_parallel=4 does not divide the {words} .*fsdp"):
            check_shape(AutoConfig.from_pretrained(folder, **shape), 4, folder)
    with pytest.raises(ValueError, match=r"needs processes that make every pass together, which is not so in an eval"):
        check_single_process(replace(HERE, kind="fsdp"), "an evaluation")
    with pytest.raises(ValueError, match=r"model\.placement=offload cannot shard or move quantised weights \(int8\)"):
        Target.load(folder, "float32", "cpu", quantize="int8", placement=OFFLOAD)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (r"model\.placement is 'here': choose auto, replicate, tensor_parallel", {"placement": "here"}),
        (r"model\.offload is 'tape': choose cpu, disk", {"offload": "tape"}),
        (r"model\.tensor_parallel is 0", {"tensor_parallel": 0}),
        (r"model\.memory_gb is 0", {"memory_gb": 0.0}),
        (r"model\.devices is \[1, 1\]: give different numbers", {"devices": [1, 1]}),
        (r"model\.devices is \[\]", {"devices": []}),
    ],
)
def test_values_are_checked(words: str, key: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=words):
        model_config(path="x", **key)


def test_devices_are_shared_out_among_a_nodes_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: (10 * (n + 1), 100))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert replace(HERE, kind="tensor_parallel").group_size == 2, "a node's processes"
    where, place = replace(HERE, kind="device_map"), torch.device("cuda", 5)
    assert placement.devices_of(where, place) == [5, 1, 3, 7]
    assert placement.devices_of(replace(where, devices=[4, 5, 6, 7]), place) == [5, 7]
    found = options(replace(where, devices=[4, 5, 6, 7]), PreTrainedConfig(), place, torch.bfloat16, False)
    assert found == {"device_map": "auto", "max_memory": {5: 54, 7: 72}}
    capped = options(
        replace(where, devices=[4, 5, 6, 7], memory_gb=2.0), PreTrainedConfig(), place, torch.bfloat16, False
    )
    assert capped["max_memory"] == {5: 2 * 10**9, 7: 2 * 10**9}
    with pytest.raises(ValueError, match="names 9, and there are 8 devices"):
        placement.devices_of(replace(where, devices=[1, 9]), place)
    with pytest.raises(ValueError, match="has 1 devices for 2 processes"):
        placement.devices_of(replace(where, devices=[1]), place)


def test_a_placement_is_that_of_its_sizes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, half = AutoConfig.from_pretrained(folder), replace(OFFLOAD, memory_gb=3.5e-5)
    found = options(half, config, CPU, torch.bfloat16, False)["device_map"]
    assert [place for name, place in found.items() if ".layers." in name] == ["cpu", "cpu", "disk"]
    monkeypatch.setattr(placement, "_world", lambda: 6)
    monkeypatch.setattr(placement, "mesh", lambda *_: None)
    parallel = replace(HERE, kind="tensor_parallel", tensor_parallel=2)
    cut = options(parallel, config, CPU, torch.float32, False)["distributed_config"]
    assert (cut.tp_size, getattr(cut, "dp_replicate_size", None) or cut.fsdp_size) == (2, 3)


def test_a_run_whose_processes_shared_a_target_is_evaluated_over_one_process_devices(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text("{}")
    for kind, expected in (("fsdp", "device_map"), ("offload", "offload"), ("replicate", "replicate")):
        (tmp_path / "config.yaml").write_text(f"model: {{path: {tmp_path}, placement: {kind}, offload: disk}}")
        found = model_of(str(tmp_path), {"placement": None})
        assert (found.placement, found.offload) == (expected, "disk")
        assert model_of(str(tmp_path), {"placement": "offload"}).placement == "offload"


@pytest.mark.gpu
def test_layers_lie_on_several_devices_or_are_streamed(folder: str) -> None:
    plain = Target.load(folder, "float32", "cuda:0")
    token = torch.tensor([toys.prompt(0, 20)])
    for where in (replace(OFFLOAD, offload="cpu"), OFFLOAD, replace(HERE, kind="device_map")):
        placed = Target.load(folder, "float32", "cuda:0", placement=where)
        assert placed.device == torch.device("cuda", 0)
        found = placed.features(token, torch.zeros_like(token), ()).last_hidden
        assert found.device == placed.device
        torch.testing.assert_close(found, plain.features(token, torch.zeros_like(token), ()).last_hidden)
