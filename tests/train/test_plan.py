"""A plan counts what published heads and targets have, and says what fits where, without loading anything."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console
from transformers import LlamaConfig, Qwen3Config

from benchmarks import planner
from data.batches import Packed
from heads.base import Features
from heads.common.resolvers import ROOT
from tests import families, toys
from tests.refusals import refuses
from tests.train import jobs
from train.build import executable_micro_batch
from train.config import RunConfig
from train.plan import ESTIMATE_ERROR, GIB, MAX_UTILISATION, Plan, _target_shape, plan, target_shape
from train.resolve import describe_choices, format_hours, gib, remedy, table
from train.step import Loss

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
BF16 = "eval.gate_dtype=bfloat16"
SMALL = ("data.length=64", "trainer.batch_tokens=64", "trainer.micro_tokens=64", "objective.anchors=4")  # for speed
DFLASH = (
    "head.layers=5", "head.depths=15", "objective.depths=15", "head.from_anchor=false", "head.markov_rank=null",
)  # fmt: skip


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
    monkeypatch.setattr("train.plan.read_target_config", lambda *_, **__: TARGETS[target])
    _target_shape.cache_clear()
    found = plan(run("model=llama70b", *SMALL, *overrides))
    assert found.cost.whole / 1e9 == pytest.approx(billions, rel=0.005)


def run(*overrides: str) -> RunConfig:
    """Return a run whose target is whole on every device unless the overrides say otherwise."""
    return automatic("model.placement=replicate", *overrides)


def automatic(*overrides: str) -> RunConfig:
    return jobs.placed(jobs.configured(overrides))


def shown(planned: Plan) -> str:
    console = Console(width=200)
    with console.capture() as text:
        console.print(table(planned))
    return text.get()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("there is no network")

    monkeypatch.setattr("train.plan.read_target_config", fail)
    _target_shape.cache_clear()


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [
        ("llama70b", 70.55, 70.55),
        ("llama8b", 8.03, 8.03),
        ("qwen3_8b", 8.19, 8.19),
        ("qwen3_30b_a3b", 30.53, 3.35),
        ("qwen3_0_6b", 0.596, 0.596),
        ("smollm2", 0.1345, 0.1345),
        ("smollm2_360m", 0.3618, 0.3618),
        ("llama32_1b", 1.2358, 1.2358),
    ],
)
def test_a_preset_plans_without_network(model: str, billions: float, active: float) -> None:
    found = target_shape(run(f"model={model}").model)
    assert (found.embeddings + found.inner) / 1e9 == pytest.approx(billions, rel=0.002)
    assert (found.active + found.embeddings) / 1e9 == pytest.approx(active, rel=0.002)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("model", ["llama32_1b", "qwen3_0_6b", "qwen3_30b_a3b"])
def test_a_shape_by_its_numbers_is_that_of_the_model_that_is_built(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = run(f"model={model}").model
    by_numbers = target_shape(asked)
    monkeypatch.setattr("train.plan.PLAIN", {})
    _target_shape.cache_clear()
    built = target_shape(asked)
    for name in ("feed", "embeddings", "inner", "active", "packs", "loads_alone"):
        assert getattr(by_numbers, name) == getattr(built, name), name
    for name in ("hidden_size", "vocab_size", "num_layers", "layer_dims", "factor", "softcap"):
        assert getattr(by_numbers.target, name) == getattr(built.target, name), name
    assert by_numbers.target.extra_ops() == built.target.extra_ops() == []


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ["model=llama70b", "model.path=me/other", "head=eagle"],
            "model.path=me/other: its configuration cannot be read",
        ),
        (["model=llama8b", "+model.shape.no_such=1", "model.shape.model_type=nonesuch"], "model.shape of meta-llama"),
        (["model=llama8b", "head=eagle3", "head.feature_layers=[90]"], "head.feature_layers is [90]"),
        (["model=llama8b", "head=medusa", "head.heads=2"], "objective.depths is 4 but the head drafts 2"),
        (["model=llama8b", "device=h100", "model.device=cpu"], "device=h100 is of type cuda, and model.device=cpu"),
        (["device.type=tpu"], "device.type is 'tpu'"),
        (["device.mfu=0"], "device.mfu is 0"),
        (["device.memory_gb=-1"], "device.memory_gb is -1"),
        (["device.slack=-1"], "device.slack is -1"),
        (["launcher.strategy=zero9"], "launcher.strategy is 'zero9'"),
        (["model.placement=moon"], "model.placement is 'moon'"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(overrides: list[str], named: str) -> None:
    refuses(re.escape(named), lambda: plan(run(*overrides)))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["device=h100", "device.memory_gb=13", BF16, *SMALL], "model.placement=offload"),
        (["device=h100", "launcher=ddp", BF16, *SMALL], "model.placement=tensor_parallel"),
        (
            ["device=rtx4090", "device.memory_gb=8", BF16, *SMALL],
            "features=stored trainer.eval_prompts=0 eval.prompts=0 trainer.optimizer=muon",
        ),
        (["device=rtx4090", "device.memory_gb=1", *SMALL], None),
    ],
)
def test_a_70b_that_does_not_fit_says_what_to_change(words: list[str], given: str | None) -> None:
    """One change where one is enough, several where it takes them, and that none is."""
    model = "model=llama70b", "head=medusa", "head.lm_head=shared", *words
    found = plan(run(*model))
    assert found.utilization > 1
    assert remedy(found.run) == given
    assert given is None or plan(run(*model, *given.split())).utilization <= 1
    assert (f"with this it does: {given}" if given else "does not fit with any change: take more") in shown(found)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model.placement=tensor_parallel"], "shares the target among processes, and there is one"),
        (["model.placement=tensor_parallel", "launcher=ddp", "launcher.num_processes=16"], "the 8 key-value heads"),
        (["model.placement=device_map", "model.devices=[1,2]", "launcher=ddp"], "has 2 devices for 8 processes"),
        (["model.placement=offload", "device=cpu"], "give model.offload=disk"),
        (["head=mtp", "objective.depths=3", "init=checkpoint", "model.placement=offload"], "give init=last_layer"),
    ],
)
def test_what_would_not_load_is_not_planned(words: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        plan(run("model=llama70b", "device=h100", "head=medusa", *SMALL, "eval.prompts=0", *words))


@pytest.mark.usefixtures("offline")
def test_a_checkpoint_is_counted_beside_those_that_are_kept() -> None:
    words = "model=llama8b", "device=h100", "head=medusa", *SMALL, "trainer.keep=3"
    measured, alone = plan(run(*words)), plan(run(*words, "trainer.eval_prompts=0"))
    assert measured.disk["checkpoints"] == 5 * 12 * measured.cost.trained
    assert alone.disk["checkpoints"] == 4 * 12 * alone.cost.trained


@pytest.mark.parametrize(("head", "said"), [("block", True), ("mtp", False)])
def test_a_target_of_which_no_engine_serves_a_head_is_named(head: str, said: bool, tmp_path: Path) -> None:
    families.config("granite").save_pretrained(tmp_path)
    text = shown(plan(run(f"model.path={tmp_path}", f"head={head}", *SMALL))).replace("\n", " ")
    assert ("the target has a scale or cap of its logits, which engines do not know when they draft" in text) == said


@pytest.mark.usefixtures("offline")
def test_two_nodes_share_the_target_by_node() -> None:
    words = "experiment=eagle3_llama70b_2x8x80", "head=medusa", "head.lm_head=shared", "objective.depths=4"
    found = plan(automatic(*words))
    assert found.memory.resident["target: layers"] == 2 * found.shape.inner // 8
    rate = 3600e12 * 989 * 0.4
    assert found.hours == pytest.approx(sum(found.flops) / rate / 16)
    assert "the fullest device: " in shown(found)


@pytest.mark.usefixtures("offline")
def test_from_a_store_only_the_ends_are_loaded() -> None:
    words = ("model=llama8b", "head=medusa", "head.lm_head=shared", "device=rtx4090", "features=stored")
    live, stored = plan(run(*words, "eval.prompts=0")), plan(run(*words, "eval.prompts=0", "trainer.eval_prompts=0"))
    assert live.memory.resident["target: layers"] > 0
    assert stored.memory.resident["target: layers"] == 0
    assert "target's pass" not in stored.memory.stages
    assert stored.memory.resident["target: embedding, lm_head"] == 2 * 2 * 128256 * 4096
    trainer = stored.run.trainer
    assert stored.disk["features"] == trainer.steps * trainer.batch_tokens * 2 * 4096
    served = plan(
        run(*words[:-1], "features=engine", "features.vllm_layers=[32]", "eval.prompts=0", "trainer.eval_prompts=0")
    )
    assert "features" not in served.disk
    assert (served.memory, served.hours) == (stored.memory, stored.hours)
    assert served.run.device.tflops is not None
    assert served.hours == pytest.approx(served.flops[1] / (3600e12 * served.run.device.tflops * served.run.device.mfu))


def test_an_engine_started_without_the_heads_layers_is_refused_by_a_plan() -> None:
    words = ("head=eagle3", "features=engine", "eval.prompts=0", "trainer.eval_prompts=0", *SMALL)
    with pytest.raises(ValueError, match=r"features.vllm_layers is \[2\], without \[12, 21, 24\]: "):
        plan(run(*words, "features.vllm_layers=[2]"))


@pytest.mark.parametrize(("name", "layers"), [("gemma3", True), ("mixtral", False)])
def test_a_target_whose_ends_do_not_load_alone_counts_whole(name: str, layers: bool, tmp_path: Path) -> None:
    families.config(name).save_pretrained(tmp_path)
    words = ("head=eagle3", "features=stored", "trainer.eval_prompts=0", "eval.prompts=0", *SMALL)
    assert (plan(run(f"model.path={tmp_path}", *words)).memory.resident["target: layers"] > 0) == layers


def test_the_final_evaluation_needs_room_for_the_target_in_fp32() -> None:
    planned = plan(run("head=medusa"))
    assert planned.memory.evaluation == 4 * (planned.shape.embeddings + planned.shape.inner)
    assert not plan(run("eval.prompts=0")).memory.evaluation


def test_a_plan_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan(run("out=run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("machine", "strategy", "gate"),
    [
        pytest.param(("device=h100", "device.count=8"), "ddp", "float32", marks=pytest.mark.slow),
        pytest.param(
            ("device=h100", "device.count=8", "launcher.num_nodes=2"), "ddp", "float32", marks=pytest.mark.slow
        ),
        (("device=a100_40", "device.count=8", "launcher.num_nodes=4"), "fsdp2", "bfloat16"),
    ],
)
def test_a_70b_places_itself(machine: tuple[str, ...], strategy: str, gate: str) -> None:
    placed = automatic("model=llama70b", "head=eagle", *machine)
    assert (placed.model.placement, placed.launcher.strategy) == ("tensor_parallel", strategy)
    assert placed.eval.gate_dtype == gate
    planned = plan(placed)
    assert planned.memory.utilization < MAX_UTILISATION
    assert planned.memory.evaluation


EXPERIMENTS = sorted(file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_fits_its_devices(experiment: str) -> None:
    found = plan(automatic("plan=true", f"experiment={experiment}"))
    assert found.utilization <= 1
    assert found.hours is not None
    assert found.hours > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", planner.CONFIGURATIONS)
def test_a_plan_is_within_its_margin_of_what_a_run_takes(name: str, tmp_path: Path) -> None:
    planned, taken = planner.measure(name, tmp_path)
    assert abs(planned / taken - 1) <= ESTIMATE_ERROR


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("words", "measured"),  # GiB of an H100, of which the last two leave the target's layers out (benchmarks/gpu.md)
    [
        (("trainer.micro_tokens=16384", "trainer.batch_tokens=16384"), 53.5),
        (("trainer.micro_tokens=16384", "trainer.batch_tokens=16384", "features=stored"), 36.9),
        (("trainer.micro_tokens=4096", "trainer.batch_tokens=4096", "features=stored"), 15.8),
    ],
)
def test_a_plan_is_within_its_margin_of_what_an_8b_took_on_an_h100(words: tuple[str, ...], measured: float) -> None:
    step = "objective.depths=5", "trainer.optimizer=adamw", "trainer.eval_prompts=0", "eval.prompts=0"
    found = plan(run("model=llama8b", "head=eagle3", "device=h100", "data.length=2048", *step, *words))
    assert abs(found.memory.peak / GIB / measured - 1) <= ESTIMATE_ERROR


AUTOMATIC = ("model=llama8b", "head=eagle", "device=h100", "data.length=64", "trainer.micro_tokens=null")


@pytest.mark.usefixtures("offline")
def test_micro_batches_are_sized_by_the_memory_of_the_device() -> None:
    """Never beyond a process's share of a batch; where a row alone is too much, one; and a given size is kept."""
    words = (*AUTOMATIC, "trainer.batch_tokens=65536", "eval.prompts=0", "trainer.eval_prompts=0")
    alone = plan(run(*words, "trainer.micro_tokens=64")).memory.peak / GIB
    half = plan(run(*words, "trainer.micro_tokens=16384")).memory.peak / GIB
    found = {
        memory: 64 * plan(run(*words, f"device.memory_gb={memory}")).micro_batch_size
        for memory in (alone / 2, alone / MAX_UTILISATION + 0.001, half / MAX_UTILISATION + 0.001, 79)
    }
    assert [*found.values()] == [64, 64, 16384, 65536]
    assert plan(run(*words, "launcher=ddp", "launcher.num_processes=5")).micro_batch_size == 128
    assert plan(run(*words, "trainer.micro_tokens=192")).micro_batch_size == 3


@pytest.mark.usefixtures("offline")
def test_what_does_not_fit_at_any_size_makes_no_micro_batch_smaller() -> None:
    words = (*AUTOMATIC, "trainer.batch_tokens=512", "device.memory_gb=26", "eval.gate_dtype=float32")
    with_evaluation, without = plan(run(*words)), plan(run(*words, "eval.prompts=0"))
    assert with_evaluation.utilization > 1 >= without.utilization
    assert with_evaluation.micro_batch_size == without.micro_batch_size == 8


def test_on_a_cpu_the_configuration_gives_the_size() -> None:
    assert run().trainer.micro_tokens == 4096


def test_a_plan_says_its_data_and_that_a_step_has_no_row_for_each_process() -> None:
    words = ["trainer=debug", "model=tiny", "head=mlp", "model.device=cpu", "launcher.num_processes=4"]
    few, enough = (
        plan(run(*words, "plan=true", f"trainer.batch_tokens={rows * 64}", "data.length=64")) for rows in (2, 4)
    )
    assert "=128 is 2 sequences for 4 processes, so some have nothing to do: give 256 or more" in describe_choices(few)
    assert "trainer.batch_tokens" not in describe_choices(enough)
    text = shown(few)
    for part in (few.run.data.path, "128 tokens in sequences of 64", "without plan=true the same command runs it"):
        assert part in text
    assert [format_hours(hours) for hours in (1.0, 0.999, 1 / 30, 0.0333)] == ["1.0 h", "60 min", "2 min", "120 s"]
    assert [gib(2**27), gib(2**27 - 1)] == ["0.12 GiB", "128.0 MiB"]


# Of quantised checkpoints.

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GROUPS: dict[str, Any] = {"group_0": {"weights": {"num_bits": 8}}, "group_1": {"weights": {"num_bits": 4}}}
QUANTISED = ("head=eagle", "device=h100", "eval.prompts=0", *SMALL)


def saved(folder: Path, quantization: dict[str, Any] | None) -> str:
    """Save the configuration of a target of two layers, quantised in this way, and return its override."""
    config = LlamaConfig(vocab_size=2048, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2).to_dict()
    extra = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | extra))
    return f"model.path={folder}"


@pytest.mark.parametrize(
    ("quantization", "size"),
    [
        (None, 2.0),
        (AWQ, 0.56),
        ({"quant_method": "gptq", "bits": 8}, 1.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 0.56),
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, 1.0),
        ({"quant_method": "mxfp4"}, 0.53),
        ({"quant_method": "hqq", "bits": True}, 2.0),
        ({"quant_method": "quark", "config_groups": [3]}, 2.0),
    ],
)
def test_a_weight_takes_what_its_checkpoint_says(
    quantization: dict[str, Any] | None, size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.plan.find_spec", lambda name: name)
    planned = plan(run(*QUANTISED, saved(tmp_path, quantization)))
    assert planned.memory.resident["target: layers"] == pytest.approx(size * planned.shape.inner, abs=1)


def test_what_is_loaded_whole_is_counted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mxfp4 without its kernels, of fp8 on a CPU; and what is quantised has its layers even with stored features."""
    monkeypatch.setattr("train.plan.find_spec", lambda _: None)
    for quantization, device in (({"quant_method": "mxfp4"}, "device=h100"), ({"quant_method": "fp8"}, "device=cpu")):
        _target_shape.cache_clear()
        planned = plan(run(*QUANTISED, saved(tmp_path, quantization), device, "model.dtype=bfloat16"))
        assert planned.memory.resident["target: layers"] == 2 * planned.shape.inner
    stored = "features=stored", "trainer.eval_prompts=0", "features.path=x"
    for there in (None, AWQ):
        _target_shape.cache_clear()
        planned = plan(run(*QUANTISED, saved(tmp_path, there), *stored))
        assert (planned.memory.resident["target: layers"] > 0) == (there is not None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.placement=offload",), "cannot shard or move quantised weights (by its checkpoint)"),
        (("model.placement=fsdp", "launcher.num_processes=2"), "cannot shard or move quantised weights"),
        (("model.quantize=int8", "model.placement=device_map"), "is quantised already (awq); leave model.quantize out"),
    ],
)
def test_what_loading_refuses_is_refused_before(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    given = jobs.configured([*QUANTISED, saved(tmp_path, AWQ), *words])
    refuses(re.escape(said), lambda: plan(jobs.placed(given)))


# Of the host's memory: of this machine it is compared, of another one the plan says how much.

HERE = ("head=eagle", "launcher.num_processes=1", "launcher.strategy=ddp", "device.context_gb=0.1", *SMALL)


def at_a_machine(monkeypatch: pytest.MonkeyPatch, host: float) -> None:
    """Let the plan be made on a machine with an accelerator and so many bytes of host memory."""
    monkeypatch.setattr("train.resolve.device_named", lambda _: torch.device("cuda"))
    monkeypatch.setattr("train.resolve.free_bytes", lambda: round(host))


def test_layers_go_to_a_host_that_holds_them_and_else_stay_in_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LlamaConfig(vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16).save_pretrained(
        tmp_path
    )
    words = (f"model.path={tmp_path}", *HERE, "eval.prompts=0", "trainer.eval_prompts=0", "model.placement=auto")
    at_a_machine(monkeypatch, 100 * GIB)
    whole, streamed = (
        plan(automatic(*words, "device.memory_gb=80", f"model.placement={kind}")) for kind in ("replicate", "offload")
    )
    assert streamed.host is not None
    small = f"device.memory_gb={(whole.memory.peak + streamed.memory.peak) / 2 / MAX_UTILISATION / GIB}"
    for host, disk in (
        (streamed.host.peak / MAX_UTILISATION + 1e7, "cpu"),
        (streamed.host.peak / MAX_UTILISATION - 1e7, "disk"),
    ):
        at_a_machine(monkeypatch, host)
        placed = automatic(*words, small)
        assert f"model.placement=offload model.offload={disk} " in describe_choices(plan(placed))
        assert plan(placed).utilization <= 1
    # A placement that is given stays, and the plan says what to change.
    at_a_machine(monkeypatch, streamed.host.peak - 1)
    given = plan(automatic(*words, "device.memory_gb=80", "model.placement=offload"))
    assert given.memory.utilization < 1 < given.utilization
    assert remedy(given.run) == "model.offload=disk"
    assert re.search(r"host memory of each node: \d.*, does NOT fit", shown(given))


@pytest.mark.parametrize("most", [3, 0])
def test_the_device_has_the_last_word_on_a_micro_batch(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, forward = toys.target(), Loss.forward
    head: Any = toys.head("eagle", target).float().requires_grad_(True)
    planned = run("model=tiny", "model.device=cpu", "data.length=32", "trainer.batch_tokens=256", *AUTOMATIC[-1:])

    def little(loss: Loss, features: Features, *rest: Any) -> Any:
        if len(features.token) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return forward(loss, features, *rest)

    monkeypatch.setattr(Loss, "forward", little)
    token = torch.randint(toys.VOCAB, (8, 32))
    packed = Packed(token, torch.zeros_like(token), torch.ones_like(token))
    assert plan(planned).micro_batch_size == 8
    if most:
        assert executable_micro_batch(planned, Accelerator(cpu=True), target, head, packed) == most
        assert head.fc.weight.grad is None
    else:
        with pytest.raises(ValueError, match=r"one sequence of data\.length=32 does not fit this device: lower it"):
            executable_micro_batch(planned, Accelerator(cpu=True), target, head, packed)
