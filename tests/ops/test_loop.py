"""A head in service from its log: adapted, proven and swapped, resumed from any stage, never replaced by a worse one.

The toy target's greedy answers are the traffic; its head in service has random weights, so that training helps.
"""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors.torch import load_file

from eval.measures.losslessness import Gate
from eval.measures.metrics import count_passes
from eval.measures.results import MeasuredRequest, Measurement, result
from eval.report.write import Report
from heads.common.files import last_good, read_checked
from heads.common.resolvers import ROOT, register_resolvers
from heads.common.typed import typed
from heads.formats.hub import resolve_head
from heads.formats.store import read_config, save_head
from inference.decode import RequestParams, autoregress
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from inference.verification.sample import GREEDY
from ops import loop as stages
from ops.commands import overrides_of, run_command, split_config
from ops.loop import STATE, SWAP, WATCH, LoopJob, State, maintain, split, verdict
from tests import toys
from train.config import run_config

NEW_FROM = 60  # of the log's records
TREE = TreeConfig("dynamic", 2, 20, 30, [], [])  # wide, so that a toy head gains by what tokens are frequent
SMALL = [
    "loop.watcher.reference=30", "loop.least=20", "loop.requests=15", "data.length=32", "data.held_out=4",
    "data.cache=null", "data.contamination=null",
    "trainer.steps=120", "trainer.lr=1e-2", "trainer.batch_tokens=256", "trainer.micro_tokens=256",
    "trainer.eval_every=20", "trainer.save_every=10", "trainer.eval_prompts=2", "trainer.eval_tokens=8",
    "trainer.precision=fp32", "launcher=inline", "model.device=cpu",
    "model.dtype=float32", "eval.max_new_tokens=10",
]  # fmt: skip


def answer(of: Target, prompt: list[int]) -> list[int]:
    return list(autoregress(of, prompt, RequestParams(12, GREEDY)).tokens)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target, a head in service and a log of which the second half fell."""
    folder = tmp_path_factory.mktemp("service")
    target = toys.target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        saved = Target.of(run_config(split_config(compose("ops/loop", words_of(folder, [])))[0]).model)
    save_head(folder / "served" / "head", toys.head("medusa", saved), saved.spec, asdict(TREE))
    model = {"name": "toy", "path": str(folder / "target"), "dtype": "float32", "device": "cpu"}
    (folder / "served" / "config.yaml").write_text(json.dumps({"model": model}), encoding="utf-8")
    records = []
    for i in range(2 * NEW_FROM):
        prompt = toys.prompt(i, 6)
        accepted = [2, 1, 2, 3] if i < NEW_FROM else [0, 1, 0]
        records.append({"prompt_token_ids": prompt, "token_ids": answer(target, prompt), "accepted": accepted})
    write(folder / "log.jsonl", records)
    return folder


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def words_of(folder: Path, more: list[str]) -> list[str]:
    named = [f"log={folder / 'log.jsonl'}", f"serve={folder / 'served'}", f"model.path={folder / 'target'}"]
    return ["head=medusa", *named, *SMALL, f"out={folder / 'loop'}", *more]


@pytest.fixture
def folder(service: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the service, in which the loop's command composes its trainings."""
    shutil.copytree(service, tmp_path / "service")
    file = tmp_path / "service" / "served" / "config.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace(str(service), str(tmp_path / "service")), encoding="utf-8")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield tmp_path / "service"


def go(folder: Path, *more: str, train: Any = None) -> int:
    words, train = words_of(folder, [*more]), train or partial(run_command, "train/run.py")
    training, own = split_config(compose("ops/loop", words))
    return maintain(run_config(training), typed(LoopJob, own), words, train)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    ours, theirs = weights(first), weights(second)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def decisions(folder: Path) -> list[tuple[str, str]]:
    return [(one["stage"], one["decision"]) for one in read_checked(folder / "loop" / STATE)["decisions"]]


@pytest.mark.slow
def test_a_fall_is_seen_and_a_better_head_takes_over_and_can_be_taken_back(folder: Path) -> None:
    served = folder / "served" / "head"
    shutil.copytree(served, folder / "before")
    assert go(folder) == 0
    assert [stage for stage, _ in decisions(folder)] == ["watch", "adapt", "prove", "swap"]
    assert "better on the new traffic" in decisions(folder)[2][1]
    traffic = folder / "loop" / "round-1" / "traffic"
    assert abs(sum(1 for _ in (traffic / "new.jsonl").open()) - 0.75 * NEW_FROM) <= 5
    assert same(served, folder / "loop" / "round-1" / "adapted" / "head")
    assert not same(served, folder / "before")
    assert read_config(served)["tree"] == asdict(TREE), "another tree would have been compared, and served"
    assert (folder / "loop" / "round-1" / "proof" / "report.html").is_file()
    assert go(folder) == 0, "the same log again: nothing new"
    assert len(decisions(folder)) == 4
    assert same(folder / "loop" / "round-1" / "former" / "head", folder / "before")


def test_a_log_that_was_rotated_is_watched_from_its_first_line(folder: Path) -> None:
    (folder / "loop").mkdir()
    State(str(folder / "served"), begin=1000, round=2).decide(folder / "loop", "the round before", {"to": 1000}, WATCH)
    with pytest.raises(StoppedError):
        go(folder, train=stop)
    assert [stage for stage, _ in decisions(folder)[1:]] == ["watch"]


@pytest.mark.parametrize("status", [0, 3])
def test_a_command_puts_the_head_into_service_or_the_former_one_stays(folder: Path, status: int) -> None:
    served, loop = folder / "served" / "head", folder / "loop"
    target = toys.target()
    for i, name in enumerate(("former", "adapted")):
        torch.manual_seed(i)
        save_head(loop / "round-1" / name / "head", toys.head("medusa", target), target.spec, asdict(TREE))
    State(str(folder / "served")).decide(loop, "better", {"new": []}, SWAP, since=NEW_FROM)
    file = folder / "loaded"
    assert go(folder, f"loop.command='echo $RUN > {file}; exit {status}'") == (1 if status else 0)
    assert file.read_text() == f"{loop / 'round-1' / 'adapted'}\n"
    assert same(served, loop / "round-1" / ("former" if status else "adapted") / "head")
    assert ("command ended with status 3; the head in service stays" in decisions(folder)[-1][1]) == bool(status)


def test_a_link_to_the_head_in_service_stays_one_however_often_it_is_swapped(tmp_path: Path) -> None:
    for name in ("first", "second", "heads/current"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(name)
    link = tmp_path / "link"
    link.symlink_to(Path("heads", "current"))
    for name in ("second", "first", "second"):
        stages.copy_head(tmp_path / name, link)
        assert link.is_symlink()
        assert (link / "config.json").read_text() == name
    current = tmp_path / "heads" / "current"
    assert [*current.parent.iterdir()] == [current]
    current.rename(current.with_name(".current.old"))  # as a swap that is killed between its two moves leaves it
    assert resolve_head(str(link)) == link
    assert (last_good(link) / "config.json").read_text() == "second"
    stages.copy_head(tmp_path / "first", link)
    assert (link / "config.json").read_text() == "first"
    assert [*current.parent.iterdir()] == [current]


def test_a_line_given_as_the_first_new_one_is_one_of_the_log_and_can_be_corrected(folder: Path) -> None:
    count = 2 * NEW_FROM
    for since, line in ((count, rf"^loop.since={count}: .*log.jsonl has {count} lines"), (count - 5, "5 new records")):
        with pytest.raises(ValueError, match=line):
            go(folder, f"loop.since={since}")
        assert decisions(folder) == []
    with pytest.raises(StoppedError):
        go(folder, f"loop.since={NEW_FROM}", train=stop)
    assert decisions(folder) == [("watch", f"new from line {NEW_FROM + 1} on, as given")]


def test_the_proof_has_the_last_requests_and_no_prompt_that_is_trained_on(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    service = typed(LoopJob, split_config(compose("ops/loop", words_of(folder, ["loop.held_out=0.4"])))[1])
    lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)[:40]
    chat = [{"role": role, "content": "w1"} for role in ("user", "assistant", "user")]
    bad = [b"{broken\n", b'{"messages": [{"role": "user", "content": "w1"}]}\n']
    again = [lines[0], json.dumps({"messages": chat[:2]}).encode() + b"\n", json.dumps({"messages": chat}).encode()]
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"".join([*lines[:20], *bad, *lines[20:], *again]))
    assert split(log, 22, service.loop, tmp_path / "x") == {
        "new.jsonl": 14, "proof_new.jsonl": 8, "old.jsonl": 12, "proof_old.jsonl": 8,
    }  # fmt: skip
    written = [
        (tmp_path / "x" / name).read_bytes().splitlines(keepends=True) for name in ("old.jsonl", "proof_old.jsonl")
    ]
    assert written[0] + written[1] == lines[:20]
    others = [json.loads(line) | {"token_ids": [1, 2]} for line in lines[:10]]  # asked again
    log.write_bytes(b"".join(lines[:10]))
    with log.open("ab") as file:
        file.writelines(json.dumps(other).encode() + b"\n" for other in others)
    with pytest.raises(ValueError, match=r"20 new records can be used, 0 of them .* 8 are needed"):
        split(log, 0, service.loop, tmp_path / "x")


class StoppedError(Exception):
    """What stops a stage."""


def stop(*_: Any, **__: Any) -> None:
    raise StoppedError


def after(function: Any, *given: Any, **named: Any) -> None:
    """Stop behind a function: what it has done is there, its decision is not."""
    function(*given, **named)
    raise StoppedError


def test_a_stopped_training_goes_on(folder: Path) -> None:
    seen: list[str] = []

    def train(words: list[str]) -> None:
        seen.extend(word for word in words if word.startswith("resume="))
        (folder / "loop" / "round-1" / "adapted" / "checkpoints").mkdir(parents=True, exist_ok=True)
        raise StoppedError

    for _ in range(2):
        with pytest.raises(StoppedError):
            go(folder, train=train)
    assert seen == ["resume=false", "resume=true"]


def untrained(words: list[str]) -> None:
    """Train nothing: the adapted head is the former one with other weights."""
    out, init = (
        Path(next(word for word in words if word.startswith(f"{key}=")).partition("=")[2].strip("'"))
        for key in ("out", "init")
    )
    shutil.copytree(init / "head", out / "head")
    (out / "training.json").write_text("{}", encoding="utf-8")


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets a proof have this lower end of the gain on the new traffic."""

    def prove(low: float) -> None:
        def read(file: Path) -> dict[str, Any]:
            names = ("mtp /f", f"mtp {file.parents[1] / 'adapted'}")
            return report_of(new=difference(low), names=names).as_dict()

        monkeypatch.setattr(stages, "run_command", lambda *_: None)
        monkeypatch.setattr(stages, "read_report", read)

    return prove


def test_it_goes_on_wherever_it_was_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch, proven: Any) -> None:
    proven(0.1)
    for name in ("split", "run_command", "verdict", "copy_head"):
        for hook in (stop, partial(after, getattr(stages, name))):
            with monkeypatch.context() as patch:
                patch.setattr(stages, name, hook)
                with pytest.raises(StoppedError):
                    go(folder, train=untrained)
    assert go(folder, train=untrained) == 0
    assert [stage for stage, _ in decisions(folder)] == ["watch", "adapt", "prove", "swap"]
    assert same(folder / "served" / "head", folder / "loop" / "round-1" / "adapted" / "head")


def test_a_head_that_is_not_better_stays_out_and_the_round_is_tried_again_with_more_of_the_log(
    folder: Path, capsys: pytest.CaptureFixture[str], proven: Any
) -> None:
    log = folder / "log.jsonl"
    fallen = log.read_bytes().splitlines(keepends=True)[NEW_FROM:]
    shutil.copytree(folder / "served" / "head", folder / "before")
    proven(-0.1)
    assert go(folder, train=untrained) == 1
    assert decisions(folder)[-1][0] == "prove"
    assert "the head in service stays" in decisions(folder)[-1][1]
    assert same(folder / "served" / "head", folder / "before")
    assert go(folder, train=stop) == 0
    assert "0 of 20 lines more to try again" in capsys.readouterr().out
    with log.open("ab") as file:
        file.writelines(fallen[:20])
    with pytest.raises(StoppedError):
        go(folder, train=stop)
    state = State.read(folder / "loop", str(folder / "served"))
    assert (state.round, state.stage, state.begin) == (2, "adapt", 0), "the reference is what it was"


def report_of(**changes: Any) -> Report:
    """Return a report of two heads on new and old requests."""
    prompts, without = changes.get("prompts", 9), changes.get("without")
    names, failed = changes.get("names", ("mtp /f", "mtp /a")), changes.get("failed", 0)
    pair = {"drafter": names[-1], "base": names[0], "temperature": 0.0, "prompts": prompts}
    tau = {"new": {"difference": 0.5, "low": 0.2, "high": 0.8}, "old": {"difference": 0.0, "low": -0.1, "high": 0.1}}
    tau |= {key: value for key, value in changes.items() if key in tau}
    paired = [{**pair, "workload": f"proof_{key}.jsonl", "tau": value} for key, value in tau.items() if key != without]
    rows = []
    for name, key in itertools.product(names, tau):
        measurement = Measurement(f"proof_{key}.jsonl", 0.0, 1, 0, 0)
        requests = [MeasuredRequest(count_passes([1, 1], 2, 4))] * 9
        rows.append(result(name, "greedy", "chain", next(measurement.parts(9)), requests))
    gates = changes.get("gates", {names[-1]: Gate(9, 9 - failed, 0, failed)})
    return Report({}, {}, {}, gates, rows, extras={"paired": changes.get("paired", paired)})


GAIN, LOSS = "τ 2.00 +0.50 [+0.20, +0.80] of 9 requests", "τ 2.00 +0.00 [-0.10, +0.10] of 9 requests"
NO_GATE, FEW = "the adapted head fails the losslessness check", "too few requests to compare: "
NOT, BETTER = "not better on the new traffic: τ 2.00 +0.50 ", f"better on the new traffic: {GAIN}; on the old: "
FORGOTTEN = f"better on the new traffic ({GAIN}), but the old is forgotten: τ 2.00 "


def difference(low: float, middle: float = 0.5) -> dict[str, float]:
    return {"difference": middle, "low": low, "high": 0.8}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, f"{BETTER}{LOSS}; lossless"),
        ({"failed": 1}, NO_GATE),
        ({"gates": {}}, NO_GATE),
        ({"names": ("mtp /f",)}, NO_GATE),
        ({"paired": []}, f"{FEW}nothing to compare; on the old: nothing to compare"),
        ({"without": "old"}, f"{FEW}{GAIN}; on the old: nothing to compare"),
        ({"prompts": 7}, f"{FEW}τ 2.00 +0.50 [+0.20, +0.80] of 7 requests; on the old: τ 2.00 +0.00 [-0.10, +0.10] of"),
        ({"new": difference(0.0)}, f"{NOT}[+0.00, +0.80] of 9 requests"),
        ({"old": difference(-0.21, -0.1)}, f"{FORGOTTEN}-0.10 [-0.21, +0.80] of 9 requests"),
        ({"old": difference(-0.2, -0.1)}, f"{BETTER}τ 2.00 -0.10 [-0.20, +0.80] of 9 requests; lossless"),
    ],
)
def test_only_a_head_that_is_better_lossless_and_forgets_nothing_is_better(changes: Any, why: str) -> None:
    """An old τ of 2 may lose a tenth of it, 0.2."""
    content = report_of(**changes).as_dict()
    better, sentence, _ = verdict(content, Path("/a"), 0.1)
    assert sentence.startswith(why)
    assert better == why.startswith(BETTER)


def test_values_are_read_back_as_overrides() -> None:
    values = {"run": "a b/c", "n": 3, "x": 0.5, "yes": True, "none": None, "of": {"list": ["a,b", 2], "empty": []}}
    words = overrides_of(values)
    parsed = {one.get_key_element(): one.value() for one in OverridesParser.create().parse_overrides(words)}
    expected = {key: value for key, value in values.items() if key != "of"}
    assert parsed == expected | {"of.list": ["a,b", 2], "of.empty": []}


def test_what_cannot_begin_is_refused_in_a_line_and_leaves_no_folder(folder: Path) -> None:
    for log in (folder / "gone.jsonl", folder):
        with pytest.raises(ValueError, match=f"^{log}: no such file; give the log that the service writes$"):
            go(folder, f"log={log}")
        assert not (folder / "loop").exists()
    with pytest.raises(ValueError, match="plan=true plans a training"):
        go(folder, "plan=true")
    assert not (folder / "loop").exists()
    for word, told in (("out=/dev/null/loop", "^out=/dev/null/loop: cannot be written"),
                       ("loop.watcher.reference=2", r"loop\.watcher\.reference")):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            go(folder, word)


def test_another_head_or_a_damaged_state_is_refused_in_a_line(folder: Path) -> None:
    assert go(folder, "loop.watcher.reference=1000") == 0
    with pytest.raises(ValueError, match="maintains"):
        go(folder, f"serve={folder / 'served' / 'head'}")
    (folder / "loop" / STATE).write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="damaged"):
        go(folder)
