"""A plan counts what published heads and targets have, and says what fits where, without loading anything."""

import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console
from transformers import LlamaConfig, Qwen3Config

from benchmarks import planner
from heads.common.resolvers import ROOT, register_resolvers
from tests import families
from tests.train import jobs
from train.config import RunConfig, run_config
from train.planning import shapes
from train.planning.check import check_plan
from train.planning.plan import GIB, SAFE, plan, resolve_micro_batch, total
from train.planning.resolve import resolve_placement
from train.planning.table import advice, in_words, table

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
    monkeypatch.setattr(shapes, "read_target_config", lambda *_, **__: TARGETS[target])
    monkeypatch.setattr(shapes, "_configurations", {})
    found = plan(run("model=llama70b", *SMALL, *overrides))
    assert found["head_parameters"] / 1e9 == pytest.approx(billions, rel=0.005)


def run(*overrides: str) -> RunConfig:
    """Return a run whose target is whole on every device unless the overrides say otherwise."""
    return automatic("model.placement=replicate", *overrides)


def automatic(*overrides: str) -> RunConfig:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return jobs.placed(run_config(compose("train", jobs.with_head(overrides))))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("there is no network")

    monkeypatch.setattr(shapes, "read_target_config", fail)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [
        ("llama70b", 70.55, 70.55),
        ("llama8b", 8.03, 8.03),
        ("qwen3_8b", 8.19, 8.19),
        ("qwen3_30b_a3b", 30.53, 3.35),
        ("qwen3_0.6b", 0.596, 0.596),
        ("smollm2_135m", 0.1345, 0.1345),
    ],
)
def test_a_preset_plans_without_network(model: str, billions: float, active: float) -> None:
    found = shapes.target_shape(run(f"model={model}").model)
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert (found.active + found.embeddings) / 1e9 == pytest.approx(active, rel=0.002)


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
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(overrides: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        plan(run(*overrides))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("device.type=tpu", "device.type is 'tpu'"),
        ("device.mfu=0", "device.mfu is 0"),
        ("device.memory_gb=-1", "device.memory_gb is -1"),
        ("device.slack=-1", "device.slack is -1"),
        ("launcher.strategy=zero9", "launcher.strategy is 'zero9'"),
        ("model.placement=moon", "model.placement is 'moon'"),
    ],
)
def test_a_bad_value_is_named_in_one_line(override: str, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        run(override)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("offline")
def test_a_70b_that_does_not_fit_says_what_to_change() -> None:
    """Each change saves what it says, the largest comes first, and together they are enough."""
    words = "model=llama70b", "head=medusa", "head.lm_head=shared", "device=h100", "device.memory_gb=13"
    words = *words, BF16, "trainer.batch_tokens=512", "trainer.micro_tokens=512"
    given = run(*words)
    found = plan(given)
    changes = advice(given, found)
    saves = [each.saves for each in changes[:-1]]
    assert not found["fits"]
    assert saves == sorted(saves, reverse=True)
    assert "trainer.recompute" not in changes[-1].overrides
    assert "model.placement=offload" in [each.overrides for each in changes]
    assert changes[-1].fits
    fixed = plan(run(*words, *changes[-1].overrides.split()))
    assert fixed["fits"]
    assert found["peak_bytes"] - fixed["peak_bytes"] == changes[-1].saves


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "words",
    [
        ("model=llama70b", "launcher=ddp"),
        pytest.param(
            ("model=llama70b", "launcher=fsdp2", "trainer.optimizer=muon", "device.memory_gb=30"),
            marks=pytest.mark.slow,
        ),
        ("model=llama70b", "model.placement=tensor_parallel", "launcher=ddp", "eval.prompts=0", "device.memory_gb=20"),
        pytest.param(
            ("model=llama8b", "model.adapter=some", "launcher=ddp", "device.memory_gb=10"), marks=pytest.mark.slow
        ),
    ],
    ids=" ".join,
)
def test_every_advice_is_a_run_that_is_not_refused(words: tuple[str, ...]) -> None:
    small = "head=medusa", "head.lm_head=shared", "device=h100", *SMALL[1:], "data.length=64"
    given = run(*small, *words)
    found = plan(given)
    changes = advice(given, found)
    assert changes
    for each in changes:
        assert plan(run(*small, *words, *each.overrides.split()))["fits"] == each.fits, each


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model.placement=tensor_parallel"], "shares the target among processes, and there is one"),
        (["model.placement=fsdp"], "shares the target among processes, and there is one"),
        (["model.placement=tensor_parallel", "model.tensor_parallel=3", "launcher=ddp"], "does not divide the 8"),
        (["model.placement=tensor_parallel", "launcher=ddp", "launcher.num_processes=16"], "the 8 key-value heads"),
        (["model.placement=device_map", "model.devices=[1,2]", "launcher=ddp"], "has 2 devices for 8 processes"),
        (["model.placement=offload", "device=cpu"], "give model.offload=disk"),
        (["model.placement=fsdp", "model.quantize=int8", "launcher=ddp"], "cannot shard or move quantised weights"),
        (["head=mtp", "objective.depths=3", "init=checkpoint", "model.placement=offload"], "give init=last_layer"),
        (["model.placement=offload", "model.adapter=some"], "is merged into whole weights on one device"),
    ],
)
def test_what_would_not_load_is_not_planned(words: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        plan(run("model=llama70b", "device=h100", "head=medusa", *SMALL, "eval.prompts=0", *words))


@pytest.mark.usefixtures("offline")
def test_a_checkpoint_is_counted_beside_those_that_are_kept() -> None:
    words = "model=llama8b", "device=h100", "head=medusa", *SMALL, "trainer.keep=3"
    measured, alone = plan(run(*words)), plan(run(*words, "trainer.eval_prompts=0"))
    state = 12 * measured["trained_parameters"]
    assert measured["disk"]["checkpoints"] == 5 * state
    assert alone["disk"]["checkpoints"] == 4 * state


@pytest.mark.usefixtures("offline")
def test_what_cannot_be_made_to_fit_is_said() -> None:
    given = run("model=llama70b", "head=medusa", "head.lm_head=shared", "device=rtx4090", "device.memory_gb=1")
    found = plan(given)
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table(given, found))
    assert "this is not enough" in shown.get()


@pytest.mark.parametrize(("name", "said"), [("granite", True), ("llama", False)])
def test_a_target_of_which_no_engine_serves_a_head_is_named(name: str, said: bool, tmp_path: Path) -> None:
    families.config(name).save_pretrained(tmp_path)
    given = run(f"model.path={tmp_path}", "head=mtp", *SMALL)
    console = Console(width=400)
    with console.capture() as shown:
        console.print(table(given, plan(given)))
    line = f"{tmp_path}: its logits have a bias, a cap or a scale, which engines do not know when they draft: no head"
    assert (line in shown.get()) == said


@pytest.mark.usefixtures("offline")
def test_two_nodes_show_what_lies_where() -> None:
    given = automatic("experiment=eagle3_llama70b_2x8x80", "head=medusa", "head.lm_head=shared", "objective.depths=4")
    found = plan(given)
    console = Console(record=True, width=120)
    with console.capture() as shown:
        console.print(table(given, found))
    text = shown.get()
    assert len(found["devices"]) == 16
    assert "node 0 device 0-7, node 1 device 0-7: " in text
    assert "target: layers" in text
    layers = found["devices"][9].resident["target: layers"]
    assert layers == 2 * (found["target_parameters"] - 2 * 128256 * 8192) // 8
    assert all("measuring τ" in device.stages for device in found["devices"])  # it takes all of them
    apart = plan(run("experiment=eagle3_llama8b_8x80", "head=medusa", "objective.depths=4", *SMALL))["devices"]
    assert [i for i, device in enumerate(apart) if "measuring τ" in device.stages] == [0]
    assert found["hours"] == pytest.approx(found["gpu_hours"] / 16)


@pytest.mark.usefixtures("offline")
def test_from_a_store_only_the_ends_are_loaded() -> None:
    words = ("model=llama8b", "head=medusa", "head.lm_head=shared", "device=rtx4090", "features=stored")
    live, stored = plan(run(*words, "eval.prompts=0")), plan(run(*words, "eval.prompts=0", "trainer.eval_prompts=0"))
    assert "target: layers" in live["devices"][0].resident
    assert "target: layers" not in stored["devices"][0].resident
    assert stored["devices"][0].resident["target: embedding, lm_head"] == 2 * 2 * 128256 * 4096
    assert stored["disk"]["features, if no row comes twice"] == stored["tokens"] * 2 * 4096
    served = plan(
        run(*words[:-1], "features=engine", "features.vllm_layers=[32]", "eval.prompts=0", "trainer.eval_prompts=0")
    )
    assert "features, if no row comes twice" not in served["disk"]
    assert "gpu_hours_of_extraction" not in served
    same = ("devices", "gpu_hours", "hours", "peak_bytes", "fits")
    assert [served[key] for key in same] == [stored[key] for key in same]


def test_an_engine_started_without_the_heads_layers_is_refused_by_a_plan() -> None:
    words = ("head=eagle3", "features=engine", "eval.prompts=0", "trainer.eval_prompts=0", *SMALL)
    with pytest.raises(ValueError, match=r"features.vllm_layers is \[2\], without \[12, 21, 24\]: "):
        plan(run(*words, "features.vllm_layers=[2]"))


def test_a_plan_names_the_store_that_is_still_to_be_extracted(tmp_path: Path) -> None:
    words = ("head=eagle3", "features=stored", f"features.path={tmp_path / 'store'}", "trainer.eval_prompts=0")
    given = run(*words, "eval.prompts=0", *SMALL)
    for there in (False, True):
        console = Console(width=400)
        with console.capture() as shown:
            console.print(table(given, plan(given)))
        line = f"the same command runs it, once features.path={tmp_path / 'store'} is extracted"
        assert (line in shown.get()) != there
        (tmp_path / "store").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=f"{tmp_path / 'store'}: "):
        check_plan(given)


@pytest.mark.parametrize(("name", "layers"), [("gemma3", True), ("mixtral", False)])
def test_a_target_whose_ends_do_not_load_alone_counts_whole(name: str, layers: bool, tmp_path: Path) -> None:
    families.config(name).save_pretrained(tmp_path)
    words = ("head=eagle3", "features=stored", "trainer.eval_prompts=0", "eval.prompts=0", *SMALL)
    resident = plan(run(f"model.path={tmp_path}", *words))["devices"][0].resident
    assert ("target: layers" in resident) == layers


def test_the_final_evaluation_needs_room_for_the_target_in_fp32() -> None:
    held, planned = plan(run("head=medusa"))["devices"][0], plan(run())
    assert total(held.evaluation) == 4 * planned["target_parameters"]
    assert not plan(run("eval.prompts=0"))["devices"][0].evaluation


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
    assert planned["fits"]
    assert planned["peak_bytes"] < SAFE * planned["device"]["memory_gb"] * GIB
    assert all(device.evaluation for device in planned["devices"])


EXPERIMENTS = sorted(file.stem for file in (ROOT / "conf" / "experiment").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_fits_its_devices(experiment: str) -> None:
    found = plan(automatic(f"experiment={experiment}"))
    assert found["fits"]
    assert found["gpu_hours"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", planner.CONFIGURATIONS)
def test_a_plan_is_at_the_memory_that_a_run_takes_or_up_to_a_third_above(name: str, tmp_path: Path) -> None:
    planned, taken = planner.measure(name, tmp_path)
    assert taken <= planned <= 1.3 * taken


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("words", "measured"),  # GiB of an H100, of which the last two leave the target's layers out (benchmarks/gpu.md)
    [
        (("trainer.micro_tokens=16384", "trainer.batch_tokens=16384"), 53.5),
        (("trainer.micro_tokens=16384", "trainer.batch_tokens=16384", "features=stored"), 36.9),
        (("trainer.micro_tokens=4096", "trainer.batch_tokens=4096", "features=stored"), 15.8),
    ],
)
def test_eagle3_of_an_8b_takes_what_was_measured_on_an_h100_or_up_to_a_third_more(
    words: tuple[str, ...], measured: float
) -> None:
    step = "objective.depths=5", "trainer.optimizer=adamw", "trainer.eval_prompts=0", "eval.prompts=0"
    found = plan(run("model=llama8b", "head=eagle3", "device=h100", "data.length=2048", *step, *words))
    assert measured <= found["peak_bytes"] / GIB <= 1.3 * measured


@pytest.mark.usefixtures("offline")
def test_a_plan_says_what_the_process_and_the_allocator_take() -> None:
    words = "model=llama8b", "head=eagle3", "device=h100", "eval.prompts=0", *SMALL
    found = plan(run(*words))
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table(run(*words), found))
    device = found["devices"][0]
    widest = max(map(total, device.stages.values()))
    assert device.process == GIB
    assert device.peak == GIB + total(device.resident) + widest + round(0.15 * widest)
    assert {"process", "allocator"} <= {line.split("│")[1].strip() for line in shown.get().splitlines() if "│" in line}


@pytest.mark.usefixtures("offline")
def test_muons_checkpoint_lacks_a_moment_of_each_matrix() -> None:
    words = "model=llama8b", "head=medusa", "head.lm_head=shared", "device=h100", *SMALL
    adamw, muon = (plan(run(*words, f"trainer.optimizer={name}")) for name in ("adamw", "muon"))
    name = "a checkpoint that is being written"
    held, saved = muon["host"].resident[name], adamw["host"].resident[name]
    assert saved == 12 * adamw["trained_parameters"]
    assert 8 * muon["trained_parameters"] <= held < 8.1 * muon["trained_parameters"]


def test_on_a_cpu_a_process_holds_what_lies_on_the_host_elsewhere() -> None:
    """The checkpoint that is being written, with a running average."""
    found = plan(run("head=eagle", "device=cpu", "model.device=cpu", "trainer.ema=0.9", *SMALL))
    held = found["devices"][0].resident
    assert held["a checkpoint that is being written"] == 16 * found["trained_parameters"]
    assert found["host"] is None
    assert "a checkpoint that is being written" in plan(run("head=eagle", "device=h100", *SMALL))["host"].resident


AUTOMATIC = ("model=llama8b", "head=eagle", "device=h100", "data.length=64", "trainer.micro_tokens=null")


@pytest.mark.usefixtures("offline")
def test_micro_batches_are_sized_by_the_memory_of_the_device() -> None:
    """Never beyond a process's share of a batch; where a row alone is too much, one; and a given size is kept."""
    words = (*AUTOMATIC, "trainer.batch_tokens=2048", "eval.prompts=0", "trainer.eval_prompts=0")
    alone = plan(run(*words, "trainer.micro_tokens=64"))["peak_bytes"] / GIB
    half = plan(run(*words, "trainer.micro_tokens=512"))["peak_bytes"] / GIB
    found = {
        memory: resolve_micro_batch(run(*words, f"device.memory_gb={memory}")).trainer.micro_tokens
        for memory in (alone / 2, alone / SAFE + 0.001, half / SAFE + 0.001, 79)
    }
    assert [*found.values()] == [64, 64, 512, 2048]
    assert plan(run(*words))["micro_tokens"] == 2048
    assert plan(run(*words, "launcher=ddp", "launcher.num_processes=5"))["micro_tokens"] == 256
    assert resolve_micro_batch(run(*words, "trainer.micro_tokens=192")).trainer.micro_tokens == 192


@pytest.mark.usefixtures("offline")
def test_what_does_not_fit_at_any_size_makes_no_micro_batch_smaller() -> None:
    words = (*AUTOMATIC, "trainer.batch_tokens=512", "device.memory_gb=26", "eval.gate_dtype=float32")
    with_evaluation, without = plan(run(*words)), plan(run(*words, "eval.prompts=0"))
    assert not with_evaluation["fits"]
    assert without["fits"]
    assert with_evaluation["micro_tokens"] == without["micro_tokens"] == 512


def test_on_a_cpu_the_configuration_gives_the_size() -> None:
    assert run().trainer.micro_tokens == 4096


def test_a_plan_says_its_data_and_that_a_step_has_no_row_for_each_process() -> None:
    words = ["trainer=debug", "model=tiny", "head=mlp", "model.device=cpu", "launcher.num_processes=4"]
    few, enough = (
        resolve_placement(run(*words, f"trainer.batch_tokens={rows * 64}", "data.length=64")) for rows in (2, 4)
    )
    assert "=128 is 2 rows for 4 processes, so some have nothing to do: give 256 or more" in in_words(few)
    assert "trainer.batch_tokens" not in in_words(enough)
    alone = resolve_placement(run(*words[:-1], "trainer.batch_tokens=256", "data.length=64"))
    assert plan(enough)["hours"] == pytest.approx(plan(alone)["hours"], rel=0.1), "by the CPU that they share"
    console = Console(record=True, width=200)
    with console.capture() as shown:
        console.print(table(few, plan(few)))
    assert few.data.path in shown.get()
    assert "128 tokens in rows of 64" in shown.get()
    assert "without plan=true the same command runs it" in shown.get()


def test_a_cpus_time_is_estimated_and_nothing_empty_is_listed() -> None:
    small = resolve_placement(run("trainer=debug", "model=tiny", "head=mlp", "model.device=cpu"))
    planned = plan(small)
    console = Console(record=True, width=120)
    with console.capture() as shown:
        console.print(table(small, planned))
    assert planned["hours"] > 0
    assert planned["disk"]["target, in 16 bits"] == 2 * planned["target_parameters"]
    for row in ("rough time, at an assumed", "loaded of the target by each"):
        assert row in shown.get()
    assert " 0.0 MiB" not in shown.get()
