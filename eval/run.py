"""python eval/run.py run=outputs/NAME: measure draft heads against plain decoding, prove them lossless, report."""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: the checkout's root in place of this folder, or `import heads` would fail
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import gc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console

from eval import load
from eval.config import EngineConfig, EvalConfig, listed
from eval.extras import answers, training, trees
from eval.gates import agreement, check, settings_at, sources
from eval.live import Session, measure, rows
from eval.lossless import Gate, SampledGate
from eval.machine import device_facts, peak_memory, provenance
from eval.report import Report, table
from eval.row import Row
from eval.sources import find_heads, model_of, own_prompts
from eval.tune import tune
from eval.tuned import TUNED
from eval.workloads import Selection, Workload, load_workload, read_workload
from heads.errors import user_errors
from heads.resolvers import register_resolvers
from heads.typed import bracketed, typed
from inference.decode import autoregress
from inference.placement import alone
from inference.target import Target, default_device, fast_dtype

PIPE_WIDTH = 140


def evaluate(config: EvalConfig) -> Report:
    """Measure as configured, print the table, and write report.json, report.md and report.html.

    The gate compares every prompt's tokens in `gate_dtype`; then the target is loaded as it is fast, and timed. A
    drafter that fails the gate has its acceptance reported but no speedup.

    Returns:
        The report; the caller's exit status should follow `passed`.

    Raises:
        ValueError: an unknown drafter, run, model, workload or tree, or a head of another target.
    """
    runs = config.runs()
    model = model_of(runs[0] if runs else None, config.model)
    out = folder_for(config.out, runs, list(config.drafter))
    target = load_target(model, config.gate_dtype, config.engine)
    workloads = read(config, model, target)
    prompts = [prompt for workload in workloads for prompt in workload.prompts]
    gates, sampled = check(config, target, prompts)
    dtype = speed_dtype(config, model, target.device)
    if dtype != config.gate_dtype:
        del target
        gc.collect()  # two copies of a large target may not fit
        target = load_target(model, dtype, config.engine)
    extras: dict[str, Any] = {}
    report = Report(
        target={"name": model["name"], "path": model["path"], **described(target)},
        device=device_facts(target.device, target.dtype),
        settings=settings_of(config, workloads),
        gates=gates,
        rows=timed_rows(config, target, workloads, gates, sampled, extras),
        sampled=sampled,
        extras=extras,
    )
    report.write(out)
    show(report, out)
    return report


def tuned(config: EvalConfig) -> bool:
    """Find the best tree for a run's head on this device, in the dtype that speed is measured in; print and write it.

    Returns:
        Whether every tree that was timed is lossless.

    Raises:
        ValueError: no such run, model or workload, a head of another target, or a target that answers nothing.
    """
    runs = config.runs()
    model = model_of(runs[0], config.model)
    names = workloads_of(config, model)
    if len(names) > 1:
        raise ValueError(f"workload is {', '.join(names)}: tune=true finds the tree for one, give one")
    device = torch.device(model["device"] or default_device())
    target = load_target(model, speed_dtype(config, model, device), config.engine)
    prompts = load_workload(names[0], target, config.prompts, config.truncate)
    out = folder_for(config.out, runs, list(config.drafter))
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    found = tune(config, target, prompts)
    found.write(out)
    found.show(console)
    console.print(f"all numbers: {out / TUNED}", soft_wrap=True)
    return found.passed


def workloads_of(config: EvalConfig, model: Mapping[str, Any]) -> list[str]:
    """Return what to measure on: what is configured, else the first run's own prompts, else the model's.

    Raises:
        ValueError: none of them is there, or one is given twice.
    """
    runs = config.runs()
    own = own_prompts(runs[0] if runs else None) or model.get("prompts")
    names = [str(name) for name in listed(config.workload or own) if name]
    if not names:
        raise ValueError("workload is missing: give a name, a file or a Hub data set")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"workload {', '.join(repeated)} is given twice: leave one out")
    return names


def folder_for(out: str | None, runs: Sequence[str], drafters: Sequence[str]) -> Path:
    """Return where the report goes: where the user says, else the first run's folder, else one under outputs/."""
    own = Path(runs[0]).expanduser() if runs else Path("-".join(drafters))
    return Path(out).expanduser() if out else own if own.is_dir() else Path("outputs") / own.name


def load_target(model: Mapping[str, Any], dtype: str, engine: EngineConfig) -> Target:
    """Load the target in a dtype, which is that of what is not quantised, and compile it if the engine is to be."""
    remote = bool(model["trust_remote_code"])
    how = remote, model["quantize"], model["adapter"], alone(model, "an evaluation")
    target = Target.load(model["path"], dtype, model["device"], *how)
    if engine.compile:
        target.compile()
    return target


def speed_dtype(config: EvalConfig, model: Mapping[str, Any], device: torch.device) -> str:
    """Return the dtype to time in: the evaluation's, else the model's, else the one that is fast on the device."""
    chosen: str = next((name for name in (config.dtype, model["dtype"]) if name != "auto"), "auto")
    return str(fast_dtype(device)).removeprefix("torch.") if chosen == "auto" else chosen


def read(config: EvalConfig, model: Mapping[str, Any], target: Target) -> list[Workload]:
    """Return the workloads; of dialogues, the target greedily writes the answers that nobody recorded."""
    wanted = Selection(config.prompts, config.warmup, config.truncate, config.turns, config.balanced)
    settings = settings_at(0.0, config)

    def answer(token: list[int]) -> str:
        return str(target.tokenizer.decode(autoregress(target, token, settings).tokens, skip_special_tokens=True))

    return [read_workload(name, target, wanted, answer) for name in workloads_of(config, model)]


def timed_rows(
    config: EvalConfig,
    target: Target,
    workloads: Sequence[Workload],
    gates: dict[str, Gate],
    sampled: Sequence[SampledGate],
    extras: dict[str, Any],
) -> list[Row]:
    """Return the rows of all workloads, temperatures, batch sizes and rates, each an interleaved session of its own.

    `extras` takes what the report shows besides: training curves, trees, and answers of the first session.
    """
    drafters = sources(config, target)
    if "head" in config.drafter:
        extras["training"] = training(find_heads([*config.runs(), *config.compare]))
    extras["trees"] = trees(drafters)
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    made: list[Row] = []
    start = 0
    for workload in workloads:
        for temperature, size, rate in itertools.product(
            config.temperatures(), config.batch_sizes(), config.request_rates()
        ):
            settings = settings_at(temperature, config)
            hf = config.hf and temperature == 0  # HF's own is timed greedily, so only greedy rows compare with it
            how = target, drafters, workload.prompts, settings, config.repeats, workload.warmup
            rounds = None if rate is None else load.measure(*how, size, rate)
            runs = measure(*how, hf, size) if rounds is None else load.generations(rounds)
            here = [each for each in sampled if each.temperature == temperature]
            session = Session(
                workload.name,
                temperature,
                size,
                peak_memory(target.device),
                config.seed,
                start=start,
                categories=workload.categories(),
                coupled={each.drafter: each.coupled for each in here},
                untrusted=frozenset(each.drafter for each in here if not each.passed),
                agreement=agreement(target, workload.prompts, runs, settings) if temperature == 0 and size == 1 else {},
                request_rate=rate,
            )
            timed = rows(runs, drafters, gates, session)
            made += timed if rounds is None else load.waited(timed, rounds, session)
            extras.setdefault("answers", answers(runs, drafters, workload.prompts, target.tokenizer))
        start += len(workload.prompts)
    return made


def described(target: Target) -> dict[str, Any]:
    """Return what identifies the target."""
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    spec = {key: value for key, value in asdict(target.spec).items() if key != "name"}
    return {**spec, "parameters": parameters, "context": target.context, "quantized": target.quantized}


def settings_of(config: EvalConfig, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Return what the numbers depend on besides models and machine."""
    sampling = ("top_k", "top_p", "min_p", "repetition_penalty", "rule", "lossy", "seed")
    keys = ("max_new_tokens", "min_new_tokens", *sampling, "gate_dtype", "repeats", "warmup", "truncate")
    chosen = {key: getattr(config, key) for key in (*keys, "turns", "balanced", "budget", "gate_tv")}
    return {
        "prompts": sum(len(workload.prompts) for workload in workloads),
        "warmup_prompts": "further ones" if all(each.fresh for each in workloads) else "measured ones, halves swapped",
        **chosen,
        "engine": config.engine.label,
        "provenance": provenance(),
    }


def show(report: Report, out: Path) -> None:
    """Print the table, where the files are, and on stderr what failed."""
    # A pipe has no width of its own, and rich's guess would break the lines.
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(table(report))
    console.print(f"report: {out / 'report.md'} and {out / 'report.html'}", soft_wrap=True)
    for failure in report.failures():
        print(f"NOT LOSSLESS: {failure}", file=sys.stderr)


@hydra.main(version_base="1.3", config_path="../conf", config_name="eval")
def main(cfg: DictConfig) -> None:
    """Evaluate; exit with 1 if a drafter is not lossless, with 2 for an error of the user's."""
    register_resolvers()
    with user_errors():
        config = typed(EvalConfig, cfg)
        passed = tuned(config) if config.tune else evaluate(config).passed
    if not passed:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.argv[1:] = bracketed(sys.argv[1:], "run", "compare")
    main()
