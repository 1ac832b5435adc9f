"""The page's plots, as Vega-Lite specifications: plain dicts with their data inside.

Each function returns the plots that a report has numbers for.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from eval.measures.results import LIVE
from eval.report.breakdown import COSTS, PLAIN, SESSION, STAGES
from eval.report.columns import PERCENTILES
from eval.report.view import Record, results_of

Spec = dict[str, Any]
Records = list[dict[str, Any]]

BAR = 26  # pixels of a horizontal bar, with its gap
TALL = 260
KINDS = {"N": "nominal", "O": "ordinal", "Q": "quantitative"}
LOG = {"type": "log", "base": 2}
UNIT = {"domain": [0, 1]}
LINE = {"type": "line", "point": {"size": 60}}


class Plot(NamedTuple):
    """A plot under its caption, which also says to who cannot see it what it shows."""

    caption: str
    spec: Spec


def plot(caption: str, data: Records, layers: Sequence[Spec], height: int = TALL) -> list[Plot]:
    """Return a plot of layers over the same records, as wide as the page lets it; none without records."""
    spec = {
        "data": {"values": data},
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "layer": list(layers),
    }
    return [Plot(caption, spec)] if data else []


def layer(type_: str | Spec, **encoding: Any) -> Spec:
    """Return a layer of a Vega-Lite type, or of one with further properties."""
    return {"mark": {"type": type_} if isinstance(type_, str) else type_, "encoding": encoding}


def reference(axis_name: str) -> Spec:
    """Return the dashed line at 1, where the baseline is on an axis."""
    return layer({"type": "rule", "strokeDash": [4, 4], "opacity": 0.6}, **{axis_name: {"datum": 1}})


def axis(field: str, title: str | None, **more: Any) -> Spec:
    """Return an axis of numbers."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def by_name(field: str = "name", **more: Any) -> Spec:
    """Return an axis or colours of names, in the rows' order."""
    return {"field": field, "type": "nominal", "title": None, "sort": None, **more}


def ticks(values: Sequence[int | float], form: str = "d") -> Spec:
    """Return an axis with a tick at every one of these values, whole numbers unless `form` is another format."""
    return {"values": list(values), "format": form}


def ticked(field: str, title: str, data: Records, form: str = "d", **more: Any) -> Spec:
    """Return an axis of numbers with a tick at every one in the data."""
    return axis(field, title, axis=ticks(sorted({record[field] for record in data}), form), **more)


def tooltip(*fields: str) -> list[Spec]:
    """Return the encodings of a tooltip, from fields such as `name:N`, `share:Q .3f` and `share:Q .3f title`."""
    encodings = []
    for text in fields:
        field, how = text.split(":", maxsplit=1)
        kind, *more = how.split(" ", maxsplit=2)
        given = {key: value for key, value in zip(("format", "title"), more, strict=False) if value}
        encodings.append({"field": field, "type": KINDS[kind], **given})
    return encodings


def curve(x: Spec, y: Spec, *fields: str, mark: str | Spec = LINE, **more: Any) -> Spec:
    """Return a layer with a line for each name, with the fields of its tooltip."""
    return layer(mark, x=x, y=y, color=by_name(), tooltip=tooltip("name:N", *fields), **more)


def spans(along: str, axes: Spec, mark: Spec, *fields: str, **more: Any) -> list[Spec]:
    """Return a layer of intervals from the field `low` to `high` along one of the axes, and one of marks over them."""
    encoding = {along: {**axes[along], "field": "low"}, f"{along}2": {"field": "high"}}
    intervals = layer({"type": "rule", "strokeWidth": 3, **more}, **{**axes, **encoding})
    return [intervals, layer(mark, **axes, tooltip=tooltip("name:N", *fields))]


def stacked(caption: str, data: Records, x: Spec, field: str, *layers: Spec, **more: Any) -> list[Plot]:
    """Return a plot with a bar for each name, made of parts, with a field of its tooltip."""
    bars = layer("bar", y=by_name(), x=x, tooltip=tooltip("name:N", "part:N", field), **more)
    return plot(caption, data, [bars, *layers], height_of(data))


def height_of(data: Records) -> int:
    """Return the height of a plot with a bar for each name."""
    return BAR * len({record["name"] for record in data})


def interval(row: Record, key: str) -> dict[str, float]:
    """Return the ends of a number's interval, which is the number itself where it has none."""
    low, high = row[f"{key}_ci"] or (row[key], row[key])
    return {"low": low, "high": high}


def with_intervals(report: Record, key: str, title: str) -> list[Plot]:
    """Return a number of each row as a point, its interval as a line through it; nothing for a single row."""
    data: Records = [
        {"name": name, "drafter": row["drafter"], "value": row[key], **interval(row, key)}
        for name, row in named(report)
        if row[key] is not None
    ]
    x = axis("value", title, scale={"zero": True})
    axes = {"y": by_name(), "x": x, "color": by_name("drafter", legend=None)}
    point = {"type": "point", "filled": True, "size": 90, "opacity": 1}
    layers = [reference("x"), *spans("x", axes, point, "value:Q .3f", "low:Q .3f", "high:Q .3f")]
    caption = f"Each row's {title} with its 95% interval; the dashed line is the baseline"
    return plot(caption, data, layers, height_of(data)) if len(data) > 1 else []


def named(report: Record) -> Iterator[tuple[str, Record]]:
    """Yield each row with its name, those that failed a check left out: a plot cannot grey out a claim."""
    return ((result.name, result.row) for result in results_of(report) if not result.failed)


def clocked(report: Record) -> Record:
    """Return a report with its rows of the live tier alone; where it was not asked for, with all."""
    return {**report, "rows": [result.row for result in results_of(report) if result.clocked]}


def acceptance(report: Record) -> list[Plot]:
    """Return P(a >= d) by depth."""
    data: Records = [
        {"name": record.name, "depth": depth, "share": fraction, "after": record.row["conditional_by_depth"][depth - 1]}
        for record in results_of(clocked(report))
        for depth, fraction in enumerate(record.row["accepted_by_depth"], 1)
    ]
    x, y = ticked("depth", "depth d", data), axis("share", "P(a ≥ d)", scale=UNIT)
    line = curve(x, y, "depth:Q", "share:Q .3f P(a ≥ d)", "after:Q .3f P(a ≥ d | a ≥ d - 1)")
    return plot("The share of target passes that accepted d drafted tokens or more", data, [line])


def against(report: Record, key: str, title: str) -> list[Plot]:
    """Return the speedup against the batch size, the temperature or the request rate, where there are several."""
    timed = clocked(report)
    if len({row[key] for row in timed["rows"] if row.get(key) is not None}) < 2:
        return []
    data: Records = [
        {"name": name, "x": row[key], "speedup": row["speedup"], **interval(row, "speedup")}
        for name, row in lines(timed, key)
        if row["speedup"] is not None and row["drafter"] != PLAIN
    ]
    scale = {"nice": False, "padding": 12, **(LOG if key != "temperature" else {})}
    x, y = ticked("x", title, data, "~g", scale=scale), axis("speedup", "speedup", scale={"zero": True})
    fields = (f"x:Q  {title}", "speedup:Q .3f", "low:Q .3f", "high:Q .3f")
    layers = [reference("y"), *spans("y", {"x": x, "y": y, "color": by_name()}, LINE, *fields, opacity=0.5)]
    what = "Speedup, one of mean latencies," if key == "request_rate" else "Speedup"
    return plot(f"{what} against the {title}, with 95% intervals; the dashed line is the baseline", data, layers)


def lines(report: Record, key: str) -> Iterator[tuple[str, Record]]:
    """Yield the lossless rows with a value of the key, each with its line's name: what tells it apart but the key."""
    others = [other for other in SESSION if other != key and len({str(row.get(other)) for row in report["rows"]}) > 1]
    for _, row in named(report):
        if row.get(key) is not None:
            parts = [(other.replace("_", " "), row[other]) for other in others if row.get(other) not in (None, "")]
            texts = (f"{name} {f'{value:g}' if isinstance(value, float) else value}" for name, value in parts)
            yield ", ".join([row["drafter"], *texts]), row


def latencies(report: Record) -> list[Plot]:
    """Return the median and the 95th percentile of the latency against the rate, where there are several."""
    data: Records = [
        {"name": name, "rate": row["request_rate"], "mark": mark, "latency": row["by_request"]["latency_s"][mark]}
        for name, row in lines(report, "request_rate")
        for mark in PERCENTILES
    ]
    line = curve(
        ticked("rate", "requests a second", data, "~g", scale=LOG),
        axis("latency", "latency, s", scale={"type": "log"}),
        *("mark:N", "rate:Q  requests a second", "latency:Q .3f latency, s"),
        strokeDash={"field": "mark", "type": "nominal", "title": None, "legend": {"symbolType": "stroke"}},
    )
    caption = "Latency from the arrival to the last token against the rate of requests, median and 95th percentile"
    return plot(caption, data, [line]) if len({record["rate"] for record in data}) > 1 else []


def time_split(report: Record) -> list[Plot]:
    """Return the milliseconds of a step by part."""
    data: Records = [
        {"name": name, "part": key, "order": order, "ms": 1000 * row["seconds"][key] / row["steps"]}
        for name, row in ((result.name, result.row) for result in results_of(report))
        for order, key in enumerate(("verify", "draft", "other"))
        if row["steps"] and row["tier"] == LIVE
    ]
    x, order = axis("ms", "ms a step"), tooltip("order:Q")[0]
    caption = "Where the time of a step goes, a step being a target pass with its draft"
    return stacked(caption, data, x, "ms:Q .2f", order=order, color=by_name("part"))


def breakdown(report: Record) -> list[Plot]:
    """Return a bar as long as τ for each row: the speedup, and the loss to each cost."""
    data: Records = []
    for name, row in named(report):
        if row.get("ladder") is not None:
            left = [row["ladder"]["rungs"][stage] for stage in STAGES]
            data.append({"name": name, "part": "speedup", "low": 0, "high": left[-1], "size": left[-1]})
            for cost, high, low in reversed(list(zip(COSTS, left, left[1:], strict=False))):
                if high > low:  # else nothing is lost to it
                    data.append({"name": name, "part": f"lost to {cost}", "low": low, "high": high, "size": high - low})
    order = ["speedup", *(f"lost to {cost}" for cost in reversed(COSTS))]
    x, caption = axis("low", "times the baseline; the whole bar is τ"), "What became of τ on the way to the speedup"
    color = by_name("part", scale={"domain": order})
    return stacked(caption, data, x, "size:Q .3f", reference("x"), x2={"field": "high"}, color=color)


def training(report: Record) -> list[Plot]:
    """Return the curves of the heads' training: the loss, the accuracy by depth, and τ with its interval."""
    curves = report.get("training", {})
    steps = [(name, step) for name, curve in curves.items() for step in curve["steps"]]
    loss: Records = [{"name": name, "step": step["step"], "loss": step["loss"]} for name, step in steps]
    accuracy: Records = [
        {"name": f"{name}, depth {d}" if len(curves) > 1 else f"depth {d}", "step": step["step"], "share": fraction}
        for name, step in steps
        for d, fraction in enumerate(step["accuracy"], 1)
    ]
    taus: Records = [{"name": name, **record} for name, curve in curves.items() for record in curve["tau"]]
    x, y = axis("step", "step"), axis("tau", "τ", scale={"zero": False})
    axes = {"x": x, "y": y, "color": by_name()}
    losses = curve(x, axis("loss", "loss"), "step:Q", "loss:Q .3f", mark="line")
    accuracies = curve(x, axis("share", "accuracy", scale=UNIT), "step:Q", "share:Q .3f", mark="line")
    return [
        *plot("Training loss, means over stretches of steps", loss, [losses]),
        *plot("Accuracy of the drafts in training, by depth", accuracy, [accuracies]),
        *plot(
            "τ by the verifier while the head was trained, with its 95% interval",
            taus,
            spans("y", axes, LINE, "step:Q", "tau:Q .3f", strokeWidth=2, opacity=0.5),
        ),
    ]


def trees(report: Record) -> list[Plot]:
    """Return τ and the predicted speedup of every tree against the nodes that it drafts: the view at equal budget."""
    plots = []
    for name, record in report.get("other_trees", {}).items():
        for key, title in (("tau", "τ"), ("speedup", "predicted speedup")):
            data: Records = [dict(tree) for tree in record["trees"] if tree[key] is not None]
            dots = layer(
                {"type": "point", "size": 45},
                x=axis("nodes", "drafted nodes a step"),
                y=axis(key, title, scale={"zero": False}),
                color=by_name("family"),
                shape=by_name("family"),
                tooltip=tooltip("family:N", "tree:N", "nodes:Q .2f", "tau:Q .2f", "speedup:Q .2f"),
            )
            plots += plot(f"{name}: {title} of every tree by the nodes it drafts", data, [dots])
    return plots


def loads(report: Record) -> list[Plot]:
    """Return the predicted speedups by batch size of each head's own tree, and of the best for each size."""
    data: Records = [
        {"name": f"{name}, {whose}", "batch": load["batch_size"], "tree": tree, "speedup": load[key]}
        for name, record in report.get("other_trees", {}).items()
        for load in record.get("loads", [])
        for key, whose, tree in (("own", "its own tree", ""), ("best", "best tree", load["tree"]))
        if load[key] is not None
    ]
    x = ticked("batch", "batch size", data, scale=LOG)
    y = axis("speedup", "predicted speedup", scale={"zero": True})
    line = curve(x, y, "tree:N", "batch:Q", "speedup:Q .2f")
    caption = "Predicted speedup by batch size; where a line falls below the dashed one, speculation no longer pays"
    return plot(caption, data, [reference("y"), line]) if len({record["batch"] for record in data}) > 1 else []


def along(report: Record) -> list[Plot]:
    """Return acceptance by depth and rank of each head, and n-alpha with P(a >= k) of chains after every token."""
    records = report.get("teacher_forced", {})
    curves: Records = [
        {"name": f"{name}, {called}", "depth": depth, "share": fraction}
        for name, record in records.items()
        for called, key in (("n-alpha", "n_alpha"), ("P(a≥k)", "at_every_token"))
        for depth, fraction in enumerate(record[key], 1)
    ]
    line = curve(ticked("depth", "depth", curves), axis("share", "share", scale=UNIT), "depth:Q", "share:Q .3f")
    plots = [plot for name, record in records.items() for plot in _heat(name, record)]
    return plots + plot("n-alpha by depth n + 1, and P(a≥k) of a chain after every token", curves, [line])


def _heat(name: str, record: Record) -> list[Plot]:
    """Return the share of tokens by depth and rank as squares with their numbers."""
    cells: Records = [
        {"depth": depth, "rank": rank, "share": fraction}
        for depth, row in enumerate(record["rank"], 1)
        for rank, fraction in enumerate(row, 1)
    ]
    x, y = ({"field": field, "type": "ordinal", "axis": {"labelAngle": 0}} for field in ("rank", "depth"))
    shade = {"field": "share", "type": "quantitative", "scale": {**UNIT, "range": [0, 0.8]}, "legend": None}
    square = layer("rect", x=x, y=y, opacity=shade, tooltip=tooltip("depth:O", "rank:O", "share:Q .3f"))
    number = layer({"type": "text", "fontSize": 10}, x=x, y=y, text=tooltip("share:Q .2f")[0])
    caption = f"{name}: the share of the text's tokens by depth and rank of the guess"
    return plot(caption, cells, [square, number], 30 * len(record["rank"]))
