"""Train a draft head for a frozen target, evaluate it and write the report.

    python train/run.py model=llama70b head=eagle

compose -> resolve -> plan, or: launch -> build -> train -> evaluate.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from accelerate import Accelerator
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from eval.config import eval_config
from eval.measures.results import BASELINE
from heads.common.command import command, ending_alone
from heads.common.errors import keeping, user_errors
from train import sweep
from train.build import among_processes, build, values_of
from train.checkpoints import format
from train.config import RunConfig
from train.distributed import launch, processes
from train.loop import COST
from train.planning.check import evaluation
from train.planning.plan import plan, resolved, table
from train.planning.resolve import accelerators, resolve
from train.trackers import conclude

BEST, DEBUG = "best", "debug"  # of conf/head/, of conf/trainer/


def train(run: RunConfig) -> None:
    """Train and evaluate a resolved run, on one of its processes."""

    def kept() -> str:
        saved = format.checkpoints(Path(run.out) / "checkpoints")
        return "the checkpoints are kept, and resume=true goes on" if saved else "nothing was trained"

    with keeping(kept):
        if launch.is_main():
            Console().print(f"{run.name}: head={run.head.name} for {run.model.path}", soft_wrap=True, markup=False)
        among_processes(run, train_and_evaluate)


def train_and_evaluate(run: RunConfig, accelerator: Accelerator, lock: processes.RunLock) -> None:
    """Train the head, then evaluate the best one; exit with status 1 if it is not lossless."""
    build(run, accelerator, lock).train()
    accelerator.free_memory()  # the evaluation loads its own target
    processes.release_freed()
    accelerator.wait_for_everyone()
    if run.eval.prompts and (accelerator.is_main_process or run.model.where.needs_all_ranks):
        evaluate_head(run, accelerator)


def evaluate_head(run: RunConfig, accelerator: Accelerator) -> None:
    """Evaluate the best head and those of `compare`, and write the results to the trackers."""
    values, cost = evaluation(run), json.loads((Path(run.out) / COST).read_text())
    if run.model.where.needs_all_ranks:
        values["model"]["device"] = str(accelerator.device)
    from eval.run import evaluate  # imported late: a tenth of the start-up time

    result = evaluate(eval_config(**values), writes=accelerator.is_main_process)
    if accelerator.is_main_process:
        row: dict[str, Any] = next((vars(row) for row in result.rows if row.drafter != BASELINE), {})
        numbers = {f"final_{key}": row.get(key) for key in ("tau", "speedup", "tokens_per_second", "lossless")}
        final = {"step": cost["steps"], **numbers, "lossless": float(result.passed)}
        conclude(Path(run.out), run.trainer.trackers, values_of(run), final)
        sweep.note(run.name, run.head.name, Path(run.out))
    if not result.passed:
        raise SystemExit(1)


def show_plan(run: RunConfig) -> None:
    """Print the plan of a resolved run, and each node's command if there are several."""
    Console().print(table(plan(run)), highlight=False)
    on_cpu = resolved(run.device, run.model.device).type == "cpu"
    if words := launch.by_hand(run.launcher, sys.argv[0], launch.overrides(), on_cpu=on_cpu):
        Console().print(words, highlight=False, soft_wrap=True, markup=False)


def start_processes(run: RunConfig) -> None:
    """Start the processes of a resolved run; exit with their status unless it is 0."""
    words = [word for word in launch.overrides() if word != f"head={BEST}"]
    if HydraConfig.get().runtime.choices.get("head") == BEST:  # the processes do not choose and print it again
        words.append(f"head={run.head.name}")
    if status := launch.start(run.launcher, os.path.abspath(__file__), words):
        raise SystemExit(status)
    if run.eval.prompts and not launch.is_queued(run.launcher):
        sweep.note(run.name, run.head.name, Path(run.out))


@command("train")
def main(cfg: DictConfig) -> float | None:
    """Plan, launch or train; return the best τ, which a sweep may maximise."""
    with user_errors(), launch.main_first():
        launch.take_over(cfg.launcher, accelerators(cfg.model.device))
        launch.check_mode()
    with ending_alone(), user_errors(), launch.main_first():
        run = resolve(cfg)
        sweep.check(run.trainer.eval_prompts, waits=not launch.is_queued(run.launcher))
        if run.plan is True:
            if launch.is_main():
                show_plan(run)
            return None
        if launch.needs_processes(run.launcher):
            start_processes(run)
        else:
            train(run)
            if launch.is_main() and HydraConfig.get().runtime.choices.get("trainer") == DEBUG:
                line = f"trainer={DEBUG}: {run.trainer.steps} steps show that it runs; no number of them means anything"
                Console().print(line, highlight=False, soft_wrap=True)
        return None if launch.is_queued(run.launcher) else sweep.best_tau(Path(run.out))


if __name__ == "__main__":
    main()
