"""What is known before anything is loaded is said before anything is loaded, and leaves nothing behind."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.text.filters import Counts
from data.text.prompts import Prompt, TrainingData
from eval.inputs.drafters import own_prompts
from heads.formats.store import save_head
from tests import toys
from tests.refusals import refuses
from tests.train import jobs
from tests.train.jobs import composed
from tests.train.jobs import configured as unplaced
from train import resolve as resolving
from train.build import max_prompt_tokens, prepare_out, values_of
from train.config import RunConfig
from train.distributed.processes import RunLock
from train.plan import plan
from train.resolve import check_fits, check_out, check_run, on_machine, resolve, resolve_placement


def configured(overrides: list[str]) -> RunConfig:
    return on_machine(unplaced(overrides))


def check(run: RunConfig) -> None:
    """Check a run as `resolve` does."""
    check_run(run)
    check_fits(resolve_placement(run))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("toy")
    made = jobs.make(folder)
    (folder / "target" / "model.safetensors").unlink()  # whoever loads it fails
    return [*made, "launcher=inline", f"out={folder / 'out'}"]


def test_a_run_that_can_start_is_not_refused(toy: list[str]) -> None:
    check(configured(toy))
    check_run(configured([*toy, "plan=true"]))


def test_an_accelerator_that_is_not_here_is_refused(toy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuses("device.type=cuda: this machine has none", configured, [*toy, "device.type=cuda", "model.device=null"])


OUT = ("../evil", "a/../../b", "/elsewhere")  # of the folder of runs


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.path=/nowhere/chats.jsonl"], "/nowhere/chats.jsonl: neither a file here nor a Hub dataset"),
        ([f"data.path={__file__}"], "test_check.py: the formats read are .json, "),
        (["data.path=lists.jsonl"], "lists.jsonl: line 1: every record must be a JSON object"),
        (["data.prompts=gone.txt"], "gone.txt: neither a file here nor a Hub dataset"),
        (["workload=gone"], "workload gone is neither a file or folder here"),
        (["compare=[/nowhere/run]"], "/nowhere/run: no such folder"),
        (["init=/nowhere/run"], "/nowhere/run: no such folder"),
        (["model.adapter=/nowhere/adapter"], "model.adapter=/nowhere/adapter: no such folder"),
        (
            ["model.path=/nowhere/target", "head=eagle"],
            "model.path=/nowhere/target: its configuration cannot be read (no such folder",
        ),
        (["features=stored", "features.path=/nowhere/store"], "/nowhere/store: holds no feature store"),
        (["out=/dev/null/run"], "out=/dev/null/run: cannot be written (/dev/null: Not a directory)"),
        (["data.length=161", "trainer.micro_tokens=161"], "data.length is 161, but"),
        (["head=hydra", "init=last_layer"], "init=last_layer starts only head=mtp, eagle, hass, eagle3 and eagle4"),
        (["init=checkpoint"], "init=checkpoint starts only head=mtp"),
        (["head=eagle", "head.num_heads=7"], "head.num_heads is 7 and head.num_kv_heads 2"),
        (["head=eagle3", "head.feature_layers=[7]"], "head.feature_layers is [7]: give different layers from 0 to 2"),
        (["model.device=cuda:99"], "model.device is cuda:99, and torch sees"),
        (["model.device=gpu"], "model.device is 'gpu': give cpu, cuda or cuda:N"),
        (["model.device=meta"], "model.device is 'meta', which this machine has not"),
        *(
            ([f"name={name}"], f"name is '{name}', a folder below outputs: give it without .., and another")
            for name in OUT
        ),
        (["plan=true", "data.path=gone.jsonl"], "gone.jsonl: neither a file here nor a Hub dataset"),
        (["plan=true", "data.path=lists.jsonl"], "lists.jsonl: line 1: every record must be a JSON object"),
        (["plan=true", "data.path=single.jsonl"], "single.jsonl: holds a single record"),
        (["plan=true", "workload=gone"], "workload gone is neither a file or folder here"),
        (["plan=1"], "plan is 1: give true, false, or ignore"),
        (["plan=fit"], "plan is 'fit': give true, false, or ignore"),
    ],
)
def test_a_mistake_is_named_before_anything_is_loaded(
    toy: list[str], overrides: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lists.jsonl").write_text("[1, 2]\n")
    Path("single.jsonl").write_text('{"text": "a"}\n')
    refuses(re.escape(told), lambda: check(configured([*toy, *overrides])))
    assert not Path(toy[-1].removeprefix("out=")).exists()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["head.confidence=true"], "head.confidence=true predicts each draft's acceptance, and no loss teaches it"),
        (["head.confidence=true", "+objective.losses.confidence=0"], "and no loss teaches it: give"),
        (["+objective.losses.confidence=1.0"], "objective.losses.confidence: head=block predicts no acceptance; give"),
        (["+objective.on_policy.losses={confidence:1.0}"], "objective.on_policy.losses.confidence: head=block"),
        (["head=mlp", "+objective.losses.confidence=1.0"], "head=mlp predicts no acceptance; give head=block"),
    ],
)
def test_a_predicted_acceptance_and_its_loss_come_together(toy: list[str], overrides: list[str], told: str) -> None:
    refuses(re.escape(told), configured, [*toy, "head=block", *overrides])
    both = ["head=block", "head.confidence=true", "+objective.losses.confidence=0.5"]
    assert configured([*toy, *both]).objective.losses["confidence"] == 0.5
    assert configured([*toy, "head=block", "head.confidence=true", "init=/a/head"]), "whose own configuration it has"


def test_a_start_that_failed_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "checkpoints").mkdir()
    new, replaced = (SimpleNamespace(out=tmp_path, resume=False, overwrite=replaces) for replaces in (False, True))
    check_out(new)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    check_out(replaced)
    with pytest.raises(ValueError, match="holds a run already"):
        check_out(new)


def test_a_run_does_not_replace_the_head_that_it_starts_from(toy: list[str], tmp_path: Path) -> None:
    target = toys.target()
    save_head(tmp_path / "first" / "head", toys.head("medusa", target), target.spec, {"kind": "chain", "depth": 2})
    words = [*toy, "head=medusa", f"init={tmp_path / 'first'}", "overwrite=true"]
    check(configured([*words, f"out={tmp_path / 'second'}"]))
    with pytest.raises(ValueError, match=r"first is the run that overwrite=true replaces .*: give another name"):
        check(configured([*words, f"out={tmp_path / 'first'}"]))


def test_a_plan_checks_the_kind_and_the_engine_of_the_head_that_a_run_starts_from(
    toy: list[str], tmp_path: Path
) -> None:
    target = toys.target()
    head = toys.head_of("eagle", {**toys.HEAD_CONFIGS["eagle"], "bias": True}, target)
    save_head(tmp_path / "first" / "head", head, target.spec, {"kind": "chain", "depth": 2})
    words = [*toy, f"init={tmp_path / 'first'}", "plan=true"]
    resolve(composed([*words, "head=eagle", "engine=sglang"]))
    with pytest.raises(ValueError, match=r"first is a head of kind eagle, .*: give head=eagle"):
        resolve(composed([*words, "head=medusa"]))
    with pytest.raises(ValueError, match=r"^engine=vllm: the head has a bias of fc"):
        resolve(composed([*words, "head=eagle", "engine=vllm"]))


@pytest.mark.parametrize("begun", [False, True])
def test_a_resumed_run_without_a_checkpoint_says_that_it_begins(
    toy: list[str], begun: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    if begun:
        (out / "checkpoints" / "step-00000004").mkdir(parents=True)
    with RunLock(out) as lock:
        run = configured([*toy, f"out={out}", "resume=true"])
        prepare_out(run, values_of(run), lock, {}, TrainingData([], [], Counts()), {})
    assert (f"{out}: nothing to resume, begins at step 0\n" in capsys.readouterr().out) is not begun


def test_a_run_without_held_out_prompts_leaves_none(toy: list[str], tmp_path: Path) -> None:
    """Nor does an empty file stand for prompts, as of a run before this one."""
    out, held_out = tmp_path / "run", Prompt("0", [1, 2], "")
    for prompts in ([held_out], []):
        with RunLock(out) as lock:
            run = configured([*toy, f"out={out}"])
            prepare_out(run, values_of(run), lock, {}, TrainingData([], prompts, Counts()), {})
        assert (own_prompts(str(out)) is not None) == bool(prompts)
    assert not (out / "prompts.jsonl").exists()
    (out / "prompts.jsonl").touch()
    assert own_prompts(str(out)) is None


def test_prompts_have_the_room_that_what_reads_them_asks_for(toy: list[str]) -> None:
    config = toys.ARCHITECTURES["llama"]
    alone, nothing = ["eval.prompts=0"], ["eval.prompts=0", "trainer.eval_prompts=0"]
    rooms = [max_prompt_tokens(configured([*toy, *words]), config) for words in ([], alone, nothing, ["workload=tiny"])]
    assert rooms == [160 - 8, 160 - 1, None, 160 - 1]


def test_a_run_that_does_not_fit_is_refused_before_anything_is_loaded(toy: list[str]) -> None:
    little = [*toy, "model.device=cpu", "device.memory_gb=0.001"]
    told = r"does not fit: it needs \d\.\d+ GiB of memory, and this machine has 1\.0 MiB free: give .*plan=ignore"
    refuses(told, resolve, composed(little))
    resolve(composed([*little, "plan=ignore"]))


def test_checkpoints_that_do_not_fit_the_disk_are_refused(toy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=2**16))
    with pytest.raises(ValueError, match=r"checkpoints and head take .* MiB, and .* has 0\.1 MiB free: free space"):
        resolve(composed(toy))
    resolve(composed([*toy, "resume=true"]))


def test_a_run_that_starts_from_a_head_is_placed_on_accelerators(toy: list[str]) -> None:
    """By the head that is configured, which is of the same kind."""
    words = [*toy, "init=/a/head", "model.device=null", "device=h100", "trainer.micro_tokens=null"]
    placed = resolve_placement(configured(words))
    assert placed.model.placement == "replicate"
    assert plan(placed).micro_batch_size * placed.data.length == placed.trainer.batch_tokens


def test_a_head_that_the_engine_cannot_load_is_refused_by_a_plan(toy: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^engine=openvino: the head has causal=true, .*head\.causal=false"):
        resolve(composed([*toy, "head=block", "engine=openvino", "plan=true"]))


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_memory_of_a_machine_ends_at_that_of_a_container(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its control groups of version 2 or 1, where a group may be seen by the path that it has in the machine's."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "groups").write_text("4:memory:/a/job\n0::/a/job\n")
    monkeypatch.setattr(resolving, "CGROUPS", tmp_path)
    monkeypatch.setattr(resolving, "GROUPS", tmp_path / "groups")
    for text, limited in (("max\n", False), ("1000\n", True)):
        (tmp_path / file).write_text(text)
        assert (resolving.free_bytes() == 1000) == limited
