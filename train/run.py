"""Train a draft head for a frozen target, evaluate it against the target, write the report.

    python train/run.py model=llama70b head=eagle

This is the composition root: every component is constructed here, by hand, from its typed configuration.
"""

import json
import logging
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console, Group
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, check_known, fingerprint, pack, token_counts
from data.features.source import FeatureSource, Live
from data.text.prompts import TrainingData, load_training, save_prompts
from data.text.sources import open_sources
from data.text.template import template_sha256
from eval.config import eval_config
from eval.inputs.workloads import ROOM
from eval.live.interleaved import PLAIN
from eval.measures.machine import revision
from heads.base import frozen_count, parameter_count
from heads.common.command import BEST, command, ending_alone, quoted, report_best_head, sweeping
from heads.common.errors import keeping, user_errors
from heads.common.files import write_whole
from heads.common.redact import redacted_values, redacted_words
from heads.common.target_config import context_of
from heads.common.typed import bracketed
from heads.modules.layers import Recomputing
from heads.modules.vocab import prune
from inference.drafters.policy import verifiable
from inference.target.embeddings_only import EmbeddingsOnly, load_target
from inference.target.target import Target
from train import adapt
from train.acceptance import AcceptanceEvaluator
from train.checkpoints import format, resume
from train.config import RunConfig, run_config
from train.distributed import launch, processes, started
from train.distributed.control import on_main
from train.distributed.processes import RunLock
from train.features import origin_of, source_for
from train.loop import COST, KeptHead, Loop
from train.planning.check import (
    check_out,
    check_plan,
    check_run,
    check_settings,
    check_target,
    clear_out,
    evaluation,
    ordinary_mask,
    reads_target,
    unserved,
)
from train.planning.choice import accelerators, alone_on_cpu, chosen, in_words, with_processes
from train.planning.plan import plan, plan_inputs, rated, resolved, sized, work
from train.planning.table import check_memory, table
from train.rollouts import Rollouts
from train.start import AUTO, STARTS, first_head, fit_start, resolve_init
from train.step import Loss, Stepper
from train.tracking import sweep
from train.tracking.trackers import conclude

BY_BUDGET = ("budget", "log", "resume", "overwrite")  # which a training within a budget has in its own place
DECIDED = {  # overrides that such a training cannot take, with what to do instead
    "trainer.steps": "the budget decides how long is trained: leave it out",
    "trainer.cooldown": "a budget has one for all trainings: give forecast.cooldown in its place",
    "trainer.warmup": "a budget has one for all trainings: give forecast.warmup, in steps, in its place",
}
DEBUG = "debug"  # of conf/trainer/
T = TypeVar("T", bound=Any)  # a run's configuration


def prepare_out(
    run: Any, lock: RunLock, settings: dict[str, Any], data: TrainingData, origin: dict[str, Any], weights: str = "head"
) -> None:
    """Create the output folder, once everything that a run needs has loaded: a mistake costs no earlier run.

    Then say what became of the data.
    """
    out = Path(run.out)
    if run.resume:
        resume.check(out, settings)
        if not format.checkpoints(out / "checkpoints"):
            line = f"{out}: nothing to resume, begins at step 0"
            Console().print(line, markup=False, highlight=False, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    lock.take()
    check_out(out, replaces=run.resume or run.overwrite)  # another run may have come first, and ended
    format.clear(out / "checkpoints")
    if run.overwrite and not run.resume:
        clear_out(out, weights)
    write_whole(out / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(values_of(run))).encode())
    if data.held_out:
        save_prompts(data.held_out, out / "prompts.jsonl")
    else:  # nor those of a start that failed, which this run may train on
        (out / "prompts.jsonl").unlink(missing_ok=True)
    write_whole(out / "provenance.json", (json.dumps(redacted_values(origin), indent=2) + "\n").encode())
    Console().print(data.counts.line(run.data), markup=False, highlight=False)


def provenance(world: int, strategy: str, data: TrainingData, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the provenance of this run: code, versions, command, processes and their strategy, and the data."""
    code = revision()
    return {
        "git_revision": code["revision"],
        "git_dirty": bool(code["dirty"]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": " ".join(redacted_words(sys.argv)),
        "world_size": world,
        "strategy": strategy,
        "data_fingerprint": fingerprint(data.samples),
        "chat_template_sha256": template_sha256(tokenizer),
        "data": data.counts.report(),
    }


def with_micro_tokens(run: RunConfig) -> RunConfig:
    """Return a run with its `trainer.micro_tokens`, where they are null those that fit on every process's device."""
    least = min(gather_object([sized(run).trainer.micro_tokens]))
    return replace(run, trainer=replace(run.trainer, micro_tokens=least))


def prompt_room(run: RunConfig, config: Any) -> int | None:
    """Return how many tokens a held-out prompt may have to be measured on, None where none is.

    The final evaluation, which has the last word, asks for more room than a measurement while training.
    """
    if run.eval.prompts and run.workload is None:
        return context_of(config) - ROOM
    return context_of(config) - 1 if run.trainer.eval_prompts else None


def batches_for(run: Any, packed: Any, accelerator: Accelerator) -> Batches:
    """Return the run's batches, the trainer's token budgets converted to rows."""
    rows, micro = (tokens // run.data.length for tokens in (run.trainer.batch_tokens, run.trainer.micro_tokens))
    return Batches(packed, rows, micro, run.trainer.seed, accelerator.process_index, accelerator.num_processes)


def identity(run: RunConfig, target: Target | EmbeddingsOnly, batches: Batches, world: int) -> resume.Identity:
    """Return the settings that identify the run on resume; the head's configuration is that of the head as built."""
    weighed = {f"objective.{key}": value for key, value in asdict(run.objective).items()}
    return resume.Identity(
        resume.settings(run.trainer, run.head, run.peft, target.spec.fingerprint, batches),
        resume.numerics(run.trainer, weighed, run.launcher.strategy, world),
    )


def loop_of(
    run: RunConfig, accelerator: Accelerator, target: Target | EmbeddingsOnly, head: Any, source: FeatureSource,
    prompts: list[list[int]],
) -> Loop:  # fmt: skip
    """Return the run's training loop, ready for its first step or for the one that it was stopped at."""
    evaluator = rollouts = None
    if isinstance(target, Target) and run.trainer.eval_prompts:
        evaluator = AcceptanceEvaluator(target, prompts, run.trainer, run.tree, run.name)
    if isinstance(target, Target) and isinstance(source, Live) and run.trainer.compile:
        source.forwards = target.compiled_forwards()
    loss = Loss(head, run.objective, compiled=run.trainer.compile, quick=accelerator.mixed_precision == "bf16")
    kept_head = KeptHead(Path(run.out, "head"), head, target, run.tree)
    drafted = run.objective.on_policy
    if isinstance(target, Target) and drafted.prompts:
        rollouts = Rollouts(target, kept_head.decoding, run.tree, drafted, run.objective.depths, source.batches)
    width = target.embeddings.hidden_size
    stepper = Stepper(run.trainer, run.launcher, accelerator, loss, source, width, rollouts)
    this_run = identity(run, target, source.batches, accelerator.num_processes)
    return Loop(Path(run.out), stepper, kept_head, evaluator, this_run, resumes=run.resume, config=values_of(run))


def train(run: RunConfig) -> None:
    """Run the whole job on this process, alone in its output folder."""

    def kept() -> str:
        saved = format.checkpoints(Path(run.out) / "checkpoints")
        return "the checkpoints are kept, and resume=true goes on" if saved else "nothing was trained"

    with keeping(kept):
        run = with_processes(run)
        check_settings(run)
        report_best_head()
        if started.is_main():
            Console().print(f"{run.name}: head={run.head.name} for {run.model.path}", soft_wrap=True, markup=False)
        trained = check_target(run)
        run = chosen(run)
        check_memory(run, trained)
        alone(run, job)


def alone(run: T, job: Callable[[T, Accelerator, RunLock], None]) -> None:
    """Run a job among its processes, holding the lock of its output folder."""
    accelerator = processes.accelerator_for(run.launcher, run.trainer, run.model)
    accelerator.wait_for_everyone()  # no process may see what another one starts to write
    with RunLock(Path(run.out)) as lock:
        on_main(accelerator, lock.take)
        job(run, accelerator, lock)
    accelerator.end_training()


def job(run: RunConfig, accelerator: Accelerator, lock: RunLock) -> None:
    """Load, train, evaluate."""
    (run,) = broadcast_object_list([run])  # as the first process sees its device
    run = train_head(run, accelerator, lock)
    accelerator.free_memory()  # the evaluation loads the target anew
    processes.release_freed()
    accelerator.wait_for_everyone()
    if run.eval.prompts and (accelerator.is_main_process or run.model.where.together):
        report(run, accelerator)


def train_head(run: RunConfig, accelerator: Accelerator, lock: RunLock) -> RunConfig:
    """Load and train; return the run with the values that it was started with."""
    if not accelerator.is_main_process:
        logging.disable(logging.WARNING)  # of what all of them load the first one warns
    set_seed(run.trainer.seed)
    goes_on = run.resume and bool(format.checkpoints(Path(run.out) / "checkpoints"))
    if goes_on and run.init == AUTO:
        run = replace(run, init=resume.first_init(Path(run.out), run.head.name))
    target = load_target(run.model, str(accelerator.device), whole=reads_target(run))
    if isinstance(target, Target):
        run = replace(run, tree=verifiable(target, run.tree))
    config, init = resolve_init(run.init, run.head, target)
    head: Any = first_head(config, init, target).to(accelerator.device)
    run = with_micro_tokens(replace(run, head=head.config, init=init))
    for module in head.modules():
        if isinstance(module, Recomputing):
            module.recompute = run.trainer.recompute
    prompt_count = max(run.eval.prompts, run.trainer.eval_prompts)
    data = load_training(run.data, target.tokenizer, prompt_count, run.workload, prompt_room(run, target.config))
    packed = pack(data.samples, run.data.length)
    check_known(packed, data.held_out, target.tokenizer, target.embeddings.vocab_size)
    if run.init in STARTS:  # else the vocabulary is chosen already
        prune(head, token_counts(data.samples, target.embeddings.vocab_size))
    batches = batches_for(run, packed, accelerator)
    if not goes_on:
        fit_start(head, run.init, target, batches)
    adapt.adapt(head, run.peft)
    source = source_for(run.features, target, head, batches)

    def begin() -> None:
        origin = {
            **provenance(accelerator.num_processes, run.launcher.strategy, data, target.tokenizer),
            "micro_tokens": run.trainer.micro_tokens,
            "sources": [source.provenance() for source in open_sources(run.data)],
            **({} if run.init is None else {"init": run.init, "peft": asdict(run.peft)}),
            **origin_of(source),
        }
        prepare_out(run, lock, identity(run, target, batches, 1).settings, data, origin)
        begun = f"starts from {run.init}, whose numbers replace those of head={run.head.name}; " if run.init else ""
        beside = f" beside {frozen:,} frozen ones" if (frozen := frozen_count(head)) else ""
        filled = float((packed.document >= 0).float().mean())
        Console().print(
            f"{run.name}: {begun}{parameter_count(head):,} trained parameters{beside}, {len(data.samples):,} "
            f"samples, {len(packed.token):,} rows of {run.data.length} tokens ({filled:.0%} filled)",
            highlight=False,
        )
        placed = None if alone_on_cpu(run) else in_words(run)
        mask = ordinary_mask(getattr(run.head, "mask_token", None), target.embeddings.vocab_size, target.tokenizer)
        for line in filter(None, (unserved(run.model.path, target.embeddings.beyond_tables()), mask, placed)):
            Console().print(line, highlight=False, soft_wrap=True, markup=False)

    on_main(accelerator, begin)
    logging.disable(logging.NOTSET)
    held_out = [prompt.token for prompt in data.held_out]
    loop_of(run, accelerator, target, head, source, held_out).train()
    return run


def report(run: RunConfig, accelerator: Accelerator) -> None:
    """Evaluate the kept head beside those of `compare`; exit with status 1 if it is not lossless."""
    values, cost = evaluation(run), json.loads((Path(run.out) / COST).read_text())
    if run.model.where.together:
        values["model"]["device"] = str(accelerator.device)
    from eval.run import evaluate  # late: a tenth of the start

    config = eval_config(**values)
    result = evaluate(config, writes=accelerator.is_main_process)
    if accelerator.is_main_process:
        conclude(Path(run.out), run.trainer.trackers, values_of(run), final(cost["steps"], result))
        sweep.note(run.name, run.head.name, Path(run.out))
    if not result.passed:
        raise SystemExit(1)


def values_of(run: Any) -> dict[str, Any]:
    """Return a run's configuration as trackers and config.yaml show it: without secrets."""
    values: dict[str, Any] = redacted_values(asdict(run))
    return values


def final(step: int, result: Any) -> dict[str, Any]:
    """Return the numbers of a run that ended at a step: its head's first row of the report, and the gate's verdict."""
    row: dict[str, Any] = next((vars(row) for row in result.rows if row.drafter != PLAIN), {})
    numbers = {f"final_{key}": row.get(key) for key in ("tau", "speedup", "tokens_per_second", "lossless")}
    return {"step": step, **numbers, "lossless": float(result.passed)}


def launch_all(run: RunConfig, words: list[str]) -> None:
    """Start the run's processes; exit with their status unless it is 0, after which a multirun continues."""
    if run.launcher.slurm is None:
        check_run(run)
    if status := launch.start(run.launcher, os.path.abspath(__file__), words):
        raise SystemExit(status)
    if run.eval.prompts and not launch.leaves(run.launcher):
        sweep.note(run.name, run.head.name, Path(run.out))


def within_budget(run: RunConfig) -> float | None:
    """Plan, or train, the head that is fastest after a budget."""
    from train.forecast.command import Forecast, overrides_of

    words = launch.overrides()
    if os.environ.pop(BEST, None):  # no head is named, and the candidates take the place of the best one
        words = [word for word in words if launch.key_of(word) != "head"]
    words = shared_words(words, run.log)
    if sweeping() or started.launched() or launch.leaves(run.launcher):
        raise ValueError("a budget is of one run, which starts its own processes: leave -m and other launchers out")
    planned, given = run.plan is True, {launch.key_of(word) for word in launch.overrides()}
    named = [f"{key}={getattr(run, key)}" for key in ("resume", "overwrite")]
    named += [] if "name" in given else ["name=${model.name}-forecast"]
    composed = run_config(compose("train", [*words, *named]))
    run = replace(composed, budget=run.budget, forecast=run.forecast, log=run.log)
    candidates = {one: run_config(compose("train", [*words, *overrides_of(one)])) for one in run.forecast.candidates}
    if planned:
        check_plan(run)
        Console().print(budget_plan(run, candidates))
        return None
    run = chosen(with_processes(run))
    check_out(Path(run.out), replaces=run.resume or run.overwrite)
    forecast = Forecast(run, words, lambda more: ordinary([*words, *more]))
    forecast.finish(forecast.choose())
    return sweep.best_tau(Path(run.out))


def shared_words(words: list[str], log: str | None) -> list[str]:
    """Return the overrides that all trainings within a budget have in common; refuse those of a single one."""
    keys = [launch.key_of(word) for word in words]
    if odd := [key for key in keys if key.startswith("head.")]:
        raise ValueError(
            f"{odd[0]} is of one head, and a budget compares several: give it with its head in "
            "forecast.candidates, as ['eagle3 head.layers=2']"
        )
    for word, key in zip(words, keys, strict=True):
        if key == "head":
            names = word.partition("=")[2]
            raise ValueError(f"{word} is one head, and a budget compares several: give forecast.candidates=[{names}]")
        if key in DECIDED:
            raise ValueError(f"{word}: {DECIDED[key]}")
    if log is not None and "data.path" in keys:
        raise ValueError("log and data.path are both given: log takes the place of data.path, leave one out")
    rest = [
        word for word, key in zip(words, keys, strict=True) if key not in BY_BUDGET and not key.startswith("forecast.")
    ]
    return rest if log is None else [*rest, f"data.path={quoted(log)}"]


def budget_plan(run: RunConfig, candidates: dict[str, RunConfig]) -> Group:
    """Return the plan of a budget: nothing is loaded."""
    from train.forecast.command import plan as table_of

    device, operations = resolved(run.device, run.model.device), {}
    for words, candidate in candidates.items():
        inputs = rated(plan_inputs(sized(chosen(candidate))))
        costs, device = work(inputs), inputs.device
        tokens = candidate.trainer.steps * candidate.trainer.batch_tokens
        operations[words] = (costs["head_flops"] + costs["target_flops"]) / tokens
    assert run.budget is not None
    return table_of(run.budget, run.forecast.share, operations, device)


def ordinary(words: list[str]) -> None:
    """Run an ordinary training with these overrides, to its end."""
    run = with_processes(run_config(compose("train", words)))
    if launch.missing(run.launcher):
        launch_all(run, words)
    else:
        train(run)


@command("train")
def main(cfg: DictConfig) -> float | None:
    """Compose, check, and plan, launch or train; return the best τ, which a sweep may maximise."""
    with user_errors(), launch.main_first():
        started.take_over(cfg.launcher, accelerators(cfg.model.device))
        launch.check_mode()
    with ending_alone(), user_errors(), launch.main_first():
        run = run_config(cfg)
        if run.loop is not None:
            from train.maintenance.stages import maintain

            raise SystemExit(maintain(run, launch.overrides(), ordinary))
        if run.budget is not None:
            return within_budget(run)
        sweep.check(run.trainer.eval_prompts, waits=not launch.leaves(run.launcher))
        if run.plan is True:
            if not started.is_main():
                return None
            check_plan(run)
            run = chosen(run)
            report_best_head()
            Console().print(table(run, plan(run)), highlight=False)
            on_cpu = resolved(run.device, run.model.device).type == "cpu"
            if command := launch.by_hand(run.launcher, sys.argv[0], launch.overrides(), on_cpu=on_cpu):
                Console().print(command, highlight=False, soft_wrap=True, markup=False)
            return None
        run = with_processes(run)
        if launch.missing(run.launcher):
            launch_all(run, launch.overrides())
        else:
            train(run)
            if started.is_main() and HydraConfig.get().runtime.choices.get("trainer") == DEBUG:
                line = f"trainer={DEBUG}: {run.trainer.steps} steps show that it runs; no number of them means anything"
                Console().print(line, highlight=False, soft_wrap=True)
        return None if launch.leaves(run.launcher) else sweep.best_tau(Path(run.out))


if __name__ == "__main__":
    sys.argv[1:] = bracketed(sys.argv[1:], "compare")
    main()
