"""A plan as tables for the terminal: totals, the memory of each device, and overrides that make it fit if it does not.

Each override is planned alone, then the mildest ones together.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from omegaconf import OmegaConf
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from heads.common.target_config import about_size, experts_of
from heads.common.untrusted import visible
from inference.target.placement import OFFLOAD, TOGETHER
from train.config import IGNORE, RunConfig, checked
from train.planning.check import holds_run
from train.planning.plan import GIB, MemoryUse, alone_on_cpu, host_bytes, plan, total
from train.planning.shapes import configuration
from train.start import LoraAdapterConfig

SHOWN = 2**20 / 20  # bytes: what is less would read as nothing
FITS = "it fits{}; without plan=true the same command runs it{}"
PRUNED = 32000  # EAGLE-3's draft vocabulary
# The values of features=stored; where the store lies is of no matter to a plan.
STORED = "features.mode=stored features.on_missing=fail features.path=store"


class Advice(NamedTuple):
    """Overrides that make a run smaller, the bytes they save on the fullest device, and whether it then fits."""

    overrides: str
    saves: int
    fits: bool


def table(run: RunConfig, planned: dict[str, Any]) -> Group:
    """Return the plan as tables for the terminal, with `advice` if it does not fit."""
    totals = _table(f"plan: {run.name} -> {run.out}")
    totals.add_row("data", escape(visible(run.data.named)))
    for name in (
        "target_parameters",
        "active_parameters",
        "head_parameters",
        "trained_parameters",
        "steps",
        "tokens",
        "micro_tokens",
    ):
        totals.add_row(name.replace("_", " "), f"{planned[name]:,}")
    if planned["quantization"] is not None:
        totals.add_row("the checkpoint is quantised", escape(visible(planned["quantization"])))
    totals.add_row("a step", f"{run.trainer.batch_tokens:,} tokens in rows of {run.data.length:,}")
    sizes = {f"disk: {name}": size for name, size in planned["disk"].items()}
    for name, size in {"loaded of the target by each process": planned["loaded_bytes"], **sizes}.items():
        if size >= SHOWN:
            totals.add_row(name, gib(size))
    totals.add_row("operations, target and head", f"{planned['target_flops']:.2g} + {planned['head_flops']:.2g}")
    for line in _hours(planned):
        totals.add_row(*line)
    parts: list[Any] = [totals, in_words(run)]
    if planned["unserved"] is not None:
        parts.append(escape(visible(planned["unserved"])))
    parts += [_memory_table(names, use) for names, use in _grouped(planned["devices"])]
    host, needs = planned["host"], ""
    if host is not None:
        parts.append(_memory_table("host memory of each node", host))
        if host.capacity is None:
            needs = f" if a node has {math.ceil(host.peak / GIB)} GiB of host memory"
    return Group(*parts, *([FITS.format(needs, _later(run))] if planned["fits"] else _remedies(run, planned)))


def in_words(run: RunConfig) -> str:
    """Return one line about what was chosen, as overrides."""
    launcher, gate = run.launcher, run.eval.gate_dtype
    nodes = f"{launcher.num_nodes} x " if launcher.num_nodes > 1 else ""
    processes = "1 process" if launcher.local == 1 else f"{launcher.local} processes"
    disk = f" model.offload={run.model.offload}" if run.model.placement == OFFLOAD else ""
    last = f" eval.gate_dtype={gate}" if run.eval.prompts else ""
    idle = ""
    if run.rows < launcher.world:
        idle = (
            f"; a step of trainer.batch_tokens={run.trainer.batch_tokens} is {run.rows} row{'s' * (run.rows > 1)} for "
            f"{launcher.world} processes, so some have nothing to do: give {launcher.world * run.data.length} or more"
        )
    return (
        f"{nodes}{processes}, placed by the plan: model.placement={run.model.placement}{disk} "
        f"launcher.strategy={launcher.strategy} trainer.micro_tokens={run.trainer.micro_tokens}{last}{idle}"
    )


def check_memory(run: RunConfig, trained: int) -> None:
    """Refuse a run of which the plan says that it does not fit, before anything is loaded, unless plan=ignore.

    A process by itself on a CPU has the memory that is free. A plan takes seconds, so none is made where the weights,
    gradients and moments of the head's `trained` parameters, the target's weights in fp32 and 100 values for each
    hidden one of a micro-batch take less than a quarter of that. A run that cannot be planned, as from a given head, is
    not refused.
    """
    if run.plan == IGNORE:
        return
    where = "a device"
    if alone_on_cpu(run):
        text, tokens = configuration(run.model).get_text_config(), run.trainer.micro_tokens or run.trainer.batch_tokens
        experts, _ = experts_of(text) or (1, 1)
        target = experts * about_size(text.num_hidden_layers, text.hidden_size, text.vocab_size)
        free = run.device.memory_gb or min(psutil.virtual_memory().available, host_bytes()) / GIB
        if 16 * trained + 4 * target + 400 * tokens * text.hidden_size < free * GIB / 4:
            return
        run, where = replace(run, device=replace(run.device, memory_gb=free)), "this machine"
    planned = _attempt(run)
    if planned is None or planned["fits"]:
        return
    needed, there = planned["peak_bytes"], planned["devices"][0].capacity
    if _lacks_host_alone(planned):
        needed, there, where = planned["host"].peak, planned["host"].capacity, "a node's host"
    fitting = (change.overrides for change in advice(run, planned) if change.fits)
    raise ValueError(
        f"{run.name} does not fit: it needs {gib(needed)} of memory, and {where} has {gib(there)} free: give "
        f"{next(fitting, 'another head, or more or larger devices')}; plan=true shows where it goes, plan={IGNORE} "
        "starts all the same"
    )


def _later(run: RunConfig) -> str:
    """Return what a run that fits lacks to start: a store of features, a head to adapt, a word on its folder."""
    features, held = run.features, holds_run(Path(run.out)) and not (run.resume or run.overwrite)
    lacking = {
        f"features.path={features.path} is extracted": features.mode == "stored" and not features.folder.exists(),
        "init names the head that peft adapts": isinstance(run.peft, LoraAdapterConfig),
        f"resume=true or overwrite=true says what becomes of the run in {run.out}": held,
    }
    named = " and ".join(escape(visible(words)) for words, lacks in lacking.items() if lacks)
    return f", once {named}" if named else ""


def _table(title: str) -> Table:
    shown = Table(title=title, show_header=False, min_width=60)
    shown.add_column(overflow="fold")
    shown.add_column(justify="right")
    return shown


def _hours(planned: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the hours, and of the assumed efficiency."""
    device = planned["device"]
    if "gpu_hours" not in planned:
        return [("hours", f"not known: device={device['name']} has no peak; give device.tflops")]
    what = f"at an assumed {device['mfu']:.0%} of {device['tflops']:.3g} TFLOP/s ({device['name']})"
    # The peak of a CPU is measured, on products that may be larger than the run's, beside whatever else it does.
    kind = "rough time" if device["type"] == "cpu" else "time"
    lines = [(f"{kind}, {what}", _time(planned["hours"]))]
    if device["type"] != "cpu":
        lines.insert(0, ("GPU hours", f"{planned['gpu_hours']:,.1f}"))
    if "gpu_hours_of_extraction" in planned:
        lines.append(("GPU hours of the extraction, elsewhere", f"{planned['gpu_hours_of_extraction']:,.1f}"))
    return lines


def _time(hours: float) -> str:
    """Format a time in hours, minutes or seconds."""
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.0f} min" if hours >= 1 / 30 else f"{3600 * hours:.0f} s"


def _grouped(devices: list[MemoryUse]) -> Iterator[tuple[str, MemoryUse]]:
    """Yield one of each set of devices with equal memory, with the names of all of the set, by node and range."""
    equal: dict[str, list[MemoryUse]] = {}
    for memory in devices:
        equal.setdefault(repr(replace(memory, node=0, device=0)), []).append(memory)
    for group in equal.values():
        names = []
        for node, inside in groupby(group, key=lambda memory: memory.node):
            first, *others = (memory.device for memory in inside)
            names.append(f"node {node} device {first}" + (f"-{others[-1]}" if others else ""))
        yield ", ".join(names), group[0]


def _memory_table(name: str, use: MemoryUse) -> Table:
    fits = (
        "" if use.capacity is None else f" of {gib(use.capacity)}, {'fits' if use.utilization <= 1 else 'does NOT fit'}"
    )
    shown = _table(f"{name}: {gib(use.peak)}{fits}")
    shown.add_row("process", gib(use.process))
    final = {"final evaluation, all else freed": use.evaluation} if use.evaluation else {}
    for title, sizes in {"": use.resident, **use.stages, **final}.items():
        if title:
            shown.add_row(f"while: {title}", gib(total(sizes)), style="bold")
        for group, size in sizes.items():
            if size >= SHOWN:
                shown.add_row(f"  {group}" if title else group, gib(size))
    if use.allocator:
        shown.add_row("allocator", gib(use.allocator))
    return shown


def _remedies(run: RunConfig, planned: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about a run that does not fit."""
    changes, where = advice(run, planned), "of host memory" if _lacks_host_alone(planned) else "on the fullest device"
    yield f"it does not fit; what to change, the largest saving {where} first:"
    for change in changes:
        yield f"  {change.overrides}: saves {gib(change.saves)}{', and it fits' if change.fits else ''}"
    if not any(change.fits for change in changes):
        yield "  this is not enough: take more or larger devices, or another head"


def gib(size: int | float) -> str:
    """Format bytes in GiB or MiB."""
    return f"{size / GIB:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.1f} MiB"


def advice(run: RunConfig, planned: dict[str, Any]) -> list[Advice]:
    """Return changes that reduce the memory of the fullest device, the most effective first.

    Where every device has room, they reduce that of the host.

    If no single change is enough, the last entry combines several: those that leave the training's result unchanged
    come before the others. There is no such entry if all of them together are not enough.
    """
    host = _lacks_host_alone(planned)
    most, single = _taken(planned, host), []
    for words in _changes(run):
        changed = _attempt(_overridden(run, words))
        if changed is not None and _taken(changed, host) < most:
            single.append(Advice(words, most - _taken(changed, host), changed["fits"]))
    single.sort(key=lambda option: -option.saves)
    if any(option.fits for option in single):
        return single
    combined = _together(run, most, host)
    return single if combined is None else [*single, combined]


def _lacks_host_alone(planned: dict[str, Any]) -> bool:
    """Whether every device of a plan has room, so that what lacks is host memory."""
    return all(device.utilization <= 1 for device in planned["devices"])


def _taken(planned: dict[str, Any], host: bool) -> int:
    """Return the bytes that a plan takes of a node's host memory, or of the fullest device."""
    return int(planned["host"].peak if host else planned["peak_bytes"])


def _together(run: RunConfig, most: int, host: bool) -> Advice | None:
    """Combine changes in their order, those that save memory after the ones before, until the run fits."""
    chosen: list[str] = []
    left = most
    for words in _changes(run):
        if any(words.split("=")[0] == override.split("=")[0] for override in chosen):
            continue
        changed = _overridden(run, words)
        planned = _attempt(changed)
        if planned is not None and _taken(planned, host) < left:
            run, left = changed, _taken(planned, host)
            chosen += [word for word in words.split() if word not in chosen]
            if planned["fits"]:
                return Advice(" ".join(chosen), most - left, True)
    return None


def _attempt(run: RunConfig) -> dict[str, Any] | None:
    """Return the plan of a changed run, None if its settings are refused."""
    try:
        return plan(checked(run))
    except ValueError:
        return None


def _overridden(run: RunConfig, overrides: str) -> RunConfig:
    """Return a run with overrides as on the command line."""
    words = overrides.replace("features=stored", STORED).split()
    sections: Any = OmegaConf.to_container(OmegaConf.from_dotlist(words))
    return replace(run, **{name: replace(getattr(run, name), **values) for name, values in sections.items()})


def _changes(run: RunConfig) -> list[str]:
    """Return possible changes of a run as overrides; the least costly come first."""
    assert run.trainer.micro_tokens is not None
    length, half = run.data.length, run.data.length // 2
    head, several = asdict(run.head), run.launcher.world > 1
    unsharded, whole = run.launcher.strategy == "ddp", run.model.placement == "replicate"
    options = {
        "eval.prompts=0": run.eval.prompts > 0,
        f"trainer.micro_tokens={length}": run.trainer.micro_tokens >= 2 * length,
        "launcher.strategy=zero2": several and unsharded,
        "launcher.strategy=fsdp2": several and unsharded,
        **{f"model.placement={kind}": several and whole for kind in TOGETHER},
        "trainer.recompute=true": not run.trainer.recompute,
        "features=stored trainer.eval_prompts=0": run.features.mode == "live",
        "trainer.optimizer=muon": run.trainer.optimizer == "adamw" and unsharded,
        "model.placement=offload": whole,
        "model.offload=disk": run.model.placement == "offload" and run.model.offload == "cpu",
        "model.quantize=int8": run.model.quantize is None,
        f"head.draft_vocab={PRUNED}": head.get("draft_vocab", PRUNED) is None,
        "head.lm_head=shared": head.get("lm_head") == "own",
        f"data.length={half} trainer.micro_tokens={half}": length > 512,
    }
    return [overrides for overrides, possible in options.items() if possible]
