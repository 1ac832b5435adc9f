"""A plan for the terminal: what a run takes, what lies where, and what to change where it does not fit."""

from itertools import groupby
from typing import Any

from rich.console import Group
from rich.table import Table

from train.config import RunConfig
from train.planning.advice import Advice
from train.planning.device import GIB
from train.planning.plan import Place


def table(run: RunConfig, planned: dict[str, Any], changes: list[Advice]) -> Group:
    """Return the plan for the terminal."""
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
    parts: list[Any] = [shown, *(place_table(names, place) for names, place in grouped(planned["places"]))]
    if planned["host"] is not None:
        host = Table(title="host memory of each node", show_header=False, min_width=60)
        for name, size in planned["host"].resident.items():
            host.add_row(name, gib(size.total))
        parts.append(host)
    return Group(*parts, *verdict(planned, changes))


def time_lines(planned: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how long it takes, and what that rests on."""
    device = planned["device"]
    if "gpu_hours" not in planned:
        return [("hours", f"not known: device={device['name']} has no peak; give device.tflops")]
    what = f"at an assumed {device['mfu']:.0%} of {device['tflops']:g} TFLOP/s ({device['name']})"
    lines = [(f"GPU hours, {what}", f"{planned['gpu_hours']:,.1f}"), ("hours", f"{planned['hours']:,.1f}")]
    if "gpu_hours_of_extraction" in planned:
        lines.append(("GPU hours of the extraction, elsewhere", f"{planned['gpu_hours_of_extraction']:,.1f}"))
    return lines


def grouped(places: list[Place]) -> list[tuple[str, Place]]:
    """Return places that hold the same once, with the names of all of them."""
    found: dict[str, list[Place]] = {}
    for place in places:
        found.setdefault(repr((place.held, place.capacity)), []).append(place)
    return [(named(alike), alike[0]) for alike in found.values()]


def named(places: list[Place]) -> str:
    """Return what places are called: nodes, and the devices of each."""
    words = []
    for node, alike in groupby(places, key=lambda place: place.node):
        numbers = [place.device for place in alike]
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        words.append(f"node {node} device {span}")
    return ", ".join(words)


def place_table(names: str, place: Place) -> Table:
    """Return what a device holds."""
    says = "fits" if place.fits else "does NOT fit"
    shown = Table(title=f"{names}: {gib(place.peak)} of {gib(place.capacity)}, {says}", show_header=False, min_width=60)
    shown.add_column(overflow="fold")
    shown.add_column(justify="right")
    for name, size in place.held.resident.items():
        shown.add_row(name, gib(size.total))
    for stage, parts in place.held.stages.items():
        shown.add_row(f"while: {stage}", gib(sum(size.total for size in parts.values())), style="bold")
        for name, size in parts.items():
            shown.add_row(f"  {name}", gib(size.total))
    return shown


def verdict(planned: dict[str, Any], changes: list[Advice]) -> list[str]:
    """Return whether it fits, and what to change first where it does not."""
    if planned["fits"]:
        return ["it fits"]
    lines = ["it does not fit; what to change, the largest saving on the fullest device first:"]
    for each in changes:
        lines.append(f"  {each.overrides}: saves {gib(each.saves)}{', and it fits' if each.fits else ''}")
    if not any(each.fits for each in changes):
        lines.append("  this is not enough: take more or larger devices, or another head")
    return lines


def gib(size: int | float) -> str:
    """Return bytes for people."""
    return f"{size / GIB:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.1f} MiB"


def preset_row(planned: dict[str, Any]) -> str:
    """Return the plan as cells of a Markdown row."""
    places, device = planned["places"], planned["device"]
    nodes = len({place.node for place in places})
    fullest = max(places, key=lambda place: place.peak)
    sizes = " / ".join(f"{planned[f'{part}_parameters'] / 1e9:.2f}" for part in ("target", "active", "head"))
    extraction = planned.get("gpu_hours_of_extraction")
    apart = "" if extraction is None else f" (+ {extraction:,.0f} of extraction)"
    cells = [
        f"{nodes} x {len(places) // nodes} {device['name']}",
        sizes,
        f"{fullest.peak / GIB:.1f} of {fullest.capacity / GIB:.1f}",
        "yes" if planned["fits"] else "no",
        f"{planned['gpu_hours']:,.1f}{apart}",
        f"{planned['hours']:,.1f}",
    ]
    return " | ".join(cells)
