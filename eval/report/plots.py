"""The five plots of a report, as Vega-Lite specifications: plain dicts with their data inside.

A plot is None if the report has no numbers for it. Results that failed a losslessness check are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eval.measures.results import BASELINE, LIVE
from eval.report.view import Record, Result, sweeps

Spec = dict[str, Any]

BAR = 26  # pixels of a horizontal bar, with its gap
TALL = 260
DIGITS = 4  # decimals of the data, which tooltips show
LINE = {"type": "line", "point": {"size": 60}}
NAME = {"field": "name", "type": "nominal", "title": None, "sort": None}


class Plot(NamedTuple):
    """A plot and its caption, which is also its description for screen readers."""

    caption: str
    spec: Spec


def plot(caption: str, data: Sequence[Spec], layers: Sequence[Spec], height: int = TALL, **more: Any) -> Plot | None:
    """Return a plot of layers over the same records, as wide as the page lets it; None without records."""
    rounded = [{k: round(v, DIGITS) if isinstance(v, float) else v for k, v in record.items()} for record in data]
    fit = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    spec = {"data": {"values": rounded}, "height": height, **fit, "layer": list(layers), **more}
    return Plot(caption, spec) if data else None


def layer(mark: str | Spec, **encoding: Any) -> Spec:
    """Return a layer of a mark with its encoding."""
    return {"mark": mark, "encoding": encoding}


def axis(field: str, title: str, **more: Any) -> Spec:
    """Return an axis of numbers."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def baseline(axis_name: str) -> Spec:
    """Return the dashed line at 1, the baseline's speedup."""
    return layer({"type": "rule", "strokeDash": [4, 4], "opacity": 0.6}, **{axis_name: {"datum": 1}})


def acceptance(results: Sequence[Result]) -> Plot | None:
    """Return P(a >= d) by depth."""
    data = [
        {"name": result.name, "depth": depth, "accepted": fraction, "of those that reach it": conditional}
        for result in results
        if result.overall and not result.failed
        for depth, (fraction, conditional) in enumerate(
            zip(result.row["accepted_by_depth"], result.row["conditional_by_depth"], strict=True), 1
        )
    ]
    x = axis("depth", "depth d", axis={"values": sorted({record["depth"] for record in data}), "format": "d"})
    line = layer(LINE, x=x, y=axis("accepted", "P(a ≥ d)", scale={"domain": [0, 1]}), color=NAME)
    return plot("Acceptance by depth: the share of target passes that accepted d drafted tokens or more", data, [line])


def speedup(results: Sequence[Result]) -> Plot | None:
    """Return the speedup of each drafter with its interval."""
    data = [_speedup(result.name, result) for result in results if result.overall and not result.failed]
    data = [record for record in data if record["speedup"] is not None and record["drafter"] != BASELINE]
    color = {**NAME, "field": "drafter", "legend": None}
    x, y = axis("speedup", "speedup", scale={"zero": True}), NAME
    interval = layer(
        {"type": "rule", "strokeWidth": 3}, x={**x, "field": "low"}, x2={"field": "high"}, y=y, color=color
    )
    point = layer({"type": "point", "filled": True, "size": 90, "opacity": 1}, x=x, y=y, color=color)
    caption = "Speedup by drafter with its 95% interval; the dashed line is the baseline"
    return plot(caption, data, [baseline("x"), interval, point], BAR * len(data))


def speedup_by_batch(results: Sequence[Result]) -> Plot | None:
    """Return the speedup over the batch size, where several were measured."""
    data = [
        _speedup(name, result) | {"batch size": result.row["batch_size"]}
        for name, curve in sweeps(results, "batch_size").items()
        for result in curve
    ]
    sizes = {"values": sorted({record["batch size"] for record in data}), "format": "d"}
    x = axis("batch size", "batch size", scale={"type": "log", "base": 2, "padding": 12}, axis=sizes)
    y = axis("speedup", "speedup", scale={"zero": True})
    ends = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    layers = [baseline("y"), layer({"type": "rule", "opacity": 0.5, "strokeWidth": 3}, x=x, color=NAME, **ends)]
    layers.append(layer(LINE, x=x, y=y, color=NAME))
    return plot("Speedup over the batch size with its 95% interval; the dashed line is the baseline", data, layers)


def _speedup(name: str, result: Result) -> Spec:
    """Return a speedup with the ends of its interval, both of them the number itself where it has none."""
    low, high = result.row["speedup_ci"] or (result.row["speedup"], result.row["speedup"])
    return {"name": name, "drafter": result.row["drafter"], "speedup": result.row["speedup"], "low": low, "high": high}


def time_of_pass(results: Sequence[Result]) -> Plot | None:
    """Return the milliseconds of a target pass with its draft, by activity."""
    data = [
        {"name": result.name, "activity": key, "order": order, "ms": 1000 * result.row["seconds"][key] / steps}
        for result in results
        if result.overall and (steps := result.row["steps"]) and result.row["tier"] == LIVE
        for order, key in enumerate(("verify", "draft", "other"))
    ]
    color, order = {**NAME, "field": "activity"}, {"field": "order", "type": "quantitative"}
    bars = layer("bar", y=NAME, x=axis("ms", "ms a pass"), color=color, order=order)
    return plot("Where the time of a target pass with its draft goes", data, [bars], BAR * len(data) // 3)


def learning_curve(curves: Mapping[str, Record]) -> Plot | None:
    """Return the loss of the heads' training, and τ by the verifier with its interval, over the steps."""
    losses = [
        {"name": f"{name}, loss", "step": step["step"], "loss": step["loss"]}
        for name, curve in curves.items()
        for step in curve["steps"]
        if step["loss"] is not None
    ]
    taus = [{**record, "name": f"{name}, τ"} for name, curve in curves.items() for record in curve["tau"]]
    x, y = axis("step", "step"), axis("tau", "τ", scale={"zero": False}, axis={"orient": "right", "grid": False})
    interval = layer({"type": "rule", "opacity": 0.5}, x=x, y={**y, "field": "low"}, y2={"field": "high"}, color=NAME)
    tau: Spec = {"layer": [interval, layer(LINE, x=x, y=y, color=NAME)]}
    loss = layer("line", x=x, y=axis("loss", "loss", scale={"zero": False}), color=NAME)
    layers = [
        {**one, "transform": [{"filter": {"field": field, "valid": True}}]}
        for field, one, records in (("loss", loss, losses), ("tau", tau, taus))
        if records
    ]
    caption = "Learning curve: the training loss, and τ by the verifier with its 95% interval"
    return plot(caption, [*losses, *taus], layers, resolve={"scale": {"y": "independent"}})
