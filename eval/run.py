"""python eval/run.py run=outputs/NAME: measure draft heads against the baseline, prove them lossless, report."""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: the checkout's root in place of this folder, or `import heads` would fail
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from torch import distributed

from data.text.prompts import Prompt, locate
from data.text.sources import check_source
from eval.audit.compare import FAILED, PASSED
from eval.audit.run import audited
from eval.config import RECORDED, EngineConfig, EvalConfig, listed
from eval.endpoint import measure
from eval.gates import check
from eval.inputs.drafters import check_drafters, load_drafters
from eval.inputs.runs import find_heads, model_of, own_prompts
from eval.inputs.workloads import Workload, load_workload, named_apart, prompt_counts, read_workload
from eval.measures.losslessness import FailedChecks, Gate, SampledGate
from eval.measures.machine import device_facts, provenance
from eval.measures.results import ENDPOINT, LIVE, TEACHER_FORCED
from eval.measures.serving import CONFIG as SERVING
from eval.report.reading import folder_of, side_by_side
from eval.report.render import terminal
from eval.report.sections import compared, sentence
from eval.report.write import READ, Report
from eval.sessions import Timed, along_texts, check_sources, timed_rows
from eval.tiers import recorded
from eval.tune import TunePlan, tune
from eval.tuning.results import TUNED, is_tuned
from eval.watch.run import Player, follow
from heads.common.command import command, ending_alone
from heads.common.errors import is_reporting_rank, keeping, user_errors
from heads.common.files import check_writable
from heads.common.progress import Bar
from heads.common.target_config import experts_of
from heads.common.typed import typed
from heads.common.untrusted import visible
from heads.formats.hub import made_for, resolve_head
from inference.decode import autoregress
from inference.drafters.head import HeadDrafter, load_drafter
from inference.target.config import DTYPES, ModelConfig, device_named, fast_dtype
from inference.target.loading import configuration, note_dtype
from inference.target.placement import check_alone
from inference.target.target import Target

PIPE_WIDTH = 140


def evaluate(config: EvalConfig, *, writes: bool = True) -> Report:
    """Measure as configured, and if it `writes` print the table and write report.json, report.md and report.html.

    For the live tier the gate compares every prompt's tokens in `gate_dtype`; then the target is loaded as it is fast,
    and timed. A drafter that fails the gate has its acceptance reported but no speedup.

    Returns:
        The report; the caller's exit status should follow `passed`.

    Raises:
        ValueError: an unknown drafter, run, model, workload or tree, or a head of another target.
    """
    if config.reports():
        return compare_reports(config)
    if config.endpoint is not None:
        return served(config)
    check_sources(config)
    model, names, out = prepared(config)
    report = measured(config, model, names)
    if writes:
        publish(report, out)
    return report


def prepared(config: EvalConfig) -> tuple[ModelConfig, list[str], Path]:
    """Return the target to load, the workloads and the report's folder, checked as far as nothing is loaded for it.

    Raises:
        ValueError: naming the key and the remedy.
    """
    runs = config.runs()
    model = model_of(runs[0] if runs else None, config.model)
    check_drafters(config)
    names, out = workloads_of(config, model), folder_for(config.out, runs, list(config.drafter))
    if model.sibling and config.out is None:
        out /= model.name  # the run's own report is of the head's own target
    device_named(model.device)
    check_writable(out, "out")
    replaced = "" if config.tune else replacing(out)
    if is_reporting_rank():
        print(visible(f"evaluation on {', '.join(names)} with {model.path}, to {out}{replaced}"), file=sys.stderr)
    configuration(model.path, model.trust_remote_code)
    return model, names, out


def served(config: EvalConfig) -> Report:
    """Measure a served endpoint, print the table, and write the report, to outputs/endpoint unless the user says."""
    names, out = workloads_of(config, None), folder_for(config.out, [], [ENDPOINT])
    check_writable(out, "out")
    report = measure.measure(config, config, config, config.repeats, names)
    publish(report, out)
    return report


def audit(config: EvalConfig) -> int:
    """Audit a served model, to outputs/audit unless the user says; return 0 if it passed, 1 if not, 3 if undecided."""
    out = folder_for(config.out, [], ["audit"])
    check_writable(out, "out")
    names = workloads_of(config, None) if config.workload else []
    verdict = audited(config, config, config, config, names, out)
    return {PASSED: 0, FAILED: 1}.get(verdict.status, 3)


def watch(config: EvalConfig) -> int:
    """Watch the head in service; return 0 without an alarm, 1 with one, 3 where nothing could be compared yet."""
    return follow(config, config.client, player(config))


def player(config: EvalConfig) -> Player | None:
    """Return the head of `run` to be played along a log, not loaded yet; None without a run."""
    (run,) = config.runs() or (None,)
    if run is None:
        return None

    def load() -> tuple[Target, HeadDrafter]:
        model = model_of(run, config.model)
        target = load_target(model, dtype_for(config, model), config.engine)
        return target, load_drafter(resolve_head(run), config.tree, target, "head")

    check_drafters(config)
    return Player(load, str(config.watch), config.turns, config.max_new_tokens)


def measured(config: EvalConfig, model: ModelConfig, names: Sequence[str]) -> Report:
    """Measure with the target, in all tiers that are asked for."""
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
    failed = FailedChecks.of(gates, sampled)
    not_lossless = {name for name in drafters if failed.source(name, config.batch_sizes())}
    rows, extras = along_texts(config, target, workloads, drafters, logs or timed.materials, not_lossless)
    if remarks:
        extras["warnings"] = remarks
    return Report(
        target={"name": model.name, "path": model.path, **described(target)},
        device=device_facts(target.device, target.dtype) | devices_of(target),
        settings=settings_of(config, workloads),
        gates=gates,
        rows=timed.rows + rows,
        sampled=sampled,
        extras=timed.extras | extras,
    )


def remarks_of(config: EvalConfig, target: Target) -> list[str]:
    """Return warnings: a losslessness check in a coarse dtype, a sharded target, heads made for another target."""
    remarks = []
    if config.gate_dtype in ("bfloat16", "float16"):
        remarks.append(f"losslessness is checked in {config.gate_dtype}, in which more of the tokens are near ties")
    if target.placed.together:
        remarks.append(
            f"the target is sharded among {distributed.get_world_size()} processes, which all decode the same"
        )
    remarks += _half_tuned(config)
    for name, folder in find_heads([*config.runs(), *config.compare]).items() if target.sibling else ():
        saved = made_for(folder)
        if saved is not None and saved.fingerprint != target.spec.fingerprint:
            remarks.append(f"{name} was made for {saved} and is measured on {target.spec}")
    return remarks


def _half_tuned(config: EvalConfig) -> list[str]:
    """Return that the trees of some heads were tuned and those of others were not, where each has its own."""
    if "head" not in config.drafter or any(value is not None for value in config.tree.values()):
        return []
    heads = find_heads([*config.runs(), *config.compare])
    tuned = [name for name, folder in heads.items() if is_tuned(folder)]
    others = ", ".join(name for name in heads if name not in tuned)
    if not tuned or not others:
        return []
    return [f"the tree of {', '.join(tuned)} was tuned, that of {others} was not: tune it too, by tune=true"]


def tuned(config: EvalConfig) -> bool:
    """Find the best tree for a run's head on this device, in the dtype that speed is measured in; print and write it.

    Returns whether every tree that was timed is lossless.

    Raises:
        ValueError: no such run, model or workload, a head of another target, or a target that answers nothing.
    """
    model, names, out = prepared(config)
    if len(names) > 1:
        raise ValueError(f"workload is {', '.join(names)}: tune=true finds the tree for one, give one")
    target = load_target(model, dtype_for(config, model), config.engine)
    prompts = load_workload(names[0], target, config.prompts, config.truncate)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    plan = TunePlan(config.runs()[0], config.tree, config.tuner, config, config.repeats)
    with target.uncaptured():  # as the costs are measured that it predicts from
        tuning = tune(plan, target, prompts, config.engine.label)
    tuning.write(out)
    tuning.show(console)
    console.print(visible(f"all numbers: {out / TUNED}"), soft_wrap=True, markup=False)
    return tuning.passed


def compare_reports(config: EvalConfig) -> Report:
    """Put the reports of `compare` side by side, measuring nothing; print the table and what forbids to compare them.

    Raises:
        ValueError: a report is missing, damaged, none, or of another schema.
    """
    out = Path(config.out).expanduser() if config.out else folder_of(config.reports())
    check_writable(out, "out")
    report = side_by_side(config.reports())
    publish(report, out)
    return report


def workloads_of(config: EvalConfig, model: ModelConfig | None) -> list[str]:
    """Return the workloads: the configured ones, else the first run's own prompts, else the model's.

    Raises:
        ValueError: none of them is there, one is given twice, or is no source of text.
    """
    runs = config.runs()
    default = own_prompts(runs[0] if runs else None) or (model and model.prompts)
    names = [str(name) for name in listed(config.workload or default) if name]
    if not names:
        raise ValueError("workload is missing: give a name, a file or a Hub data set")
    named_apart(names)
    for name in names:
        check_source(locate(name))
    return names


def folder_for(out: str | None, runs: Sequence[str], drafters: Sequence[str]) -> Path:
    """Return the folder of the report: the user's, else the first run's, else one under outputs/."""
    first = Path(runs[0]).expanduser() if runs else Path("-".join(drafters))
    return Path(out).expanduser() if out else first if first.is_dir() else Path("outputs") / first.name


def replacing(out: Path) -> str:
    """Return what to add to a folder's name where a report in it is replaced; nothing where there is none."""
    return ", in place of the report there; out=FOLDER writes elsewhere" if (out / "report.json").exists() else ""


def load_target(model: ModelConfig, dtype: str, engine: EngineConfig) -> Target:
    """Load the target in a dtype, that of the weights that are not quantised, and compile it if the engine is to be."""
    if not distributed.is_initialized():  # else all processes of a training are here
        check_alone(model.where, "an evaluation")
    target = Target.of(model, dtype)
    if engine.compile or engine.compile_drafts:
        target.compile(drafts_alone=not engine.compile)
    return target


def dtype_for(config: EvalConfig, model: ModelConfig) -> str:
    """Return the dtype to time in, and say so where it was chosen and the checkpoint's is another."""
    chosen = speed_dtype(config, model, device_named(model.device))
    if config.dtype == model.dtype == "auto":
        note_dtype(model.path, model.trust_remote_code, DTYPES[chosen])
    return chosen


def speed_dtype(config: EvalConfig, model: ModelConfig, device: torch.device) -> str:
    """Return the dtype to time in: the evaluation's, else the model's, else the one that is fast on the device."""
    chosen: str = next((name for name in (config.dtype, model.dtype) if name != "auto"), "auto")
    return str(fast_dtype(device)).removeprefix("torch.") if chosen == "auto" else chosen


def read(config: EvalConfig, target: Target, names: Sequence[str]) -> list[Workload[Prompt]]:
    """Return the workloads; of dialogues, the target greedily writes the answers that nobody recorded."""
    settings = config.settings(0.0)

    def answer(token: list[int]) -> str:
        bar.show(bar.done + 1)
        return str(target.tokenizer.decode(autoregress(target, token, settings).tokens, skip_special_tokens=True))

    named = zip(names, named_apart(names), strict=True)
    with Bar(None, "answering the dialogues") as bar:
        return [replace(read_workload(name, target, config, answer), name=shown) for name, shown in named]


def described(target: Target) -> dict[str, Any]:
    """Return the metadata that identifies the target."""
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    spec = {key: value for key, value in asdict(target.spec).items() if key != "name"}
    facts = {"parameters": parameters, "context": target.context, "quantized": target.quantized}
    return {**spec, **facts, "experts": experts_of(target.config)}


def devices_of(target: Target) -> dict[str, int]:
    """Return the number of devices that hold the target as the report's `count`, where they are several."""
    here = {parameter.device for parameter in target.model.parameters() if parameter.device.type not in ("cpu", "meta")}
    count = max(len(here), 1) * (distributed.get_world_size() if target.placed.together else 1)
    return {"count": count} if count > 1 else {}


def settings_of(config: EvalConfig, workloads: Sequence[Workload[Any]]) -> dict[str, Any]:
    """Return the settings that the numbers depend on besides models and machine."""
    sampling = ("top_k", "top_p", "min_p", "repetition_penalty", "rule", "lossy", "seed")
    protocol = ("gate_dtype", "repeats", "warmup", "truncate", "turns", "balanced", "budget", "gate_tv")
    return {
        **prompt_counts(workloads, "measured ones, halves swapped"),
        **{key: getattr(config, key) for key in ("max_new_tokens", "min_new_tokens", *sampling, *protocol)},
        **({"text": config.text} if TEACHER_FORCED in config.tiers() else {}),
        "engine": config.engine.label,
        "provenance": provenance(),
    }


def publish(report: Report, out: Path) -> None:
    """Print the table, which outlives a full disk; write the files, say where they are, and on stderr what failed."""
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
    """Evaluate; exit with 1 if a drafter is not lossless or a watch has an alarm, 2 for a mistake, 3 if undecided."""
    with ending_alone(), user_errors():
        config = typed(EvalConfig, cfg)
        if config.audit is not None:
            raise SystemExit(audit(config))
        if config.watch is not None:
            raise SystemExit(watch(config))
        with keeping(lambda: "nothing was written; the same command measures again"):
            passed = tuned(config) if config.tune else evaluate(config).passed
        if not passed:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
