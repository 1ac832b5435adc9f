"""A training within a budget: the log's numbers, the candidates' short trainings, the choice, the run, the outcome."""

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from data.text.files import META, OPENERS, check_file
from data.text.prompts import TrainingData, load_training
from data.text.sources import Files, open_source
from eval.tuning.grid import halves
from heads.common.command import quoted
from heads.common.files import replacing
from inference.target.config import default_device
from inference.target.embeddings_only import load_target
from train.distributed import processes
from train.forecast import acceptance, log, text
from train.forecast.pilots import FOLDER, STATE, Pilots
from train.planning.check import clear_out

ROWS = 32  # packed rows along which the target's entropy is taken
LEAST = 4  # held-out prompts
LOG = "log"  # in the forecast's folder


def check(run: Any) -> None:
    """Refuse a forecast that is there already, and a target that no process can measure alone."""
    begun = (Path(run.out) / STATE).exists()
    if begun and not (run.resume or run.overwrite):
        raise ValueError(f"{run.out} holds a forecast already: resume=true goes on, overwrite=true begins anew")
    if run.model.where.together:
        raise ValueError(
            f"model.placement={run.model.placement} takes all processes for a pass, and a forecast measures in one: "
            "give model.placement=replicate, device_map or offload"
        )


def train_within(run: Any, train: Callable[[list[str]], None]) -> None:
    """Train the candidate that is fastest after the budget; `train` runs an ordinary training with further overrides.

    Raises:
        ValueError: an empty or unreadable log, too few prompts, a budget that is too small.
    """
    out, say = Path(run.out), Console().print
    anew = run.overwrite and not run.resume
    if anew:
        shutil.rmtree(out / FOLDER, ignore_errors=True)
        (out / STATE).unlink(missing_ok=True)
    settings = settings_of(run)
    if run.log is not None:
        path = kept_log(run.log, run.data.split, out)
        run, train = replace(run, data=replace(run.data, path=path)), followed(train, f"data.path={quoted(path)}")
    bench = Bench(run)
    pilots = Pilots(out, run.forecast, run.budget, run.trainer.batch_tokens, train, bench.measure)
    pilots.load(settings)
    if "log" not in pilots.state:
        try:
            pilots.state |= bench.examined()
        except ValueError as error:  # of a line of the copy, which is not the one to correct
            copied = str(out / FOLDER / LOG) in str(error)
            raise ValueError(f"{error} in log={run.log}, of which this is a copy" if copied else str(error)) from error
        if anew:  # once the log and the target are known to be right: a mistake costs no earlier run
            clear_out(out)
    bench.answered = pilots.state.get("answered")
    out.mkdir(parents=True, exist_ok=True)
    pilots.save()
    say(log.line(pilots.state["log"]), highlight=False, soft_wrap=True)
    bound, others = 1.0 + run.tree.deepest, pilots.state["log"]["others"]
    pilots.measured(bound, others)
    for words, why in pilots.state["left_out"].items():
        say(f"{words} is left out: {why}", highlight=False, soft_wrap=True, markup=False)
    choice, every = pilots.choose(bound, others)
    say(text.table(pilots, every))
    say(text.decision(pilots, choice), highlight=False, soft_wrap=True, markup=False)
    if not pilots.pays(choice):
        return
    train([*pilots.hand_over(choice), f"out={quoted(out)}", f"name={quoted(run.name)}"])
    (result,) = bench.measure([out / "head"], others=True)
    speedup = acceptance.tau(result) / acceptance.pass_cost([result], np.ones((1, len(result["head"]))))[0]
    line = text.outcome(choice, acceptance.tau(result), speedup, others)
    say(line, highlight=False, soft_wrap=True, markup=False)


def settings_of(run: Any) -> dict[str, Any]:
    """Return the settings by which points of one curve compare, beside those that its trainings refuse a change of."""
    target = load_target(run.model, run.model.device or default_device(), whole=False)
    chosen = {"forecast": ("prompts", "tokens", "warmup", "cooldown"), "data": ("prompts", "held_out")}
    nested = {f"{key}.{name}": getattr(getattr(run, key), name) for key, names in chosen.items() for name in names}
    tree = {f"tree.{name}": value for name, value in asdict(run.tree).items()}
    return {"log": run.log, "workload": run.workload, "target's fingerprint": target.spec.fingerprint, **nested, **tree}


def followed(train: Callable[[list[str]], None], word: str) -> Callable[[list[str]], None]:
    """Return what runs a training with one more override behind the others."""
    return lambda more: train([*more, word])


def kept_log(log: str, split: str, out: Path) -> str:
    """Return where the log is kept as it was when the forecast began, since it may grow; a Hub data set's name.

    Until a state says that it could be read, it is copied anew.

    Raises:
        ValueError: it is not there, or of no known format.
    """
    folder = out / FOLDER / LOG
    if not (out / STATE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        source = open_source(log, split)
        if isinstance(source, Files):
            with replacing(folder) as copies:
                for number, file in enumerate(source.files):
                    packed = file.suffix if file.suffix in OPENERS else ""
                    copy = copies / f"{number:06d}{check_file(file)}{packed}"  # in their order; it names no split
                    shutil.copyfile(file, copy)
                    if (about := file.with_name(f"{file.name}{META}")).is_file():
                        shutil.copyfile(about, copy.with_name(f"{copy.name}{META}"))
    return str(folder) if folder.is_dir() else log


class Bench:
    """The target, loaded for each measurement alone, and the held-out prompts: half are for candidates.

    Attributes:
        answered: the numbers of the prompts that are measured, None for all: where the first token ends an answer no
            pass is taken, and resamples of such prompts alone would have no τ.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self.answered: list[int] | None = None
        self.halves: tuple[list[list[int]], list[list[int]]] | None = None

    def target(self) -> Any:
        """Return the target."""
        return load_target(self.run.model, self.run.model.device or default_device(), whole=True)

    def data(self, target: Any) -> TrainingData:
        """Return the data; refuse too few held-out prompts."""
        run = self.run
        data = load_training(run.data, target.tokenizer, run.forecast.prompts, run.workload)
        if len(data.held_out) < LEAST:
            raise ValueError(
                f"{len(data.held_out)} held-out prompts are too few for a forecast: raise data.held_out, or give more "
                "data.prompts"
            )
        return data

    def keep(self, data: TrainingData) -> None:
        """Keep the prompts that are measured."""
        prompts = enumerate(prompt.token for prompt in data.held_out)
        self.halves = halves([token for i, token in prompts if self.answered is None or i in self.answered])

    def examined(self) -> dict[str, Any]:
        """Return the numbers of the log, the seconds that a measurement takes, about, and the prompts for it.

        Raises:
            ValueError: the target ends too many answers with their first token.
        """
        run, begun = self.run, time.monotonic()
        target = self.target()
        loaded = time.monotonic() - begun
        data = self.data(target)
        baseline = acceptance.baseline(target, [prompt.token for prompt in data.held_out], run.forecast.tokens)
        self.answered = [i for i, (tokens, _) in enumerate(baseline) if tokens]
        if len(self.answered) < LEAST:
            raise ValueError(
                f"the target answers {len(baseline) - len(self.answered)} of {len(baseline)} held-out prompts with one "
                "token, so nothing is drafted, and the others are too few for a forecast: raise forecast.prompts and "
                "data.held_out, or give other data.prompts"
            )
        self.keep(data)
        mine, others = halves(self.answered)
        numbers = log.statistics(data.samples, data.counts) | {"others": len(others)}
        numbers |= log.certainty(target, data.samples, run.data.length, ROWS, run.trainer.seed)
        overhead = loaded + 2 * sum(baseline[i][1] for i in mine)
        return {"log": numbers, "overhead": overhead, "answered": self.answered}

    def measure(self, folders: list[Path], *, others: bool = False) -> list[acceptance.Measured]:
        """Return what the heads of these folders are worth, on the other prompts or on those for candidates."""
        run, target = self.run, self.target()
        if self.halves is None:
            self.keep(self.data(target))
        assert self.halves is not None
        prompts = self.halves[others]
        results = [acceptance.measured(target, folder, run.tree, prompts, run.forecast.tokens) for folder in folders]
        del target  # a training loads its own
        processes.release_freed()
        return results
