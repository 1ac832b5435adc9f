"""Train a draft head for a frozen target, evaluate it and write the report.

    python train/run.py model=llama70b head=eagle

compose -> resolve -> plan, or: launch -> build -> train -> evaluate.
"""

import gc
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    gc.disable()  # a fifth of the start would go into looking for garbage that imports do not make

from accelerate import Accelerator
from omegaconf import DictConfig
from rich.console import Console

from eval.config import eval_config
from eval.measures.results import BASELINE
from heads.common.command import command
from heads.common.errors import report_on_interrupt
from train import checkpoint, sweep
from train.build import among_processes, build, values_of
from train.config import RunConfig
from train.distributed import launch, processes
from train.loop import COST
from train.plan import plan
from train.resolve import accelerator_count, evaluation, resolve, table
from train.trackers import conclude


@command("train")
def main(cfg: DictConfig) -> float | None:
    """Plan, launch or train; return the best τ, which a sweep may maximise."""
    with launch.main_first():
        launch.apply_launch_environment(cfg.launcher, accelerator_count(cfg.model.device))
        launch.check_mode()
        run = resolve(cfg)
        queued = launch.is_queued(run.launcher)
        sweep.check(run.trainer.eval_prompts, waits=not queued)
        overrides = launch.user_overrides()
        if run.plan is True:
            per_node = launch.command_for_nodes(run.launcher, sys.argv[0], overrides, on_cpu=run.device.type == "cpu")
            if launch.is_main():
                Console().print(table(plan(run)), highlight=False)
                print(per_node, end="")
            return None
        if launch.needs_processes(run.launcher):
            if status := launch.start(run.launcher, os.path.abspath(__file__), overrides):
                raise SystemExit(status)
            if run.eval.prompts and not queued:
                sweep.note(run.name, run.head.name, Path(run.out))
        else:
            train(run)
        return None if queued else sweep.best_tau(Path(run.out))


def train(run: RunConfig) -> None:
    """Train and evaluate a resolved run, on one of its processes."""
    if launch.is_main():
        print(f"{run.name}: head={run.head.name} for {run.model.path}")
    folder = Path(run.out) / "checkpoints"
    resumes = "the checkpoints are kept, and resume=true continues"
    with report_on_interrupt(lambda: resumes if checkpoint.checkpoints(folder) else "nothing was trained"):
        among_processes(run, train_and_evaluate)


def train_and_evaluate(run: RunConfig, accelerator: Accelerator, lock: processes.RunLock) -> None:
    """Train the head, then evaluate the best one and those of `compare`; exit with status 1 if one is not lossless."""
    build(run, accelerator, lock).train()
    accelerator.free_memory()  # for the evaluation, which loads its own target
    processes.release_freed()
    accelerator.wait_for_everyone()
    out, together = Path(run.out), run.model.placed.needs_all_ranks
    main = accelerator.is_main_process
    if not run.eval.prompts or not (main or together):
        return
    from eval.run import evaluate  # imported late: a tenth of the start-up time

    values = evaluation(run)
    if together:
        values["model"]["device"] = str(accelerator.device)
    result = evaluate(eval_config(**values), writes=main)
    if main:
        row = next((vars(row) for row in result.rows if row.drafter != BASELINE), {})
        numbers = {f"final_{key}": row.get(key) for key in ("tau", "speedup", "tokens_per_second", "lossless")}
        steps = json.loads((out / COST).read_text())["steps"]
        final = {"step": steps, **numbers, "lossless": float(result.passed)}
        conclude(out, run.trainer.trackers, values_of(run), final)
        sweep.note(run.name, run.head.name, out)
    if not result.passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
