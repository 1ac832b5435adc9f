"""Short trainings of candidate heads within a budget, what they forecast, and the training that follows from them.

A candidate is trained at a constant rate with cooldowns branching off: a point of its curve is a whole training of that
many steps, and the next point goes on from where its cooldown began (Hägele et al., arXiv 2405.18392). So does the run
of the best candidate. `STATE` in the run's folder has every stage that is done, for `resume=true`.
"""

import itertools
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heads.common.command import quoted
from heads.common.files import write_whole
from heads.common.untrusted import parse_json
from train.checkpoints import format
from train.checkpoints.resume import differences, plain
from train.config import Budget, ForecastConfig
from train.distributed.launch import REPORTED
from train.forecast import acceptance
from train.forecast.curve import EACH, RESAMPLES, Array, Curve, forecast, interval

FOLDER, STATE = "forecast", "forecast.json"
PROBE = 6  # steps of the training that says what a step costs
GRID = 16  # lengths of a training that are compared
ROOM = 1.05  # of a budget that is advised: it is written in three digits, which may be rounded down
TIME_ROOM = 1.1  # the same of one in time: the next run's steps may take longer
CHANCE = 0.05  # of being the fastest, below which a candidate is dropped


@dataclass(frozen=True)
class Choice:
    """The candidate to train and its steps, with samples of what comes out.

    `most` steps are what the budget takes, and `gain` has samples of the speedup there over that at `steps`.
    """

    words: str
    steps: int
    most: int
    tau: Array
    speedup: Array
    gain: Array


class Pilots:
    """The short trainings of a run's candidates.

    Args:
        out: the run's folder.
        config: the candidates.
        budget: of all.
        batch_tokens: of an optimiser step.
        train: runs an ordinary training with these overrides, to its end.
        measure: returns `acceptance.measured` of the heads in these folders, on the prompts for candidates.

    Attributes:
        state: what is written; `settings` has those that `load` compares, `overhead` the seconds of measuring a head,
            about; by candidate `cost` those of a step and its operations, `call` those of a training beside its steps,
            `most` the steps the budget takes.
    """

    def __init__(
        self, out: Path, config: ForecastConfig, budget: Budget, batch_tokens: int,
        train: Callable[[list[str]], None], measure: Callable[[list[Path]], list[acceptance.Measured]],
    ) -> None:  # fmt: skip
        self.out, self.config, self.budget, self.batch_tokens = out, config, budget, batch_tokens
        self.train, self.measure = train, measure
        self.state: dict[str, Any] = {
            "budget": str(budget), "candidates": config.candidates, "spent": 0.0, "overhead": 0.0,
            "cost": {}, "call": {}, "left_out": {}, "steps": {}, "points": {}, "dropped": {}, "most": {},
        }  # fmt: skip
        self.begun = time.monotonic()

    def load(self, settings: dict[str, Any]) -> None:
        """Go on from the state of an earlier run; refuse one of another budget, other candidates or settings."""
        path = self.out / STATE
        self.state["settings"] = plain(settings)
        if not path.exists():
            return
        state = parse_json(path.read_bytes())
        if any(state.get(key) != self.state[key] for key in ("budget", "candidates")):
            raise ValueError(
                f"{path} is of budget={state.get('budget')} and candidates {state.get('candidates')}: give the same "
                "with resume=true, or overwrite=true to begin anew"
            )
        if changed := differences(state.get("settings", {}), self.state["settings"]):
            raise ValueError(
                f"{path}: resume=true goes on with the settings that the forecast began with, and here differ "
                f"{changed}; give the old ones, or overwrite=true to begin anew"
            )
        self.state = state

    def save(self) -> None:
        """Write the state, with the seconds so far if these are what the budget counts."""
        now = time.monotonic()
        if self.budget.timed:
            self.state["spent"] += now - self.begun
        self.begun = now
        write_whole(self.out / STATE, (json.dumps(self.state, indent=1) + "\n").encode())

    def folder(self, words: str) -> Path:
        """Return the folder of a candidate's trainings."""
        return self.out / FOLDER / str(self.config.candidates.index(words))

    def overrides(self, steps: int, cooldown: float) -> list[str]:
        """Return the overrides by which a training of so many steps may be lengthened."""
        warmup = min(1.0, self.config.warmup / steps)
        return [f"trainer.steps={steps}", f"trainer.cooldown={cooldown}", f"trainer.warmup={warmup}"]

    def stable(self, steps: int) -> int:
        """Return the step with which the cooldown begins, as `train.optim.cooldown_begin` does."""
        return steps - round(self.config.cooldown * steps)

    def run(self, words: str, steps: int, cooldown: float, begin: int) -> None:
        """Train a candidate to `steps` steps from the checkpoint at step `begin`, and count what that costs."""
        folder = self.folder(words)
        before = stale(folder / "checkpoints", begin)
        quiet = ["trainer.eval_prompts=0", "trainer.patience=null", "eval.prompts=0", "trainer.trackers=[jsonl]"]
        quiet += ["trainer.log_every=1"]  # a training of few steps says what one takes too
        begins = "resume=true" if before else "overwrite=true"  # a killed first training leaves no checkpoint
        save = max(1, steps - round(cooldown * steps))
        keep = -(-steps // save) + 1  # all of this training, of which the next needs one, and `begin`
        self.train(
            [*overrides_of(words), f"out={quoted(folder)}", "name=pilot", begins, *quiet,
             f"trainer.save_every={save}", f"trainer.keep={keep}", f"trainer.eval_every={steps}",
             *self.overrides(steps, cooldown)]
        )  # fmt: skip
        cost = cost_of(folder)
        if not self.budget.timed:
            self.state["spent"] += (steps - before) * cost["flops"]
        self.state["cost"][words] = cost

    def cost(self, words: str) -> float:
        """Return the cost of a candidate's step, in what the budget counts."""
        return float(self.state["cost"][words]["seconds" if self.budget.timed else "flops"])

    def probe(self, words: str) -> str | None:
        """Take a few steps with a candidate to see what they cost; return why it is left out, None if it is not."""
        begun = time.monotonic()
        try:
            self.run(words, PROBE, 0.0, 0)
        except ValueError as error:
            return str(error)
        except SystemExit as error:
            if error.code not in (1, REPORTED):  # as of a signal, which is no refusal
                raise
            return f"its processes ended with status {error.code}, see above"
        self.state["call"][words] = time.monotonic() - begun - PROBE * self.state["cost"][words]["seconds"]
        return None

    def first(self, running: list[str]) -> dict[str, int]:
        """Return the steps of each candidate's first point, such that `points` of them cost its share of the budget.

        Raises:
            ValueError: too few for the warm-up, or operations that are not counted.
        """
        config, points = self.config, 2 ** np.arange(self.config.points)
        factor = float((1 - config.cooldown) * points[-1] + config.cooldown * points.sum())
        costs = {words: self.cost(words) * factor for words in running}
        if not all(costs.values()):
            raise ValueError("no operations were counted: give a budget in time")
        fixed = {words: config.points * self.beside(words) if self.budget.timed else 0.0 for words in running}
        share = config.share * self.budget.amount / len(running)
        steps = {words: int((share - fixed[words]) / costs[words]) for words in running}
        least = max(2, round(config.warmup / (1 - config.cooldown)))
        if min(steps.values()) < least:
            most = max(fixed[words] + least * costs[words] for words in running)
            room = TIME_ROOM if self.budget.timed else ROOM
            enough = Budget(room * most * len(running) / config.share, self.budget.timed)
            raise ValueError(
                f"budget={self.budget} is too small for {config.points} short trainings of {len(running)} candidates: "
                f"about {enough} would do, or fewer forecast.candidates, or a lower forecast.warmup, each with "
                "overwrite=true"
            )
        return steps

    def beside(self, words: str) -> float:
        """Return the seconds that a point takes beside its steps: starting the training, and measuring."""
        return float(self.state["call"][words] + self.state["overhead"])

    def measured(self, bound: float, others: int) -> None:
        """Probe all candidates, then double their trainings until their share of the budget is spent or one is left.

        After two points and more those candidates are dropped that are hardly ever the fastest after the budget: the
        successive halving of Jamieson and Talwalkar (arXiv 1502.07943), by what is forecast.
        """
        state, config = self.state, self.config
        for words in config.candidates:
            if words not in state["call"] and words not in state["left_out"]:
                if (why := self.probe(words)) is not None:
                    state["left_out"][words] = why
                self.save()
        running = list(state["call"])
        if not running:
            raise ValueError(f"no candidate can be trained: {'; '.join(state['left_out'].values())}")
        if not state["steps"]:
            state["steps"] = self.first(running)
        for point in itertools.count():
            running = [words for words in running if words not in state["dropped"]]
            if point >= config.points and (len(running) == 1 or not self.affordable(running, point)):
                break
            self.advance(running, point)
            self.save()
            if point and len(running) > 1:
                self.drop(running, bound, others)
            self.save()

    def affordable(self, running: list[str], point: int) -> bool:
        """Whether the candidates' share of the budget allows them this point; so it does where it has been begun."""
        if any(len(self.state["points"][words]) > point for words in running):
            return True
        more = 0.0
        for words in running:
            steps = self.state["steps"][words] * 2**point
            more += self.cost(words) * (steps - self.stable(steps // 2))
            more += self.beside(words) if self.budget.timed else 0.0
        return bool(self.state["spent"] + more <= self.config.share * self.budget.amount)

    def advance(self, running: list[str], point: int) -> None:
        """Train candidates to a point of their curves, and measure them there, unless that is done."""
        todo = [words for words in running if len(self.state["points"].get(words, [])) == point]
        for words in todo:
            steps = self.state["steps"][words] * 2**point
            self.run(words, steps, self.config.cooldown, self.stable(steps // 2) if point else 0)
        results = self.measure([self.folder(words) / "head" for words in todo]) if todo else []
        for words, result in zip(todo, results, strict=True):
            steps = self.state["steps"][words] * 2**point
            self.state["points"].setdefault(words, []).append({"steps": steps, **result})

    def drop(self, running: list[str], bound: float, others: int) -> None:
        """Drop candidates that are the fastest after the budget in few of the samples."""
        tau = self.forecasts({words: [self.most(words)] for words in running}, bound, others)
        fastest = np.argmax([self.speedup(words, tau[words][0]) for words in running], 0)
        for index, words in enumerate(running):
            if (chance := float(np.mean(fastest == index))) < CHANCE:
                self.state["dropped"][words] = chance

    def most(self, words: str) -> int:
        """Return the steps of a run that spends what is left, at least those of the last point; as chosen before."""
        if words in self.state["most"]:
            return int(self.state["most"][words])
        last = self.state["points"][words][-1]["steps"]
        left = max(0.0, self.budget.amount - self.state["spent"])
        return max(last, self.stable(last) + int(left / self.cost(words)))

    def speedup(self, words: str, tau: Array) -> Array:
        """Return samples of the speedup for samples of τ: the cost of a pass by as many resamples of the prompts."""
        results = self.state["points"][words]
        prompts = len(results[0]["head"])
        weight = np.random.default_rng(1).multinomial(prompts, [1 / prompts] * prompts, RESAMPLES).astype(float)
        return tau / np.repeat(acceptance.pass_cost(results, weight), EACH)

    def forecasts(self, steps: dict[str, list[int]], bound: float, others: int) -> dict[str, Array]:
        """Return samples of each candidate's τ after each number of steps, on as many other prompts."""
        curves = [self.curve(words, bound) for words in steps]
        tokens = [[float(self.batch_tokens * count) for count in counts] for counts in steps.values()]
        return dict(zip(steps, forecast(curves, tokens, others), strict=True))

    def curve(self, words: str, bound: float) -> Curve:
        """Return what was measured of a candidate."""
        points = self.state["points"][words]
        counts = np.array([[row[:2] for row in point["head"]] for point in points], dtype=float)
        return Curve(np.array([self.batch_tokens * point["steps"] for point in points], dtype=float), counts, bound)

    def choose(self, bound: float, others: int) -> tuple[Choice, list[Choice]]:
        """Return the candidate that is fastest after the budget, trained no longer than is worth it; and all of them.

        What it leaves of the budget would bring less than `worth` by the median forecast.
        """
        steps: dict[str, list[int]] = {}
        for words, points in self.state["points"].items():
            grid = np.geomspace(points[-1]["steps"], self.most(words), GRID).round().astype(int)
            steps[words] = np.unique(grid).tolist()
        self.state["most"] = {words: counts[-1] for words, counts in steps.items()}
        self.save()
        samples = self.forecasts(steps, bound, others)

        def choice(words: str, index: int) -> Choice:
            tau, last = samples[words][index], samples[words][-1]
            return Choice(words, steps[words][index], steps[words][-1], tau, self.speedup(words, tau), last / tau)

        whole = [choice(words, -1) for words in steps]
        running = [one for one in whole if one.words not in self.state["dropped"]]
        best = max(running, key=lambda one: interval(one.speedup)[0]).words
        every = [choice(best, index) for index in range(len(steps[best]))]
        enough = np.median(every[-1].tau) / (1 + self.config.worth)
        return next(one for one in every if np.median(one.tau) >= enough), whole

    def pays(self, choice: Choice) -> bool:
        """Whether the speedup that is asked for lies within the interval, or below it."""
        return interval(choice.speedup)[2] >= self.config.least

    def hand_over(self, choice: Choice) -> list[str]:
        """Put the candidate's checkpoint before its last cooldown into the run's folder; return the run's overrides."""
        begin = self.stable(self.state["points"][choice.words][-1]["steps"])
        source, folder = self.folder(choice.words), self.out / "checkpoints"
        if not format.checkpoints(folder):
            name = format.folder_of(Path(), begin).name
            partial = folder / f"{format.PARTIAL}{name}"
            format.clear(folder)  # what a killed hand-over left
            shutil.copytree(source / "checkpoints" / name, partial)
            for file in ("metrics.jsonl", "config.yaml"):  # the latter says what its head began as
                shutil.copy(source / file, self.out / file)
            partial.rename(folder / name)
        return [*overrides_of(choice.words), "resume=true", *self.overrides(choice.steps, self.config.cooldown)]


def overrides_of(words: str) -> list[str]:
    """Return the overrides of a candidate, a head's name with further ones behind it."""
    return f"head={words}".split()


def stale(folder: Path, begin: int) -> int:
    """Delete the checkpoints after step `begin`, which are of another cooldown; return the newest step that is left."""
    for path in format.checkpoints(folder):
        if format.step_of(path) > begin:
            shutil.rmtree(path)
    return max((format.step_of(path) for path in format.checkpoints(folder)), default=0)


def cost_of(folder: Path) -> dict[str, float]:
    """Return a step's seconds, where the first may compile, and its operations, 0 if they are not counted."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    seconds = [record["step_seconds"] for record in lines if "step_seconds" in record]
    total = json.loads((folder / "training.json").read_text())
    return {"seconds": float(np.median(seconds[1:] or seconds)), "flops": (total["flops"] or 0.0) / total["steps"]}
