"""Maintain a head in service by its log: watch, adapt, prove, swap; the same command resumes a killed one.

    python ops/loop.py log=log.jsonl serve=outputs/NAME

Everything is in one folder: state.json; by round the log's records, the former head, which is the way back, the
adapted one's run, and the report that compares them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from omegaconf import DictConfig

from eval.inputs.drafters import model_of
from heads.common.command import command, quoted
from heads.common.files import check_writable, claim, last_good, replacing
from heads.common.ranges import Decay, Fraction, Number, Within
from heads.common.typed import typed
from heads.formats.hub import kind_of, resolve_head
from heads.formats.published import is_published
from heads.formats.store import SCHEDULE, read_config, save_tree
from inference.target.target import Target
from ops import proof
from ops.commands import run_command, split_config
from ops.log import Log, check_log, player
from ops.sequential import EARLY, watched, watcher_config
from ops.state import ADAPT, PROVE, SWAP, WATCH, State
from ops.traffic import Hygiene, split
from train.config import RunConfig, run_config
from train.distributed import processes
from train.distributed.launch import key_of, overrides

Train = Callable[[list[str]], None]  # a training with these overrides
OWN = ("experiment", "log", "serve", "loop", "name", "out", "resume", "overwrite", "plan", "init", "data.path")
NEW, OLD = "new.jsonl", "old.jsonl"
FORMER, ADAPTED, PROOF = "former", "adapted", "proof"


@dataclass(frozen=True)
class LoopConfig:
    """Configure the stages; conf/ops/loop.yaml says what each key means."""

    watcher: dict[str, Any]
    since: Number | None
    least: Annotated[int, Within(8, 1_000_000)]
    held_out: Annotated[float, Within(0.05, 0.9)]
    old: Decay
    requests: Annotated[int, Within(2, 1_000_000)]
    old_loss: Fraction
    command: str | None
    rollback: bool


@dataclass(frozen=True)
class LoopJob:
    """A head in service, its log and how it is maintained."""

    log: str
    serve: str
    loop: LoopConfig


def maintain(run: RunConfig, service: LoopJob, words: list[str], train: Train) -> int:
    """Run the stages from where they were stopped; return 1 where an adapted head was not better, else 0.

    Args:
        run: the training that adapts the head; `out` is the maintenance's folder.
        service: the head and its log.
        words: the user's overrides of the training.
        train: runs a training with overrides, to its end.

    Raises:
        ValueError: no log or head, a folder that cannot be written, another head than the folder's, or a log that
            cannot be trained on.
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
        return Maintenance(run, service, words, train, State.read(out, service.serve)).go()


class Maintenance:
    """One head's maintenance, at a stage."""

    def __init__(self, run: RunConfig, service: LoopJob, words: list[str], train: Train, state: State) -> None:
        self.run, self.words, self.train, self.state = run, words, train, state
        self.serve, self.loop = service.serve, service.loop
        self.out, self.log = Path(run.out), Path(service.log).expanduser()
        keys = {"model.path" if key == "model" else key for key in map(key_of, words)}
        named = sorted(key.removeprefix("model.") for key in keys if key.startswith("model."))
        given = {key: getattr(run.model, key) for key in named}
        self.model = model_of(self.serve, given)
        self.given: dict[str, Any] = {"path": self.model.path, "sibling": True, **given}
        # A published head brings no tree: both heads draft the training's then, and else the served one's.
        self.published = is_published(resolve_head(self.serve))
        self.tree = asdict(run.tree) if self.published else {}

    @property
    def folder(self) -> Path:
        """The folder of this round."""
        return self.state.folder(self.out)

    @property
    def ours(self) -> bool:
        """Whether the head in service is a folder here that a swap replaces: not on the Hub, nor of an engine."""
        return last_good(Path(self.serve).expanduser()).is_dir() and not self.published

    def go(self) -> int:
        """Run stage after stage until a round ends, or there is nothing to do yet."""
        if self.loop.rollback:
            return self.roll_back()
        stages = {WATCH: self.watch, ADAPT: self.adapt, PROVE: self.prove, SWAP: self.swap}
        done: int | None = None
        while done is None:
            done = stages[self.state.stage]()
        return done

    def watch(self) -> int | None:
        """Watch the log from where this round began; from its first line where another file has its name."""
        lines = _lines(self.log)
        if max(self.state.begin, self.state.tried) > lines:
            self.state.begin = self.state.tried = 0
        if self.state.tried and (more := lines - self.state.tried) < self.loop.least:
            self.state.drop_quiet()
            decision = f"the last round swapped nothing; {more:,} of {self.loop.least:,} lines more to try again"
            self.state.decide(self.out, decision, {}, WATCH)
            return 0
        if self.take_since():
            return None
        watcher = watcher_config(self.loop.watcher, "loop.watcher")
        play = player(self.serve, self.given, self.tree, watcher, str(self.log))
        log = Log(self.log, watcher, play, self.state.begin)
        outcome = watched(log, watcher)
        if outcome.alarm is None:
            early = f", the first {watcher.reference} of which are the reference" * (outcome.status == EARLY)
            self.state.drop_quiet()
            self.state.decide(self.out, f"no alarm in {outcome.requests:,} requests{early}", {}, WATCH)
            return 0
        line = log.numbers[outcome.alarm.since]
        self.state.decide(self.out, str(outcome.alarm), vars(outcome.alarm) | {"line": line}, ADAPT, since=line)
        return None

    def take_since(self) -> bool:
        """Go on with the line that is given as the first new one, unless it lies before this round; say whether."""
        since, lines = self.loop.since, _lines(self.log)
        if since is None or since < self.state.begin:
            return False
        if since >= lines:
            raise ValueError(
                f"loop.since={since}: {self.log} has {lines} lines, counted from 0, so none of them would be new; give "
                "the first that is"
            )
        if (self.state.stage, self.state.since) != (ADAPT, since):
            self.state.decide(self.out, f"new from line {since + 1:,} on, as given", {}, ADAPT, since=since)
        return True

    def adapt(self) -> None:
        """Divide the log, set the former head aside, and train from it on the new part and some of the old."""
        traffic = self.folder / "traffic"
        if not traffic.is_dir():
            self.take_since()  # which may have been corrected, as where too few new lines could be used
            self.divide(traffic)
            processes.release_freed()
        if not (self.folder / FORMER).is_dir():
            _copy_run(self.serve, self.folder / FORMER)
        adapted = self.folder / ADAPTED
        if not (adapted / "training.json").is_file():
            self.train(self.overrides(traffic, adapted))
        if not self.published:
            served = read_config(self.folder / FORMER / "head")
            save_tree(adapted / "head", served["tree"], served.get(SCHEDULE))
        self.state.decide(self.out, f"trained: {adapted}", {"run": str(adapted)}, PROVE)

    def divide(self, traffic: Path) -> None:
        """Write the parts of the log; the target that reads them is gone before the training loads its own."""
        assert self.state.since is not None
        hygiene = Hygiene(Target.of(self.model), str(self.log), self.run.data.max_tokens)
        with replacing(traffic) as folder:
            names, loop = (NEW, proof.NEW, OLD, proof.OLD), self.loop
            counts = split(self.log, self.state.since, hygiene, loop.held_out, loop.least, folder, names)
        line = f"{counts[NEW]:,} new and {counts[OLD]:,} old requests to train on"
        self.state.decide(self.out, "; ".join([line, *counts.pop("remarks")]), counts, ADAPT)

    def overrides(self, traffic: Path, adapted: Path) -> list[str]:
        """Return the overrides of the training: the user's own, behind the experiment's, and what the loop decides."""
        given = [word for word in self.words if not {key_of(word), key_of(word).split(".")[0]} & {*OWN}]
        old = (traffic / OLD).stat().st_size > 0
        share = self.loop.old
        paths = ",".join(quoted(traffic / name) for name in (NEW, OLD)[: 1 + (old and share > 0)])
        weights = [f"data.weights=[{1 - share},{share}]"] if old and share else []
        resumes, kind = (adapted / "checkpoints").is_dir(), kind_of(resolve_head(self.serve))
        return [
            "experiment=adapt", f"model.path={quoted(self.model.path)}", f"head={kind}", *given,
            f"init={quoted(self.folder / FORMER)}", f"data.path=[{paths}]",
            *weights,
            "data.prompts=''", f"name='{self.folder.name}'", f"out={quoted(adapted)}", "eval.prompts=0",
            f"resume={str(resumes).lower()}", f"overwrite={str(not resumes).lower()}",
        ]  # fmt: skip

    def prove(self) -> int | None:
        """Compare the adapted head with the former one, and decide."""
        former, adapted, out = (self.folder / name for name in (FORMER, ADAPTED, PROOF))
        report = proof.compared(
            former, adapted, self.folder / "traffic", out, self.loop.requests, self.run.eval, self.given, self.tree
        )
        verdict = proof.verdict(report, adapted, self.loop.old_loss)
        evidence = verdict.evidence | {"report": str(out / "report.html")}
        if verdict.better:
            self.state.decide(self.out, verdict.sentence, evidence, SWAP)
            return None
        return self._not_swapped(verdict.sentence, evidence)

    def swap(self) -> int:
        """Replace the head in service, whole, unless it is on the Hub or in an engine's format; run the command."""
        run = self.folder / ADAPTED
        if self.ours:
            copy_head(run / "head", resolve_head(self.serve))
        if failed := self._command(run):
            if self.ours:
                copy_head(self.folder / FORMER / "head", resolve_head(self.serve))
            return self._not_swapped(failed, {})
        if self.ours:
            self._end_round(f"{self.serve} has the adapted head; back: loop.rollback=true", {"from": str(run)})
        elif self.loop.command is None:
            publish = f"python train/publish.py run={run} repo=OWNER/NAME format=vllm"
            self._end_round(f"proven, to be published: {publish}", {})
        else:
            self._end_round(f"loop.command has put {run} into service", {})
        return 0

    def _command(self, run: Path) -> str:
        """Run the command that makes the service load a run's head; return what is wrong where it fails."""
        if self.loop.command is None:
            return ""
        done = subprocess.run(self.loop.command, shell=True, check=False, env={**os.environ, "RUN": str(run)})
        return f"loop.command ended with status {done.returncode}" if done.returncode else ""

    def roll_back(self) -> int:
        """Put the former head of the last swap back into service; a round begins behind what the other one served."""
        swaps = (one for one in reversed(self.state.decisions) if one["stage"] == SWAP and "from" in one["evidence"])
        begun = self.state.stage == SWAP and (self.ours or self.loop.command is not None)
        last = self.state.round if begun else next((one["round"] for one in swaps), None)
        if last is None:
            raise ValueError(f"{self.out}: no head was swapped in yet, so there is none to go back to")
        former = self.out / f"round-{last}" / FORMER
        if self.ours:  # else what a killed swap may have done is its command's alone
            copy_head(resolve_head(str(former)), resolve_head(self.serve))
        has = f"{self.serve} has the head of {former} again"
        if failed := self._command(former):
            raise ValueError(f"{has}, but {failed}" if self.ours else f"{former} is not in service again: {failed}")
        self._end_round(has if self.ours else f"loop.command has put {former} into service", {"former": str(former)})
        return 0

    def _not_swapped(self, why: str, evidence: dict[str, Any]) -> int:
        """End a round in which the head in service stays: traffic that fell is no reference for the next one."""
        begin, tried = self.state.begin, _lines(self.log)
        self._end_round(f"{why}; the head in service stays", evidence, begin=begin, tried=tried)
        return 1

    def _end_round(self, decision: str, evidence: dict[str, Any], **changes: int) -> None:
        """Record the last decision of a round; the next one watches what the log gets from now on, if nothing else."""
        begun = {"round": self.state.round + 1, "since": None, "begin": _lines(self.log), "tried": 0}
        self.state.decide(self.out, decision, evidence, WATCH, **begun | changes)


def copy_head(head: Path, served: Path) -> None:
    """Replace a folder that a head is served from by a copy of another one: a reader finds one of them, whole.

    A link to the folder stays one.
    """
    with replacing(served.resolve()) as folder:
        shutil.copytree(last_good(head), folder, dirs_exist_ok=True)


def _copy_run(serve: str, former: Path) -> None:
    """Copy a head, and of its run the configuration, which names the target."""
    head = resolve_head(serve)
    with replacing(former) as folder:
        shutil.copytree(last_good(head), folder / "head")
        config = head.parent / "config.yaml"
        if head != Path(serve).expanduser() and config.is_file():
            shutil.copy(config, folder)


def _lines(log: Path) -> int:
    with log.open("rb") as file:
        return sum(1 for _ in file)


@command("ops/loop")
def main(cfg: DictConfig) -> None:
    """Run the stages; exit with status 1 where an adapted head was not better."""
    training, options = split_config(cfg)
    service = typed(LoopJob, options)
    status = maintain(run_config(training), service, overrides(), lambda words: run_command("train/run.py", words))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
