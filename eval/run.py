"""python eval/run.py run=outputs/NAME: measure heads, check that they are lossless, report."""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root replaces the script's folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import gc
import json
from collections.abc import Mapping, Sequence

import torch
from omegaconf import DictConfig
from rich.console import Console

from data.text.prompts import Prompt
from eval.config import RECORDED, EvalConfig
from eval.extras import answers, training, trees
from eval.gates import check
from eval.inputs.drafters import Drafters, head_folders, load_drafters
from eval.inputs.workloads import Workload, load_workload, prompt_counts
from eval.live import Setup, measure, measure_rate, paired, queued_rows, requests_of, rows
from eval.measures.losslessness import Gate, SampledGate
from eval.measures.machine import device_facts, peak_memory, provenance
from eval.measures.results import BASELINE, LIVE, TEACHER_FORCED, ResultRow
from eval.report.render import terminal
from eval.report.sections import compared, sentence
from eval.report.write import READ, SERVING, Report
from eval.setup import described, devices_of, dtype_for, load_target, prepared, read, remarks_of
from eval.teacher_forced import WorkloadTexts, answered_texts, generate_answers, recorded_texts, teacher_forced_rows
from eval.tune import TUNED, tune
from heads.common.command import command
from heads.common.errors import report_on_interrupt
from heads.common.progress import print_line
from heads.common.typed import Json, typed
from heads.common.untrusted import visible
from inference.target.target import Target
from inference.verification.rules import is_lossy

PIPE_WIDTH = 140
SETTINGS = (
    "max_new_tokens", "min_new_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "rule", "lossy", "seed",
    "gate_dtype", "repeats", "warmup", "truncate", "turns", "balanced", "gate_tv",
)  # fmt: skip


def evaluate(config: EvalConfig, *, writes: bool = True) -> Report:
    """Run the configured measurements; with `writes` print the table and write report.json, report.md and report.html.

    For the live tier the losslessness check compares every prompt's tokens in `gate_dtype`; then the target is loaded
    in its fast dtype and timed. A drafter that fails the check gets no speedup, only its acceptance. Refuse an unknown
    drafter, run, model, workload or tree, and a head of another target.
    """
    model, names, out = prepared(config)
    live = LIVE in config.tiers()
    gates: dict[str, Gate] = {}
    sampled: list[SampledGate] = []
    dtype = dtype_for(config, model)
    target = load_target(model, config.gate_dtype if live else dtype, config.engine)
    workloads, remarks = read(config, target, names), remarks_of(config, target)
    # A log without answers is refused before any measurement.
    logs = recorded_texts(config, config, target, names) if config.text == RECORDED else []
    if live:
        prompts = [prompt for workload in workloads for prompt in workload.prompts]
        gates, sampled = check(target, load_drafters(config, target), prompts, config, config.gate_tv)
        if dtype != config.gate_dtype:
            del target
            gc.collect()  # memory may not hold two copies of a large target
            target = load_target(model, dtype, config.engine)
    drafters = load_drafters(config, target)
    rows, texts, extras = timed_rows(config, target, workloads, drafters, gates, sampled) if live else ([], [], {})
    if TEACHER_FORCED in config.tiers():
        given = logs or texts or generate_answers(config, target, workloads)
        along, extras["teacher_forced"] = teacher_forced_rows(config, target, drafters, given)
        rows += along
    if remarks:
        extras["warnings"] = remarks
    report = Report(
        target={"name": model.name, "path": model.path, **described(target)},
        device=device_facts(target.device, target.dtype) | devices_of(target),
        settings={
            **prompt_counts(workloads),
            **{key: getattr(config, key) for key in SETTINGS},  # that the results depend on
            **({"text": config.text} if TEACHER_FORCED in config.tiers() else {}),
            "engine": config.engine.label,
            "provenance": provenance(),
        },
        gates=gates,
        rows=rows,
        sampled=sampled,
        extras=extras,
    )
    if writes:
        publish(report, out)
    return report


def timed_rows(
    config: EvalConfig,
    target: Target,
    workloads: Sequence[Workload[Prompt]],
    drafters: Drafters,
    gates: Mapping[str, Gate],
    sampled: Sequence[SampledGate],
) -> tuple[list[ResultRow], list[WorkloadTexts], Json]:
    """Measure all workloads, temperatures, batch sizes and rates, each in its own interleaved session.

    Return the rows, the baseline's texts, and extras by key: training curves, trees and answers of the first session.
    """
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    all_rows, texts, extras, start = list[ResultRow](), list[WorkloadTexts](), Json(), 0
    if "head" in config.drafter:
        extras["training"] = training(head_folders(config))
    for workload in workloads:
        for temperature, size, rate in config.conditions():
            setup = Setup(target, drafters, workload.prompts, config.params(temperature))
            hf = config.hf and temperature == 0  # HF's generate is timed greedily, so compared with greedy rows only
            if rate is None:
                runs = measure(setup, config.repeats, workload.warmup, hf, size)
            else:
                rounds = measure_rate(setup, config.repeats, workload.warmup, size, rate)
                runs = {
                    name: [[request.generation for request in served] for served in repeats]
                    for name, repeats in rounds.items()
                }
            if (size, rate) == (config.batch_size[0], config.request_rate[0]):
                texts.append(answered_texts(workload, target, setup.params, runs[BASELINE]))
            checks = [check for check in sampled if check.temperature == temperature]
            measurement = workload.measurement(
                temperature,
                size,
                config.seed,
                memory_bytes=peak_memory(target.device),
                start=start,
                # Coupled noise replaces the rule, so it cannot check a lossy one.
                coupled={} if is_lossy(config.rule) else {check.drafter: check.coupled for check in checks},
                not_lossless=frozenset(check.drafter for check in checks if not check.passed),
                request_rate=rate,
            )
            if not all_rows:
                shown = answers(runs, list(drafters), workload.prompts, target.tokenizer)
                extras.update(trees=trees(runs, drafters), answers=shown)
            new_rows = rows(runs, drafters, gates, measurement)
            if rate is None:
                overall = [row for row in new_rows if not row.category and row.drafter != BASELINE]
                lossless = [row.drafter for row in overall if row.speedup is not None]
                if len(lossless) > 1:
                    extras.setdefault("paired", []).extend(paired(runs, lossless, measurement))
            else:
                new_rows = queued_rows(new_rows, requests_of(rounds), measurement)
            all_rows.extend(new_rows)
        start += len(workload.prompts)
    return all_rows, texts, extras


def find_best_tree(config: EvalConfig) -> bool:
    """Find the best tree for a run's head on this device, in the timed dtype; print and write it.

    Return whether every timed tree is lossless; refuse what `prepared` and `tune` refuse, and several workloads.
    """
    model, names, out = prepared(config)
    if len(names) > 1:
        raise ValueError(f"workload is {', '.join(names)}: tune=true finds the tree for one, give one")
    target = load_target(model, dtype_for(config, model), config.engine)
    prompts = load_workload(names[0], target, config.prompts, config.truncate)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    with target.uncaptured():  # measured costs are without graphs too
        tuning = tune(config, target, prompts)
    tuning.write(out)
    tuning.show(console)
    print_line(f"all numbers: {out / TUNED}")
    return tuning.passed


def publish(report: Report, out: Path) -> None:
    """Print the table, write the files and print their paths, and list failed checks on stderr."""
    # rich guesses a pipe's width, and short lines would break.
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    content = report.as_dict()
    console.print(terminal(content))
    for line in filter(None, (sentence(content), *compared(content))):
        print_line(line)
    for warning in report.warnings():
        print(visible(f"compare with care: {warning}"), file=sys.stderr)
    report.write(out)
    files = [str(out / name) for name in READ if (out / name).exists()]
    print_line(f"report: {' and '.join(files)}")
    if (schedule := out / SERVING).exists():
        *_, (_, last, _) = json.loads(schedule.read_text())["num_speculative_tokens_per_batch_size"]
        print_line(f"tokens to draft up to batch size {last}, for vLLM: {schedule}")
    for failure in report.failures():
        print(visible(f"NOT LOSSLESS: {failure}"), file=sys.stderr)


@command("eval")
def main(cfg: DictConfig) -> None:
    """Evaluate; exit with 1 if a drafter is not lossless, 2 for invalid input."""
    config = typed(EvalConfig, cfg)
    with report_on_interrupt(lambda: "nothing was written; the same command measures again"):
        passed = find_best_tree(config) if config.tune else evaluate(config).passed
    if not passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
