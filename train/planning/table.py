"""A plan as tables for the terminal: totals, the memory of each device, and the advice if it does not fit."""

from itertools import groupby
from typing import Any

from rich.console import Group
from rich.table import Table

from train.config import RunConfig
from train.planning.advice import Advice
from train.planning.device import GIB
from train.planning.plan import DeviceMemory


def table(run: RunConfig, planned: dict[str, Any], changes: list[Advice]) -> Group:
    """Return the plan as tables for the terminal."""
    shown = Table(title=f"plan: {run.name} -> {run.out}", show_header=False, min_width=60)
    shown.add_column(overflow="fold")
    shown.add_column(justify="right")
    for name in ("target_parameters", "active_parameters", "head_parameters", "trained_parameters", "steps", "tokens"):
        shown.add_row(name.replace("_", " "), f"{planned[name]:,}")
    for name, size in planned["disk"].items():
        shown.add_row(f"disk: {name}", gib(size))
    shown.add_row("operations, target and head", f"{planned['target_flops']:.2g} + {planned['head_flops']:.2g}")
    for line in time_lines(planned):
        shown.add_row(*line)
    parts: list[Any] = [shown, *(memory_table(names, memory) for names, memory in grouped(planned["devices"]))]
    if planned["host"] is not None:
        host = Table(title="host memory of each node", show_header=False, min_width=60)
        for name, size in planned["host"].resident.items():
            host.add_row(name, gib(size.total))
        parts.append(host)
    return Group(*parts, *verdict(planned, changes))


def time_lines(planned: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the hours, and of the assumed efficiency."""
    device = planned["device"]
    if "gpu_hours" not in planned:
        return [("hours", f"not known: device={device['name']} has no peak; give device.tflops")]
    what = f"at an assumed {device['mfu']:.0%} of {device['tflops']:g} TFLOP/s ({device['name']})"
    lines = [(f"GPU hours, {what}", f"{planned['gpu_hours']:,.1f}"), ("hours", f"{planned['hours']:,.1f}")]
    if "gpu_hours_of_extraction" in planned:
        lines.append(("GPU hours of the extraction, elsewhere", f"{planned['gpu_hours_of_extraction']:,.1f}"))
    return lines


def grouped(devices: list[DeviceMemory]) -> list[tuple[str, DeviceMemory]]:
    """Return one of each set of devices with equal memory, with the names of all of the set."""
    equal: dict[str, list[DeviceMemory]] = {}
    for memory in devices:
        equal.setdefault(repr((memory.held, memory.capacity)), []).append(memory)
    return [(device_names(group), group[0]) for group in equal.values()]


def device_names(devices: list[DeviceMemory]) -> str:
    """Return the names of devices: nodes, and the range of devices of each."""
    words = []
    for node, group in groupby(devices, key=lambda memory: memory.node):
        numbers = [memory.device for memory in group]
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        words.append(f"node {node} device {span}")
    return ", ".join(words)


def memory_table(names: str, memory: DeviceMemory) -> Table:
    """Return the memory of a device as a table."""
    fit = "fits" if memory.fits else "does NOT fit"
    title = f"{names}: {gib(memory.peak)} of {gib(memory.capacity)}, {fit}"
    shown = Table(title=title, show_header=False, min_width=60)
    shown.add_column(overflow="fold")
    shown.add_column(justify="right")
    for name, size in memory.held.resident.items():
        shown.add_row(name, gib(size.total))
    for stage, sizes in memory.held.stages.items():
        shown.add_row(f"while: {stage}", gib(sum(size.total for size in sizes.values())), style="bold")
        for name, size in sizes.items():
            shown.add_row(f"  {name}", gib(size.total))
    return shown


def verdict(planned: dict[str, Any], changes: list[Advice]) -> list[str]:
    """Return lines that say whether the run fits, and the advice if it does not."""
    if planned["fits"]:
        return ["it fits"]
    lines = ["it does not fit; what to change, the largest saving on the fullest device first:"]
    for change in changes:
        lines.append(f"  {change.overrides}: saves {gib(change.saves)}{', and it fits' if change.fits else ''}")
    if not any(change.fits for change in changes):
        lines.append("  this is not enough: take more or larger devices, or another head")
    return lines


def gib(size: int | float) -> str:
    """Format bytes in GiB or MiB."""
    return f"{size / GIB:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.1f} MiB"


def preset_row(planned: dict[str, Any]) -> str:
    """Return the plan as cells of a Markdown row."""
    devices, device = planned["devices"], planned["device"]
    nodes = len({memory.node for memory in devices})
    fullest = max(devices, key=lambda memory: memory.peak)
    sizes = " / ".join(f"{planned[f'{kind}_parameters'] / 1e9:.2f}" for kind in ("target", "active", "head"))
    extraction = planned.get("gpu_hours_of_extraction")
    apart = "" if extraction is None else f" (+ {extraction:,.0f} of extraction)"
    cells = [
        f"{nodes} x {len(devices) // nodes} {device['name']}",
        sizes,
        f"{fullest.peak / GIB:.1f} of {fullest.capacity / GIB:.1f}",
        "yes" if planned["fits"] else "no",
        f"{planned['gpu_hours']:,.1f}{apart}",
        f"{planned['hours']:,.1f}",
    ]
    return " | ".join(cells)
