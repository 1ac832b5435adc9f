"""Train the head that is fastest after a budget: short trainings of candidates, then the best one for the rest.

    python ops/budget.py budget=1h log=traffic.jsonl model.path=/my/model

Every training is a `train/run.py` of its own; `budget.json` in the output folder holds the trainings that are done.

Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): every round has the same share of the budget, and drops
the slower half of the candidates. A candidate trains at a constant rate, so that each round continues the one before,
and the run of the best one continues its last and ends with a cooldown (Hägele et al., arXiv 2405.18392).
"""

import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from omegaconf import DictConfig
from rich.console import Console

from heads.common.command import command, quoted
from heads.common.files import write_whole
from heads.common.ranges import Count, NewTokens, Within
from heads.common.typed import typed
from heads.common.untrusted import parse_json, shown
from ops.commands import REFUSED, run_command, split_config
from train.checkpoints import format
from train.checkpoints.resume import differences, plain
from train.config import RunConfig, run_config
from train.distributed.launch import key_of, overrides
from train.planning.check import check_out, clear_out
from train.tracking import sweep

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}  # in seconds
OF_ALL = ("budget", "log", "resume", "overwrite", "name", "out")  # what a training has in its own way
DECIDED = {  # overrides that a training within a budget cannot take, with what to do instead
    "head": "a budget compares several heads: give forecast.candidates",
    "trainer.steps": "the budget decides how long is trained: leave it out",
    "trainer.cooldown": "a budget has one for all trainings: give forecast.cooldown in its place",
    "trainer.warmup": "a budget has one for all trainings: give forecast.warmup, in steps, in its place",
}
FOLDER, STATE = "candidates", "budget.json"  # in the run's folder: the short trainings, and the record of them
PROBE = 6  # steps of the training that says what a step costs
ROOM = 1.1  # of a budget that is advised: the next run's steps may take longer
Train = Callable[[list[str]], object]  # runs a training with these overrides, to its end


@dataclass(frozen=True)
class Budget:
    """What a training may cost: seconds, or floating-point operations."""

    amount: float
    timed: bool

    def __str__(self) -> str:
        """Write it as it is given."""
        if not self.timed:
            return f"{self.amount:.3g} operations"
        unit = next((name for name in ("h", "min") if self.amount >= UNITS[name]), "s")
        return f"{self.amount / UNITS[unit]:.3g} {unit}"

    @classmethod
    def read(cls, value: Any) -> "Budget":
        """Return the budget of `1h`, `90min` or `5e15`; refuse anything else."""
        match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d{1,3})?)\s*(s|min|h|d)?\s*", str(value), re.I)
        amount = float(match[1]) * UNITS[(match[2] or "s").lower()] if match else 0.0
        if not match or isinstance(value, bool) or not 0 < amount < float("inf"):
            raise ValueError(
                f"budget is {shown(value)}: give a time above 0 ({', '.join(f'1{unit}' for unit in UNITS)}), or a "
                "number of floating-point operations, such as 5e15"
            )
        return cls(amount, match[2] is not None)


@dataclass(frozen=True)
class ForecastConfig:
    """Configure the short trainings of `budget`; conf/ops/budget.yaml says what each key means."""

    candidates: list[str]
    share: Annotated[float, Within(0, 1, above=True, below=True)]
    warmup: Count
    cooldown: Annotated[float, Within(0, 1, above=True, below=True)]
    prompts: Annotated[int, Within(4, 4096)]
    tokens: NewTokens

    def __post_init__(self) -> None:
        if not all(self.candidates) or len({*self.candidates}) < len(self.candidates) or not self.candidates:
            raise ValueError(
                f"forecast.candidates is {shown(self.candidates)}: give one head or more, each once, with overrides of "
                "its own behind its name, as [mlp,'eagle3 head.layers=2']"
            )


@dataclass(frozen=True)
class BudgetConfig:
    """Configure `budget`; conf/ops/budget.yaml says what each key means."""

    budget: Budget
    log: str | None
    forecast: ForecastConfig


class Search:
    """The trainings of a run within its budget; `state` is the content of `budget.json`.

    Args:
        run: the run, without its head.
        config: its budget and candidates.
        words: the overrides that all trainings have in common.
        train: runs a training with further overrides, to its end.
    """

    def __init__(self, run: RunConfig, config: BudgetConfig, words: list[str], train: Train) -> None:
        self.run, self.budget, self.config, self.train = run, config.budget, config.forecast, train
        self.out = Path(run.out)
        settings = plain({"budget": str(self.budget), "overrides": sorted(words), **asdict(self.config)})
        self.state: dict[str, Any] = {"settings": settings, "spent": 0.0, "left_out": {}, "runs": {}, "steps": None}
        path = self.out / STATE
        if run.overwrite and not run.resume:
            path.unlink(missing_ok=True)
        if path.exists():
            if not run.resume:
                raise ValueError(f"{run.out} holds a budget's trainings already: give resume=true or overwrite=true")
            self.state = parse_json(path.read_bytes())
            if changed := differences(self.state["settings"], settings):
                raise ValueError(
                    f"{path}: resume=true needs the settings that it began with, and here differ {changed}"
                )
        else:
            shutil.rmtree(self.out / FOLDER, ignore_errors=True)
        if config.log is not None:
            log = Path(config.log)
            copy = self.out / f"log{''.join(log.suffixes)}"
            if log.is_file() and not copy.is_file():  # to which a service may add lines meanwhile
                self.out.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(log, copy)
            source = str(copy) if log.is_file() else config.log
            self.train = lambda more: train([*more, f"data.path={quoted(source)}"])

    def save(self) -> None:
        """Write the state."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_whole(self.out / STATE, (json.dumps(self.state, indent=1) + "\n").encode())

    def folder(self, words: str) -> Path:
        """Return the folder of a candidate's trainings."""
        return self.out / FOLDER / str(self.config.candidates.index(words))

    def overrides(self, words: str, steps: int, cooldown: float) -> list[str]:
        """Return the overrides of a candidate's training that may be lengthened."""
        schedule = [f"trainer.cooldown={cooldown}", f"trainer.warmup={min(1.0, self.config.warmup / steps)}"]
        return [*overrides_of(words), f"trainer.steps={steps}", *schedule]

    def measure(self, words: str, steps: int, number: int) -> None:
        """Train a candidate to `steps` in round `number`, evaluate it, and count the cost."""
        began, folder, config = time.monotonic(), self.folder(words), self.config
        if number == 0:  # the probe's warm-up was shorter
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        checkpoints = format.checkpoints(folder / "checkpoints")
        begin = format.step_of(checkpoints[-1]) if checkpoints else 0
        self.train([
            *self.overrides(words, steps, 0.0), f"out={quoted(folder)}", "name=pilot",
            "resume=true" if checkpoints else "overwrite=true", "trainer.eval_prompts=0", "trainer.patience=null",
            "trainer.trackers=[jsonl]", "trainer.log_every=1", f"trainer.eval_every={steps}",
            f"trainer.save_every={steps}", f"eval.prompts={config.prompts}", f"eval.max_new_tokens={config.tokens}",
            "eval.repeats=1", "eval.hf=false", "eval.tier=[live]",
        ])  # fmt: skip
        cost = cost_of(folder, self.budget.timed)
        seconds = time.monotonic() - began if self.budget.timed else (steps - begin) * cost
        self.state["spent"] += seconds
        fixed = max(0.0, seconds - (steps - begin) * cost)
        row = {"tau": None, "speedup": 0.0} if number < 0 else measured(folder, words)
        self.state["runs"][words] = {"cost": cost, "fixed": fixed, "steps": steps, "rounds": number + 1, **row}
        self.save()

    def probe(self) -> list[str]:
        """Train every candidate for a few steps, to see what these cost; return those that the target takes."""
        runs, left_out = self.state["runs"], self.state["left_out"]
        for words in self.config.candidates:
            if words not in runs and words not in left_out:
                try:
                    self.measure(words, PROBE, -1)
                except SystemExit as error:
                    if error.code not in REFUSED:  # as of a signal
                        raise
                    left_out[words] = f"its training ended with status {error.code}, see above"
                    self.save()
        for words, why in left_out.items():
            say(f"{words} is left out: {why}")
        if not runs:
            raise ValueError(f"no candidate can be trained: {'; '.join(left_out.values())}")
        return [*runs]

    def choose(self) -> str:
        """Train all candidates, then the faster half of them for longer, until one is left; return it.

        Raises:
            ValueError: the budget is too small for the first round.
        """
        running, runs = self.probe(), self.state["runs"]
        rounds = math.ceil(math.log2(len(running)))
        share = self.config.share * self.budget.amount / max(rounds, 1)
        least = max(PROBE + 1, self.config.warmup)
        needed = max(runs[words]["fixed"] + least * runs[words]["cost"] for words in running) * len(running)
        if needed > share and not any(runs[words]["rounds"] for words in running):
            enough = Budget(ROOM * needed * max(rounds, 1) / self.config.share, self.budget.timed)
            raise ValueError(
                f"budget={self.budget} is too small for short trainings of {len(running)} candidates: about {enough} "
                "would do, or fewer forecast.candidates, or a lower forecast.warmup, each with overwrite=true"
            )
        for number in range(rounds):
            for words in running:
                one = runs[words]
                if one["rounds"] <= number:
                    more = int((share / len(running) - one["fixed"]) / one["cost"])
                    begin = one["steps"] if number else 0
                    self.measure(words, max(begin + more, begin + 1, least), number)
                    one = runs[words]
                    tokens = one["steps"] * self.run.trainer.batch_tokens
                    say(f"{words}: {tokens:,} tokens, τ {one['tau']:.2f}, {one['speedup']:.2f}x")
            finished = [words for words in running if runs[words]["rounds"] > number + 1]  # of a call that was stopped
            running.sort(key=lambda words: (words not in finished, -runs[words]["speedup"]))
            running = running[: math.ceil(len(running) / 2)]
        return running[0]

    def finish(self, words: str) -> None:
        """Train a candidate for the rest of the budget, and say what came out."""
        one, folder = self.state["runs"][words], self.folder(words)
        if self.state["steps"] is None:
            clear_out(self.out)
            left = self.budget.amount - self.state["spent"] - one["fixed"]
            name = format.folder_of(Path(), one["steps"]).name
            shutil.copytree(folder / "checkpoints" / name, self.out / "checkpoints" / name)
            for file in ("metrics.jsonl", "config.yaml"):  # the latter says what its head began as
                shutil.copy(folder / file, self.out / file)
            self.state["steps"] = one["steps"] + max(1, int(left / one["cost"]))
            self.save()
        steps = self.state["steps"]
        say(f"{words} is trained on {steps * self.run.trainer.batch_tokens:,} tokens")
        self.train([*self.overrides(words, steps, self.config.cooldown), "resume=true", f"out={quoted(self.out)}",
                    f"name={quoted(self.run.name)}"])  # fmt: skip
        if self.run.eval.prompts:
            row = measured(self.out, words)
            say(f"came out: τ {row['tau']:.2f}, {row['speedup']:.2f}x")


def say(line: str) -> None:
    """Print a line."""
    Console().print(line, highlight=False, soft_wrap=True, markup=False)


def overrides_of(words: str) -> list[str]:
    """Return the overrides of a candidate, a head's name with further ones behind it."""
    return f"head={words}".split()


def measured(folder: Path, words: str) -> dict[str, float]:
    """Return τ and the speedup that a finished training's report has of its head."""
    row = sweep.rows_of("", words.split(maxsplit=1)[0], folder)[0]
    if row["tau"] is None or row["speedup"] is None:
        raise ValueError(f"{folder}: nothing was drafted, as every answer has one token; give other data.prompts")
    return {"tau": row["tau"], "speedup": row["speedup"]}


def cost_of(folder: Path, timed: bool) -> float:
    """Return a step's seconds, where the first may compile, or its floating-point operations."""
    if timed:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        seconds = [record["step_seconds"] for record in lines if "step_seconds" in record]
        return float(np.median(seconds[1:] or seconds))
    total = json.loads((folder / "training.json").read_text())
    if not total["flops"]:
        raise ValueError("no operations were counted: give a budget in time")
    return float(total["flops"] / total["steps"])


def shared_words(words: list[str], log: str | None) -> list[str]:
    """Return the overrides that all trainings within a budget have in common; refuse those of a single one."""
    keys = [key_of(word) for word in words]
    for word, key in zip(words, keys, strict=True):
        if key.startswith("head."):
            raise ValueError(f"{key} is of one head: give it with its head, as forecast.candidates=['eagle3 {word}']")
        if key in DECIDED:
            raise ValueError(f"{word}: {DECIDED[key]}")
    if log is not None and "data.path" in keys:
        raise ValueError("log and data.path are both given: log takes the place of data.path, leave one out")
    return [
        word for word, key in zip(words, keys, strict=True) if key not in OF_ALL and not key.startswith("forecast.")
    ]


@command("ops/budget")
def main(cfg: DictConfig) -> None:
    """Choose the head and train it within the budget, or plan its candidates."""
    training, options = split_config(cfg)
    run = run_config(training)
    config = typed(BudgetConfig, options, ready={"budget": Budget.read(options.budget)})
    words = shared_words(overrides(), config.log)
    if run.plan is True:
        for candidate in config.forecast.candidates:
            run_command("train/run.py", [*words, *overrides_of(candidate)])
        return
    check_out(Path(run.out), replaces=run.resume or run.overwrite)
    search = Search(run, config, words, lambda more: run_command("train/run.py", [*words, *more]))
    search.finish(search.choose())


if __name__ == "__main__":
    main()
