"""The page's plots of results, as Vega-Lite specifications: plain dicts with their data inside."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eval.measures.results import LIVE
from eval.report.breakdown import COSTS, PLAIN, STAGES
from eval.report.columns import PERCENTILES
from eval.report.view import Record, results_of

Spec = dict[str, Any]
Records = list[dict[str, Any]]

VARYING = (
    "report",
    "workload",
    "category",
    "temperature",
    "batch_size",
    "request_rate",
)  # values that distinguish sessions
BAR = 26  # pixels of a horizontal bar, with its gap
TALL = 260
KINDS = {"N": "nominal", "O": "ordinal", "Q": "quantitative"}
LOG = {"type": "log", "base": 2}
UNIT = {"domain": [0, 1]}
LINE = {"type": "line", "point": {"size": 60}}


@dataclass(frozen=True)
class Plot:
    """A plot under its caption, which also says to who cannot see it what it shows."""

    caption: str
    spec: Spec


def plot(caption: str, data: Records, layers: Sequence[Spec], height: int = TALL) -> Plot:
    """Return a plot of layers over the same records, as wide as the page lets it."""
    spec = {
        "data": {"values": data},
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "layer": list(layers),
    }
    return Plot(caption, spec)


def layer(type_: str | Spec, **encoding: Any) -> Spec:
    """Return a layer of a Vega-Lite type, or of one with further properties."""
    return {"mark": {"type": type_} if isinstance(type_, str) else type_, "encoding": encoding}


def reference(axis_name: str) -> Spec:
    """Return the dashed line at 1, where the baseline is on an axis."""
    return layer({"type": "rule", "strokeDash": [4, 4], "opacity": 0.6}, **{axis_name: {"datum": 1}})


def axis(field: str, title: str | None, kind: str = "quantitative", **more: Any) -> Spec:
    """Return an axis of numbers, or of names in the rows' order."""
    encoding = {"field": field, "type": kind, "title": title}
    return {**encoding, **({"sort": None} if kind == "nominal" else {}), **more}


def whole(last: int, first: int = 1) -> Spec:
    """Return an axis with a tick at every whole number."""
    return {"values": list(range(first, last + 1)), "format": "d"}


def colour(field: str = "name", **more: Any) -> Spec:
    """Return the colour of a name."""
    return {"field": field, "type": "nominal", "title": None, "sort": None, **more}


def tooltip(*fields: str) -> list[Spec]:
    """Return the encodings of a tooltip, from fields such as `name:N`, `share:Q .3f` and `share:Q .3f title`."""
    encodings = []
    for text in fields:
        field, how = text.split(":", maxsplit=1)
        kind, *more = how.split(" ", maxsplit=2)
        given = {key: value for key, value in zip(("format", "title"), more, strict=False) if value}
        encodings.append({"field": field, "type": KINDS[kind], **given})
    return encodings


def bar(along: str, axes: Spec, **more: Any) -> Spec:
    """Return a layer of intervals from the field `low` to `high`, along one of the axes."""
    encoding = {along: {**axes[along], "field": "low"}, f"{along}2": {"field": "high"}}
    return layer({"type": "rule", "strokeWidth": 3, **more}, **{**axes, **encoding})


def with_intervals(report: Record, key: str, title: str) -> Plot | None:
    """Return a number of each row as a point, its interval as a line through it."""
    data: Records = []
    for name, row in named(report):
        if row[key] is not None:
            low, high = row[f"{key}_ci"] or (row[key], row[key])
            data.append({"name": name, "drafter": row["drafter"], "value": row[key], "low": low, "high": high})
    if len(data) < 2:
        return None
    axes = {
        "y": axis("name", None, "nominal"),
        "x": axis("value", title, scale={"zero": True}),
        "color": colour("drafter", legend=None),
    }
    tip = tooltip("name:N", "value:Q .3f", "low:Q .3f", "high:Q .3f")
    point = {"type": "point", "filled": True, "size": 90, "opacity": 1}
    layers = [reference("x"), bar("x", axes), layer(point, **axes, tooltip=tip)]
    caption = f"Each row's {title} with its 95% interval; the dashed line is the baseline"
    return plot(caption, data, layers, bars(data))


def named(report: Record) -> Iterator[tuple[str, Record]]:
    """Yield each row with its name, those that failed a check left out: a plot cannot grey out a claim."""
    return ((result.name, result.row) for result in results_of(report) if not result.failed)


def clocked(report: Record) -> Record:
    """Return a report with its rows of the live tier alone; where it was not asked for, with all."""
    return {**report, "rows": [result.row for result in results_of(report) if result.clocked]}


def bars(data: Records) -> int:
    """Return the height of a plot with a bar a name."""
    return BAR * len({record["name"] for record in data})


def acceptance(report: Record) -> Plot | None:
    """Return P(a >= d) by depth."""
    data = [
        {"name": record.name, "depth": depth, "share": fraction, "after": record.row["conditional_by_depth"][depth - 1]}
        for record in results_of(clocked(report))
        for depth, fraction in enumerate(record.row["accepted_by_depth"], 1)
    ]
    if not data:
        return None
    line = layer(
        LINE,
        x=axis("depth", "depth d", axis=whole(max(record["depth"] for record in data))),
        y=axis("share", "P(a ≥ d)", scale=UNIT),
        color=colour(),
        tooltip=tooltip("name:N", "depth:Q", "share:Q .3f P(a ≥ d)", "after:Q .3f P(a ≥ d | a ≥ d - 1)"),
    )
    return plot("The share of target passes that accepted d drafted tokens or more", data, [line])


def against(report: Record, key: str, title: str) -> Plot | None:
    """Return the speedup against the batch size, the temperature or the request rate, where there are several."""
    timed = clocked(report)
    if len({row[key] for row in timed["rows"] if row.get(key) is not None}) < 2:
        return None
    data: Records = []
    for name, row in lines(timed, key):
        if row["speedup"] is not None and row["drafter"] != PLAIN:
            low, high = row["speedup_ci"] or (row["speedup"], row["speedup"])
            data.append({"name": name, "x": row[key], "speedup": row["speedup"], "low": low, "high": high})
    if not data:
        return None
    scale = {"nice": False, "padding": 12, **(LOG if key != "temperature" else {})}
    axes = {
        "x": axis("x", title, axis={"values": sorted({record["x"] for record in data}), "format": "~g"}, scale=scale),
        "y": axis("speedup", "speedup", scale={"zero": True}),
        "color": colour(),
    }
    tip = tooltip("name:N", f"x:Q  {title}", "speedup:Q .3f", "low:Q .3f", "high:Q .3f")
    layers = [reference("y"), bar("y", axes, opacity=0.5), layer(LINE, **axes, tooltip=tip)]
    what = "Speedup, one of mean latencies," if key == "request_rate" else "Speedup"
    return plot(f"{what} against the {title}, with 95% intervals; the dashed line is the baseline", data, layers)


def lines(report: Record, key: str) -> Iterator[tuple[str, Record]]:
    """Yield the rows that have a value of the key, each with the name of its line: what tells it from others but that.

    Those that failed a check are left out.
    """
    others = [other for other in VARYING if other != key and len({str(row.get(other)) for row in report["rows"]}) > 1]
    for _, row in named(report):
        if row.get(key) is not None:
            parts = [(other, row[other]) for other in others if row.get(other) not in (None, "")]
            texts = (
                f"{other.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}"
                for other, value in parts
            )
            yield ", ".join([row["drafter"], *texts]), row


def latencies(report: Record) -> Plot | None:
    """Return the median and the 95th percentile of the latency against the rate, where there are several."""
    data: Records = [
        {
            "name": name,
            "rate": row["request_rate"],
            "mark": percentile,
            "latency": row["by_request"]["latency_s"][percentile],
        }
        for name, row in lines(report, "request_rate")
        for percentile in PERCENTILES
    ]
    rates = sorted({record["rate"] for record in data})
    if len(rates) < 2:
        return None
    line = layer(
        LINE,
        x=axis("rate", "requests a second", axis={"values": rates, "format": "~g"}, scale=LOG),
        y=axis("latency", "latency, s", scale={"type": "log"}),
        color=colour(),
        strokeDash={"field": "mark", "type": "nominal", "title": None, "legend": {"symbolType": "stroke"}},
        tooltip=tooltip("name:N", "mark:N", "rate:Q  requests a second", "latency:Q .3f latency, s"),
    )
    caption = "Latency from the arrival to the last token against the rate of requests, median and 95th percentile"
    return plot(caption, data, [line])


def time_split(report: Record) -> Plot | None:
    """Return the milliseconds of a step by part."""
    data = [
        {
            "name": result.name,
            "part": name,
            "order": order,
            "ms": 1000 * result.row["seconds"][name] / result.row["steps"],
        }
        for result in results_of(report)
        for order, name in enumerate(("verify", "draft", "other"))
        if result.row["steps"] and result.row["tier"] == LIVE
    ]
    if not data:
        return None
    stacked = layer(
        "bar",
        y=axis("name", None, "nominal"),
        x=axis("ms", "ms a step"),
        order={"field": "order", "type": "quantitative"},
        color=colour("part"),
        tooltip=tooltip("name:N", "part:N", "ms:Q .2f"),
    )
    caption = "Where the time of a step goes, a step being a target pass with its draft"
    return plot(caption, data, [stacked], bars(data))


def breakdown(report: Record) -> Plot | None:
    """Return a bar as long as τ for each row: the speedup, and the loss to each cost."""
    data: Records = []
    for name, row in named(report):
        if row.get("ladder") is not None:
            left = [row["ladder"]["rungs"][stage] for stage in STAGES]
            data.append({"name": name, "part": "speedup", "low": 0, "high": left[-1], "size": left[-1]})
            for cost, high, low in reversed(list(zip(COSTS, left, left[1:], strict=False))):
                data.append({"name": name, "part": f"lost to {cost}", "low": low, "high": high, "size": high - low})
    if not data:
        return None
    order = ["speedup", *(f"lost to {cost}" for cost in reversed(COSTS))]
    stacked = layer(
        "bar",
        y=axis("name", None, "nominal"),
        x=axis("low", "times the baseline; the whole bar is τ"),
        x2={"field": "high"},
        color=colour("part", scale={"domain": order}),
        tooltip=tooltip("name:N", "part:N", "size:Q .3f"),
    )
    return plot("What became of τ on the way to the speedup", data, [stacked, reference("x")], bars(data))


def training(report: Record) -> list[Plot]:
    """Return the curves of the heads' training: the loss, the accuracy by depth, and τ with its interval."""
    curves = report.get("training", {})
    steps = [(name, step) for name, curve in curves.items() for step in curve["steps"]]
    loss = [{"name": name, "step": step["step"], "loss": step["loss"]} for name, step in steps]
    accuracy = [
        {"name": f"{name}, depth {d}" if len(curves) > 1 else f"depth {d}", "step": step["step"], "share": fraction}
        for name, step in steps
        for d, fraction in enumerate(step["accuracy"], 1)
    ]
    taus = [{"name": name, **record} for name, curve in curves.items() for record in curve["tau"]]
    axes = {"x": axis("step", "step"), "y": axis("tau", "τ", scale={"zero": False}), "color": colour()}
    plots_by_caption = {
        "Training loss, means over stretches of steps": (loss, [over_steps("line", "loss", "loss")]),
        "Accuracy of the drafts in training, by depth": (
            accuracy,
            [over_steps("line", "share", "accuracy", scale=UNIT)],
        ),
        "τ by the verifier while the head was trained, with its 95% interval": (
            taus,
            [
                bar("y", axes, strokeWidth=2, opacity=0.5),
                over_steps(LINE, "tau", "τ", scale={"zero": False}),
            ],
        ),
    }
    return [plot(caption, data, layers) for caption, (data, layers) in plots_by_caption.items() if data]


def over_steps(type_: str | Spec, field: str, title: str, **more: Any) -> Spec:
    """Return a line over the training steps."""
    tip = tooltip("name:N", "step:Q", f"{field}:Q .3f")
    return layer(type_, x=axis("step", "step"), y=axis(field, title, **more), color=colour(), tooltip=tip)
