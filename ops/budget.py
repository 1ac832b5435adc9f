"""Train the fastest head within a budget: short trainings of candidates, then the best one for the rest.

    python ops/budget.py budget=1h log=traffic.jsonl model.path=/my/model

Every training is a call of `train/run.py`; `forecast.json` in the output folder records the finished stages.

Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): every round has the same share of the budget. A candidate
trains at a constant rate, from which a cooldown branches off at the end of each round, so each point of a candidate is
a complete training, and the next one continues from before that cooldown (Hägele et al., arXiv 2405.18392). The best
candidate's run continues in the same way. A power function of the tokens through its points predicts the result.
"""

import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from data.text.files import META, OPENERS, check_file
from data.text.sources import Files, open_source
from heads.common.command import command, quoted
from heads.common.files import replacing, write_json
from heads.common.progress import print_line
from heads.common.typed import Count, Json, NewTokens, Within, typed
from heads.common.untrusted import parsed_file, shown
from ops.commands import REFUSED, run_command, split_config
from train import sweep
from train.checkpoint import checkpoints, differences, folder_of, plain, step_of
from train.config import RunConfig, run_config
from train.distributed.launch import Overrides, key_of, user_overrides
from train.resolve import check_out, clear_out

# The learning curve of τ: a power function of the trained tokens through a few points, and its interval.

LEVEL = 0.9  # confidence level of a forecast's interval
FLOOR = 0.01  # minimum standard error of a measured τ, as a share of it: no curve is exactly a power function
EXPONENTS = (0.03, 3.0)


def power_function(tokens: NDArray[np.float64], limit: float, rise: float, exponent: float) -> NDArray[np.float64]:
    """Return τ after N tokens: limit - rise tokens^-exponent (Hestness et al., arXiv 1712.00409)."""
    return np.asarray(limit - rise * tokens**-exponent)


def predict(
    tokens: Sequence[float], tau: Sequence[float], error: Sequence[float], at: float, bound: float
) -> tuple[float, float, float]:
    """Return τ after `at` tokens by a power function through at least three points, and the interval's ends.

    The points are trained tokens, increasing, τ and its standard error; `bound` is the most tokens that a pass can
    commit. The interval is that of a new measurement, of the level LEVEL: by the covariance of the three numbers, and
    by the last standard error.
    """
    from scipy.optimize import curve_fit  # late: the import takes half a second that other runs do not need
    from scipy.stats import t

    x, y = np.asarray(tokens, dtype=float) / tokens[-1], np.asarray(tau, dtype=float)
    rise = max(float(y[-1] - y[0]), 0.01)
    sigma = np.maximum(error, FLOOR * y)
    values, covariance = curve_fit(
        power_function, x, y, p0=(min(y[-1] + rise, bound), rise, 0.5), sigma=sigma,
        absolute_sigma=True, bounds=((1.0, 1e-3, EXPONENTS[0]), (bound, 2 * bound, EXPONENTS[1])),
    )  # fmt: skip
    ratio, (_, rise, exponent) = at / tokens[-1], values
    gradient = np.array([1.0, -(ratio**-exponent), rise * ratio**-exponent * math.log(ratio)])
    middle = float(power_function(np.array(ratio), *values))
    half = t.ppf((1 + LEVEL) / 2, len(tokens)) * math.sqrt(gradient @ covariance @ gradient + sigma[-1] ** 2)
    middle, low, high = (min(max(end, 1.0), bound) for end in (middle, middle - half, middle + half))
    return middle, low, high


UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}  # seconds per unit
OF_ALL = ("budget", "log", "resume", "overwrite", "name", "out")  # overrides that differ between the trainings
DECIDED = {  # overrides that a training within a budget cannot take -> what to do instead
    "head": "a budget compares several heads: give forecast.candidates",
    "trainer.steps": "the budget decides how long is trained: leave it out",
    "trainer.cooldown": "a budget has one for all trainings: give forecast.cooldown in its place",
    "trainer.warmup": "a budget has one for all trainings: give forecast.warmup, in steps, in its place",
}
FOLDER, STATE = "forecast", "forecast.json"  # in the run's folder: the short trainings, and the finished stages
PROBE = 6  # steps of the training that measures a step's cost
ROOM = 1.1  # margin of the advised budget
Train = Callable[[Overrides], object]  # runs a training with these overrides to its end


@dataclass(frozen=True)
class Budget:
    """A budget: seconds, or floating-point operations."""

    amount: float
    timed: bool

    def __str__(self) -> str:
        """Return the budget in h, min or s, or in operations, to three digits."""
        if not self.timed:
            return f"{self.amount:.3g} operations"
        unit = next((name for name in ("h", "min") if self.amount >= UNITS[name]), "s")
        return f"{self.amount / UNITS[unit]:.3g} {unit}"

    @classmethod
    def read(cls, value: Any) -> "Budget":
        """Return the budget of `1h`, `90min` or `5e15`; refuse other values."""
        match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d{1,3})?)\s*(s|min|h|d)?\s*", str(value), re.I)
        amount = float(match[1]) * UNITS[(match[2] or "s").lower()] if match else 0.0
        if not match or not 0 < amount < float("inf"):
            raise ValueError(
                f"budget is {shown(value)}: give a time above 0 ({', '.join(f'1{unit}' for unit in UNITS)}), or a "
                "number of floating-point operations, such as 5e15"
            )
        return cls(amount, match[2] is not None)


Part = Annotated[float, Within(0, 1, above=True, below=True)]


@dataclass(frozen=True)
class ForecastConfig:
    """The forecast's configuration; conf/ops/budget.yaml explains the keys."""

    candidates: list[str]
    share: Part
    points: Annotated[int, Within(3, 8)]
    warmup: Count
    cooldown: Part
    prompts: Count
    tokens: NewTokens


@dataclass(frozen=True)
class BudgetConfig:
    """The command's configuration; conf/ops/budget.yaml explains the keys."""

    budget: Budget
    log: str | None
    forecast: ForecastConfig


class Forecast:
    """The trainings of a run, apart from its head, within its budget; `state` is the content of `forecast.json`.

    `overrides` are those that all trainings have in common; `train` runs one with further overrides, to its end.
    """

    def __init__(self, run: RunConfig, config: BudgetConfig, overrides: Overrides, train: Train) -> None:
        self.run, self.budget, self.config, self.out = run, config.budget, config.forecast, Path(run.out)
        self.train, path = train, self.out / STATE
        settings = plain({"budget": str(self.budget), "overrides": sorted(overrides), **asdict(self.config)})
        self.state: Json = {
            "settings": settings, "spent": 0.0, "cost": {}, "fixed": {}, "left_out": {}, "points": {}, "steps": None,
        }  # fmt: skip
        if run.overwrite and not run.resume:
            path.unlink(missing_ok=True)
        if not path.exists():
            shutil.rmtree(self.out / FOLDER, ignore_errors=True)
        elif not run.resume:
            raise ValueError(f"{run.out} holds a forecast already: give resume=true or overwrite=true")
        else:
            self.state = parsed_file(path, "start again with overwrite=true")
            if changed := differences(self.state["settings"], settings):
                raise ValueError(f"{path}: resume=true needs the settings that it began with; changed are {changed}")
        if config.log is not None:  # all trainings read a copy, since a service may append lines
            folder = self.out / FOLDER / "log"
            if not folder.is_dir() and isinstance(source := open_source(config.log, run.data.split), Files):
                with replacing(folder) as copies:
                    for index, file in enumerate(source.files):
                        packed = file.suffix if file.suffix in OPENERS else ""
                        copy = copies / f"{index:06d}{check_file(file)}{packed}"  # in order; it names no split
                        shutil.copyfile(file, copy)
                        if (about := file.with_name(f"{file.name}{META}")).is_file():
                            shutil.copyfile(about, copy.with_name(f"{copy.name}{META}"))
            data = f"data.path={quoted(folder if folder.is_dir() else config.log)}"
            self.train = lambda more: train([*more, data])

    def save(self) -> None:
        """Write the state."""
        write_json(self.out / STATE, self.state)

    def folder(self, candidate: str) -> Path:
        """Return the folder of a candidate's trainings."""
        return self.out / FOLDER / str(self.config.candidates.index(candidate))

    def overrides(self, candidate: str, steps: int, cooldown: float) -> Overrides:
        """Return the overrides of a candidate's training, such that it can be continued."""
        schedule = [f"trainer.cooldown={cooldown}", f"trainer.warmup={min(1.0, self.config.warmup / steps)}"]
        return [*f"head={candidate}".split(), f"trainer.steps={steps}", *schedule]

    def stable(self, steps: int) -> int:
        """Return the step at which the cooldown begins, as `train.optim.cooldown_begin` does."""
        return steps - round(self.config.cooldown * steps)

    def measure(self, candidate: str, steps: int, cooldown: float, begin: int) -> None:
        """Train a candidate to `steps` from its checkpoint at step `begin`, evaluate it, and count the cost."""
        began, folder, config, timed = time.monotonic(), self.folder(candidate), self.config, self.budget.timed
        for path in checkpoints(folder / "checkpoints"):
            if step_of(path) > begin:  # checkpoints of the cooldown
                shutil.rmtree(path)
        save = max(1, steps - round(cooldown * steps))
        self.train([
            *self.overrides(candidate, steps, cooldown), f"out={quoted(folder)}", "name=pilot",
            "resume=true" if checkpoints(folder / "checkpoints") else "overwrite=true",
            "trainer.eval_prompts=0", "trainer.patience=null", "trainer.trackers=[jsonl]", "trainer.log_every=1",
            f"trainer.eval_every={steps}", f"trainer.save_every={save}", f"trainer.keep={-(-steps // save) + 1}",
            f"eval.prompts={config.prompts}", f"eval.max_new_tokens={config.tokens}", "eval.repeats=1",
            "eval.hf=false", "eval.tier=[live]",
        ])  # fmt: skip
        unit = cost_of(folder)["seconds" if timed else "flops"]
        if not unit:
            raise ValueError("no operations were counted: give a budget in time")
        seconds, taken = time.monotonic() - began, (steps - begin) * unit
        self.state["cost"][candidate] = unit
        self.state["fixed"][candidate] = max(0.0, seconds - taken) if timed else 0.0
        self.state["spent"] += seconds if timed else taken

    def probe(self) -> Overrides:
        """Train every candidate for a few steps to measure their cost; return those that support the target."""
        cost, left_out = self.state["cost"], self.state["left_out"]
        for candidate in self.config.candidates:
            if candidate not in cost and candidate not in left_out:
                try:
                    self.measure(candidate, PROBE, 0.0, 0)
                except SystemExit as error:
                    if error.code not in REFUSED:  # for example a signal's
                        raise
                    left_out[candidate] = str(error.__cause__ or f"its training ended with status {error.code}")
                self.save()
        for candidate, why in left_out.items():
            print_line(f"{candidate} is left out: {why}")
        if not cost:
            raise ValueError(f"no candidate can be trained ({'; '.join(left_out.values())}): give other overrides")
        return list(cost)

    def choose(self) -> str:
        """Train all candidates, then the faster half for longer, and so on to one; refuse too small a budget."""
        running, config = self.probe(), self.config
        cost, fixed, points = (self.state[key] for key in ("cost", "fixed", "points"))
        rounds = max(config.points, math.ceil(math.log2(len(running))) + 1)
        share = config.share * self.budget.amount / rounds
        least = max(2, round(config.warmup / (1 - config.cooldown)))
        needed = max(fixed[candidate] + least * cost[candidate] for candidate in running) * len(running)
        if needed > share and not points:
            enough = Budget(ROOM * needed * rounds / config.share, self.budget.timed)
            raise ValueError(
                f"budget={self.budget} is too small for short trainings of {len(running)} candidates: about {enough} "
                "would do, or fewer forecast.candidates, or a lower forecast.warmup, each with overwrite=true"
            )
        for index in range(rounds):
            for candidate in running:
                done = points.setdefault(candidate, [])
                if len(done) > index:
                    continue
                earlier = done[-1]["steps"] if done else 0
                begin = self.stable(earlier)
                more = int((share / len(running) - fixed[candidate]) / cost[candidate])
                steps = max(begin + more, earlier + 2 if done else least)
                self.measure(candidate, steps, config.cooldown, begin)
                point = {"steps": steps, **measured(self.folder(candidate), candidate)}
                done.append(point)
                self.save()
                tokens = steps * self.run.trainer.batch_tokens
                print_line(f"{candidate}: {tokens:,} tokens, τ {point['tau']:.2f}, {point['speedup']:.2f}x")
            running.sort(key=lambda candidate: -points[candidate][index]["speedup"])
            running = running[: math.ceil(len(running) / 2)]
        return running[0]

    def finish(self, candidate: str) -> None:
        """Train a candidate for the rest of the budget, and print the forecast and the result."""
        state, points = self.state, self.state["points"][candidate]
        if state["steps"] is None:
            clear_out(self.out)
            last = points[-1]["steps"]
            begin, left = self.stable(last), self.budget.amount - state["spent"] - state["fixed"][candidate]
            saved = folder_of(Path("checkpoints"), begin)
            shutil.copytree(self.folder(candidate) / saved, self.out / saved)
            for file in ("metrics.jsonl", "config.yaml"):  # config.yaml has the head's `init`
                shutil.copy(self.folder(candidate) / file, self.out / file)
            state["steps"] = max(last, begin + int(left / state["cost"][candidate]))
            self.save()
        steps, (trained, taus, errors) = state["steps"], ([p[key] for p in points] for key in ("steps", "tau", "error"))
        tau = predict(trained, taus, errors, steps, 1.0 + self.run.tree.tree_depth)
        speed = points[-1]["speedup"] / points[-1]["tau"]  # at the last measured cost of a pass
        promised = "τ {:.2f} [{:.2f}, {:.2f}], speedup {:.2f} [{:.2f}, {:.2f}] (interval of {:.0%})".format(
            *(scale * value for scale in (1.0, speed) for value in tau), LEVEL
        )
        print_line(f"{candidate} is trained on {steps * self.run.trainer.batch_tokens:,} tokens; forecast: {promised}")
        self.train([*self.overrides(candidate, steps, self.config.cooldown), "resume=true", f"out={quoted(self.out)}",
                    f"name={quoted(self.run.name)}"])  # fmt: skip
        if self.run.eval.prompts:
            came = measured(self.out, candidate)
            print_line(f"forecast: {promised}; came out: τ {came['tau']:.2f}, {came['speedup']:.2f}x")


def measured(folder: Path, candidate: str) -> dict[str, float]:
    """Return τ, its standard error and the speedup from a finished training's report."""
    row = sweep.rows_of("", candidate.split(maxsplit=1)[0], folder)[0]
    low, high = row["tau_ci"] or (row["tau"], row["tau"])
    return {"tau": row["tau"], "error": (high - low) / (2 * NormalDist().inv_cdf(0.975)), "speedup": row["speedup"]}


def cost_of(folder: Path) -> dict[str, float]:
    """Return a step's seconds, without the first, which may compile, and its FLOPs, 0 if not counted."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    seconds = [record["step_seconds"] for record in lines if "step_seconds" in record]
    total = json.loads((folder / "training.json").read_text())
    return {"seconds": float(np.median(seconds[1:] or seconds)), "flops": (total["flops"] or 0.0) / total["steps"]}


def shared_overrides(overrides: Overrides, log: str | None) -> Overrides:
    """Return the overrides shared by all trainings within a budget; refuse overrides that are for a single training."""
    shared = []
    for override in overrides:
        key = key_of(override)
        if key.startswith("head."):
            raise ValueError(f"{key} is of one head: give it with its head: forecast.candidates=['eagle3 {override}']")
        if key in DECIDED:
            raise ValueError(f"{override}: {DECIDED[key]}")
        if log is not None and key == "data.path":
            raise ValueError("log and data.path are both given: log takes the place of data.path, leave one out")
        if key not in OF_ALL and not key.startswith("forecast."):
            shared.append(override)
    return shared


@command("ops/budget")
def main(cfg: DictConfig) -> None:
    """Choose the head and train it within the budget, or plan its candidates."""
    training, options = split_config(cfg)
    run = run_config(training)
    config = typed(BudgetConfig, options, built_fields={"budget": Budget.read(options.budget)})
    overrides = shared_overrides(user_overrides(), config.log)
    if run.plan is True:
        for candidate in config.forecast.candidates:
            run_command("train/run.py", overrides + f"head={candidate}".split())
        return
    check_out(run)
    forecast = Forecast(run, config, overrides, lambda more: run_command("train/run.py", overrides + more))
    forecast.finish(forecast.choose())


if __name__ == "__main__":
    main()
