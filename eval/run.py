"""python eval/run.py run=outputs/NAME: measure heads against the baseline, check that they are lossless, report."""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: the checkout's root, or `import heads` would fail
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import gc
import json
from collections.abc import Sequence

from omegaconf import DictConfig
from rich.console import Console

from eval.config import RECORDED, EvalConfig
from eval.gates import check
from eval.inputs.drafters import load_drafters
from eval.inputs.workloads import load_workload
from eval.measures.losslessness import Gate, SampledGate
from eval.measures.machine import device_facts
from eval.measures.results import LIVE, TEACHER_FORCED
from eval.measures.serving import CONFIG as SERVING
from eval.report.render import terminal
from eval.report.sections import compared, sentence
from eval.report.write import READ, Report
from eval.sessions import Timed, generate_answers, recorded, teacher_forced_rows, timed_rows
from eval.setup import described, devices_of, dtype_for, load_target, prepared, read, remarks_of, settings_of
from eval.tune import TUNED, tune
from heads.common.command import command, ending_alone
from heads.common.errors import keeping, user_errors
from heads.common.typed import typed
from heads.common.untrusted import visible
from inference.target.config import ModelConfig

PIPE_WIDTH = 140


def evaluate(config: EvalConfig, *, writes: bool = True) -> Report:
    """Measure as configured, and if it `writes` print the table and write report.json, report.md and report.html.

    For the live tier the gate compares every prompt's tokens in `gate_dtype`; then the target is loaded in its fast
    dtype and timed. A drafter that fails the gate gets no speedup, only its acceptance.

    Returns:
        The report; `passed` decides the exit status.

    Raises:
        ValueError: an unknown drafter, run, model, workload or tree, or a head of another target.
    """
    model, names, out = prepared(config)
    report = measured(config, model, names)
    if writes:
        publish(report, out)
    return report


def measured(config: EvalConfig, model: ModelConfig, names: Sequence[str]) -> Report:
    """Measure all configured tiers."""
    live = LIVE in config.tiers()
    gates: dict[str, Gate] = {}
    sampled: list[SampledGate] = []
    dtype = dtype_for(config, model)
    target = load_target(model, config.gate_dtype if live else dtype, config.engine)
    workloads, remarks = read(config, target, names), remarks_of(config, target)
    # A log without answers is refused before anything is measured.
    logs = recorded(config, config, target, names) if config.text == RECORDED else []
    if live:
        prompts = [prompt for workload in workloads for prompt in workload.prompts]
        gates, sampled = check(target, load_drafters(config, target), prompts, config, config.gate_tv)
        if dtype != config.gate_dtype:
            del target
            gc.collect()  # two copies of a large target may not fit
            target = load_target(model, dtype, config.engine)
    drafters = load_drafters(config, target)
    timed = timed_rows(config, target, workloads, drafters, gates, sampled) if live else Timed([], [], {})
    rows, extras = list(timed.rows), dict(timed.extras)
    if TEACHER_FORCED in config.tiers():
        texts = logs or timed.materials or generate_answers(config, target, workloads)
        along, extras["teacher_forced"] = teacher_forced_rows(config, target, drafters, texts)
        rows += along
    if remarks:
        extras["warnings"] = remarks
    return Report(
        target={"name": model.name, "path": model.path, **described(target)},
        device=device_facts(target.device, target.dtype) | devices_of(target),
        settings=settings_of(config, workloads),
        gates=gates,
        rows=rows,
        sampled=sampled,
        extras=extras,
    )


def tuned(config: EvalConfig) -> bool:
    """Find the best tree for a run's head on this device, in the timed dtype; print and write it.

    Returns whether every timed tree is lossless.

    Raises:
        ValueError: no such run, model or workload, a head of another target, or a target that answers nothing.
    """
    model, names, out = prepared(config)
    if len(names) > 1:
        raise ValueError(f"workload is {', '.join(names)}: tune=true finds the tree for one, give one")
    target = load_target(model, dtype_for(config, model), config.engine)
    prompts = load_workload(names[0], target, config.prompts, config.truncate)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    with target.uncaptured():  # like the measured costs
        tuning = tune(config, target, prompts)
    tuning.write(out)
    tuning.show(console)
    console.print(visible(f"all numbers: {out / TUNED}"), soft_wrap=True, markup=False)
    return tuning.passed


def publish(report: Report, out: Path) -> None:
    """Print the table, write the files and their paths, and list failed checks on stderr."""
    # A pipe has no width of its own, and rich's guess would break the lines.
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    content = report.as_dict()
    console.print(terminal(content))
    for line in filter(None, (sentence(content), *compared(content))):
        console.print(visible(line), soft_wrap=True, markup=False, highlight=False)
    for warning in report.warnings():
        print(visible(f"compare with care: {warning}"), file=sys.stderr)
    report.write(out)
    files = [str(out / name) for name in READ if (out / name).exists()]
    console.print(visible(f"report: {' and '.join(files)}"), soft_wrap=True, markup=False)
    if (schedule := out / SERVING).exists():
        *_, (_, last, _) = json.loads(schedule.read_text())["num_speculative_tokens_per_batch_size"]
        console.print(visible(f"tokens to draft up to batch size {last}, for vLLM: {schedule}"), soft_wrap=True)
    for failure in report.failures():
        print(visible(f"NOT LOSSLESS: {failure}"), file=sys.stderr)


@command("eval")
def main(cfg: DictConfig) -> None:
    """Evaluate; exit with 1 if a drafter is not lossless, 2 for a mistake."""
    with ending_alone(), user_errors():
        config = typed(EvalConfig, cfg)
        with keeping(lambda: "nothing was written; the same command measures again"):
            passed = tuned(config) if config.tune else evaluate(config).passed
        if not passed:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
