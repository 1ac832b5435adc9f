"""Maintain a head in service from its log: watch, adapt, compare, swap; the same command resumes.

    python ops/loop.py log=log.jsonl serve=outputs/NAME

Everything is in one folder: state.json; and for each round the log's records, a copy of the former head for a
roll-back, the adapted head's run, and the report that compares them.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omegaconf import DictConfig

from data.text.prompts import before_answers
from data.text.records import parse, to_known_shape
from eval.inputs.drafters import model_of
from eval.measures.losslessness import FailedChecks
from eval.measures.results import BASELINE, LIVE
from eval.report.write import read_report
from heads.common.command import command, quoted
from heads.common.files import atomic_write, check_writable, claim, last_good, read_checked, replacing, write_checked
from heads.common.progress import print_line
from heads.common.typed import Count, Decay, Fraction, Json, Number, Within, typed
from heads.formats.hub import kind_of, resolve_head
from heads.formats.published import is_published
from heads.formats.store import SCHEDULE, read_config, save_tree
from inference.target.placement import AUTO
from ops.commands import FAILED, overrides_of, run_command, split_config
from ops.served import Record
from ops.watch import EARLY, Log, WatcherConfig, check_log, growing, json_object, player, watched
from train.config import RunConfig, run_config
from train.distributed.launch import Overrides, key_of, user_overrides

Train = Callable[[Overrides], None]  # runs a training with these overrides
OWN = ("experiment", "log", "serve", "loop", "name", "out", "resume", "overwrite", "plan", "init", "data.path")
STATE = "state.json"
WATCH, ADAPT, PROVE, SWAP = "watch", "adapt", "prove", "swap"
TRAFFIC, FORMER, ADAPTED, PROOF = "traffic", "former", "adapted", "proof"
TRAINED = NEW, OLD = "new.jsonl", "old.jsonl"  # the new and the old traffic to train on, and to compare heads on:
HELD_OUT = HELD_NEW, HELD_OLD = "proof_new.jsonl", "proof_old.jsonl"
LEAST = 8  # minimum requests of a kind to compare on; with fewer an interval is uninformative


@dataclass(frozen=True)
class LoopConfig:
    """The configuration of the stages; conf/ops/loop.yaml explains the keys."""

    watcher: WatcherConfig
    since: Number | None
    least: Annotated[int, Within(8, 1_000_000)]
    held_out: Annotated[float, Within(0.05, 0.9)]
    old: Decay
    requests: Count
    old_loss: Fraction
    command: str | None


@dataclass(frozen=True)
class LoopJob:
    """A head in service, its log and its maintenance."""

    log: str
    serve: str
    loop: LoopConfig


@dataclass
class State:
    """The content of state.json, written atomically at each decision."""

    serve: str  # the head in service, as the user named it
    round: int = 1  # a round ends with a swap, or the decision against it
    stage: str = WATCH  # the next stage
    begin: int = 0  # line of the log, from 0, at which this round's watch begins
    tried: int = 0  # lines of the log when the last round ended without a swap; 0 after a swap
    decisions: list[Json] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, serve: str) -> "State":
        """Return the state in a folder, or a new state; refuse a state for another head."""
        if not (folder / STATE).is_file():
            write_checked(folder / STATE, asdict(cls(serve)))
        content = read_checked(folder / STATE)
        state = typed(cls, {one.name: content.get(one.name) for one in fields(cls)})
        if state.serve != serve:
            raise ValueError(f"{folder} maintains {state.serve}, not serve={serve}: give that, or another out")
        return state

    def decide(self, out: Path, decision: str, evidence: Json, stage: str, **changes: int) -> None:
        """Record and print this stage's decision, and go to the next stage."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        record = {"at": now, "round": self.round, "stage": self.stage, "decision": decision, "evidence": evidence}
        self.decisions.append(record)
        print_line(f"{self.stage}: {decision}")
        vars(self).update(changes, stage=stage)
        write_checked(out / STATE, asdict(self))


def maintain(run: RunConfig, service: LoopJob, overrides: Overrides, train: Train) -> int:
    """Run the stages, continuing a stopped run; return 1 if an adapted head was not better, otherwise 0.

    `run` is the training that adapts the head, in the maintenance's folder, by the user's `overrides`; `train` runs one
    to its end. Refuse a missing log or head, another head than the folder's, and a log without trainable records.
    """
    if run.plan is True:
        raise ValueError("plan=true plans a training, and the loop may swap a head: leave it out")
    out = Path(run.out)
    check_log(Path(service.log).expanduser())
    resolve_head(service.serve)
    check_writable(out, "out")
    with claim(out / "lock", wait=False) as free:
        if not free:
            raise ValueError(f"{out}: another maintenance is running there; wait for it, or give another out")
        maintenance = Maintenance(run, service, overrides, train, State.read(out, service.serve))
        while (done := getattr(maintenance, maintenance.state.stage)()) is None:
            pass
        return int(done)


class Maintenance:
    """The stages of a head's maintenance; each returns the exit status, or None if another stage follows."""

    def __init__(self, run: RunConfig, service: LoopJob, overrides: Overrides, train: Train, state: State) -> None:
        self.run, self.overrides, self.train, self.state = run, overrides, train, state
        self.serve, self.loop = service.serve, service.loop
        self.out, self.log = Path(run.out), Path(service.log).expanduser()
        self.head = resolve_head(self.serve)
        keys = {"model.path" if key == "model" else key for key in map(key_of, overrides)}
        given = {key: getattr(run.model, key) for word in sorted(keys) if (key := word.removeprefix("model.")) != word}
        self.model = model_of(self.serve, given)
        self.given: Json = {"path": self.model.path, "sibling": True, **given}
        # A published head has no tree: both heads then draft the training's tree, otherwise the served head's.
        self.published = is_published(self.head)
        self.tree = asdict(run.tree) if self.published else {}
        # A swap replaces a local folder; a head on the Hub or in an engine's format stays.
        self.replaceable = last_good(Path(self.serve).expanduser()).is_dir() and not self.published

    @property
    def folder(self) -> Path:
        """Return the folder of this round."""
        return self.out / f"round-{self.state.round}"

    @property
    def lines(self) -> int:
        """Return the number of lines of the log."""
        with self.log.open("rb") as file:
            return sum(1 for _ in file)

    def watch(self) -> int | None:
        """Watch the log from the round's start, or a new file from its first line, and split it."""
        state, lines, since = self.state, self.lines, self.loop.since
        if max(state.begin, state.tried) > lines:
            state.begin = state.tried = 0
        if state.tried and lines - state.tried < self.loop.least:
            more = f"{lines - state.tried:,} of {self.loop.least:,} lines more to try again"
            print_line(f"{WATCH}: the last round swapped nothing; {more}")
            return 0
        if since is not None and since >= lines:
            raise ValueError(
                f"loop.since={since}: {self.log} has {lines} lines, counted from 0; give the first new one"
            )
        if since is not None and since >= state.begin:
            decision, evidence = f"new from line {since + 1:,} on, as given", {"line": since}
        else:
            watcher = self.loop.watcher
            log = Log(self.log, watcher, player(self.serve, self.given, self.tree, watcher, str(self.log)), state.begin)
            outcome = watched(log, watcher)
            if outcome.alarm is None:
                early = f", the first {watcher.reference} of which are the reference" * (outcome.status == EARLY)
                print_line(f"{WATCH}: no alarm in {outcome.requests:,} requests{early}")
                return 0
            since = log.numbers[outcome.alarm.since]
            decision, evidence = str(outcome.alarm), {**outcome.alarm._asdict(), "line": since}
        shutil.rmtree(self.folder / TRAFFIC, ignore_errors=True)  # left by a call that was stopped
        with replacing(self.folder / TRAFFIC) as folder:
            counts = split(self.log, since, self.loop, folder)
        state.decide(self.out, decision, evidence | counts, ADAPT)
        return None

    def adapt(self) -> None:
        """Copy the former head, and train from it on the new requests and some of the old ones."""
        former, adapted, traffic = (self.folder / name for name in (FORMER, ADAPTED, TRAFFIC))
        if not former.is_dir():
            with replacing(former) as folder:
                shutil.copytree(last_good(self.head), folder / "head")
                config = self.head.parent / "config.yaml"  # config.yaml names the target
                if self.head != Path(self.serve).expanduser() and config.is_file():
                    shutil.copy(config, folder)
        if not (adapted / "training.json").is_file():
            # The user's overrides come after the experiment's, and the loop's last.
            given = [one for one in self.overrides if not {key_of(one), key_of(one).split(".")[0]} & {*OWN}]
            share = self.loop.old if (traffic / OLD).stat().st_size else 0.0
            paths = ",".join(quoted(traffic / name) for name in (TRAINED if share else (NEW,)))
            resumes = (adapted / "checkpoints").is_dir()
            self.train([
                "experiment=adapt", f"model.path={quoted(self.model.path)}", f"head={kind_of(self.head)}", *given,
                f"init={quoted(former)}", f"data.path=[{paths}]",
                *([f"data.weights=[{1 - share},{share}]"] if share else []), "data.prompts=''",
                f"name='{self.folder.name}'", f"out={quoted(adapted)}", "eval.prompts=0",
                f"resume={str(resumes).lower()}", f"overwrite={str(not resumes).lower()}",
            ])  # fmt: skip
        if not self.published:
            served = read_config(former / "head")
            save_tree(adapted / "head", served["tree"], served.get(SCHEDULE))
        self.state.decide(self.out, f"trained: {adapted}", {"run": str(adapted)}, PROVE)

    def prove(self) -> int | None:
        """Compare the adapted head with the former one on held-out requests of each kind, and decide."""
        former, adapted, traffic, out = (self.folder / name for name in (FORMER, ADAPTED, TRAFFIC, PROOF))
        settings = self.run.eval
        values = {
            "run": str(former), "compare": [str(adapted)], "out": str(out), "tier": LIVE,
            "workload": [str(traffic / one) for one in HELD_OUT if one == HELD_NEW or (traffic / one).stat().st_size],
            "model": self.given, "tree": self.tree, "prompts": self.loop.requests, "balanced": False, "truncate": True,
            "hf": False, "warmup": 1, "engine": asdict(settings.engine),
            **{key: getattr(settings, key) for key in ("max_new_tokens", "temperature", "repeats")},
            **{key: value for key in ("dtype", "gate_dtype") if (value := getattr(settings, key)) != AUTO},
        }  # fmt: skip
        try:
            run_command("eval/run.py", overrides_of(values))
        except SystemExit as ended:
            if ended.code != FAILED:  # status FAILED: a head is not lossless, which the report shows
                raise
        better, sentence, evidence = verdict(read_report(out / "report.json"), adapted, self.loop.old_loss)
        evidence["report"] = str(out / "report.html")
        if not better:
            return self._not_swapped(sentence, evidence)
        self.state.decide(self.out, sentence, evidence, SWAP)
        return None

    def swap(self) -> int:
        """Replace the head in service, unless it is on the Hub or in an engine's format; run the user's command."""
        run, former = self.folder / ADAPTED, self.folder / FORMER
        if self.replaceable:
            copy_head(run / "head", self.head)
        status = 0
        if self.loop.command is not None:
            environment = {**os.environ, "RUN": str(run)}
            status = subprocess.run(self.loop.command, shell=True, check=False, env=environment).returncode
        if status:
            if self.replaceable:
                copy_head(former / "head", self.head)
            return self._not_swapped(f"loop.command ended with status {status}", {})
        decision = f"loop.command has put {run} into service"
        if self.replaceable:
            decision = f"{self.serve} has the adapted head; the former one is {former / 'head'}"
        elif self.loop.command is None:
            decision = f"proven, to be published: python train/publish.py run={run} repo=OWNER/NAME format=vllm"
        self.state.decide(
            self.out, decision, {"from": str(run)}, WATCH, round=self.state.round + 1, begin=self.lines, tried=0
        )
        return 0

    def _not_swapped(self, why: str, evidence: Json) -> int:
        """End a round without a swap; its traffic, on which acceptance fell, is no reference for the next round."""
        why += "; the head in service stays"
        self.state.decide(self.out, why, evidence, WATCH, round=self.state.round + 1, tried=self.lines)
        return 1


def copy_head(head: Path, served: Path) -> None:
    """Replace a served head's folder by a copy of another one, atomically. A link to the folder stays a link."""
    with replacing(served.resolve()) as folder:
        shutil.copytree(last_good(head), folder, dirs_exist_ok=True)


def verdict(report: Record, adapted: Path, old_loss: float) -> tuple[bool, str, Json]:
    """Return whether the adapted head is better than the one in service, a sentence about it, and the numbers.

    The adapted head is better if its τ on the new traffic is higher by the lower end of the paired interval, it is
    lossless, and its τ on the old traffic has fallen by at most `old_loss`, again by the lower end. Without a
    comparison it is not better. The head in service comes first in the report.
    """
    rows, gates = report["rows"], report["settings"].get("gate", {})
    name = next((row["drafter"] for row in rows if row["drafter"].endswith(str(adapted))), "")
    taus = {(r["workload"], r["temperature"]): r["tau"] for r in rows if r["drafter"] not in (BASELINE, name)}
    new, old = (
        [
            {**pair["tau"], "former": taus.get((kind, pair["temperature"])) or 0.0, "prompts": pair["prompts"]}
            for pair in report.get("paired", [])
            if (pair["drafter"], pair["workload"]) == (name, kind)
        ]
        for kind in HELD_OUT
    )
    lossless = name in gates and not FailedChecks.of(report["settings"]).drafter(name, [1])
    on_new, on_old = (
        "; ".join("τ {former:.2f} {difference:+.2f} [{low:+.2f}, {high:+.2f}] of {prompts} requests".format(**pair)
                  for pair in pairs) or "nothing to compare"
        for pairs in (new, old)
    )  # fmt: skip
    kinds = [new, old] if any(row["workload"] == HELD_OLD for row in rows) else [new]
    few = any(min((pair["prompts"] for pair in pairs), default=0) < LEAST for pairs in kinds)
    failures = {
        "the adapted head fails the losslessness check": not lossless,
        f"too few requests to compare: {on_new}; on the old: {on_old}": few,
        f"not better on the new traffic: {on_new}": not all(pair["low"] > 0 for pair in new),
        f"better on the new traffic ({on_new}), but the old is forgotten: {on_old}":
            not all(pair["low"] >= -old_loss * pair["former"] for pair in old),
    }  # fmt: skip
    failure = next((sentence for sentence, failed in failures.items() if failed), None)
    better = f"better on the new traffic: {on_new}; on the old: {on_old}; lossless"
    return failure is None, failure or better, {"lossless": lossless, "new": new, "old": old}


def requests_of(lines: Iterator[bytes], name: str) -> Iterator[tuple[bytes, str]]:
    """Yield a log's lines that have an answer, each with its prompt; lines of unknown shape are left out."""
    for index, line in enumerate(lines):
        try:
            entry = parse(to_known_shape(json_object(line), index, name), index, name)
        except ValueError:
            continue
        roles = [message["role"] for message in entry.messages]
        if entry.pretokenized:
            yield line, str(next(before_answers(entry, "first")).token)
        elif "assistant" in roles:
            yield line, json.dumps(entry.messages[: roles.index("assistant")])


def split(log: Path, since: int, loop: LoopConfig, folder: Path) -> dict[str, int]:
    """Write a log's old and new requests, each in two parts by time, for training and comparison; return their counts.

    The proof leaves out a request whose prompt is trained on, with another answer or in the same dialogue. Refuse a log
    of which too few can be used, or are left for the comparison.
    """
    lines = list(growing(log, follow=False, poll=1.0))
    counts = {}
    for trained, held_out, some in zip(TRAINED, HELD_OUT, (lines[since:], lines[:since]), strict=True):
        entries = list(dict.fromkeys(requests_of(iter(some), str(log))))  # without duplicates
        cut = len(entries) - round(loop.held_out * len(entries))
        seen = {prompt for _, prompt in entries[:cut]}
        unseen = {prompt: line for line, prompt in reversed(entries[cut:]) if prompt not in seen}
        if trained == NEW and (len(entries) < loop.least or len(unseen) < LEAST):
            raise ValueError(
                f"{log}: {len(entries)} new records can be used, {len(unseen)} of them to compare with a prompt that "
                f"no other one has, and loop.least={loop.least} and {LEAST} are needed: wait for more, or lower it"
            )
        for name, written in ((trained, [line for line, _ in entries[:cut]]), (held_out, [*unseen.values()][::-1])):
            atomic_write(folder / name, b"".join(line.rstrip(b"\n") + b"\n" for line in written))
            counts[name] = len(written)
    return counts


@command("ops/loop")
def main(cfg: DictConfig) -> None:
    """Run the stages; exit with status 1 if an adapted head was not better."""
    training, options = split_config(cfg)
    train = partial(run_command, "train/run.py")
    raise SystemExit(maintain(run_config(training), typed(LoopJob, options), user_overrides(), train))


if __name__ == "__main__":
    main()
