"""The page's plots of the rows, as Vega-Lite specifications: plain dicts with their data inside."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eval.measures.results import LIVE
from eval.report.breakdown import COSTS, PLAIN, RUNGS
from eval.report.page.names import Told, clocked, red, row_names

Spec = dict[str, Any]
Records = list[dict[str, Any]]

VARYING = ("report", "workload", "category", "temperature", "batch_size", "request_rate")  # what tells sessions apart
BAR = 26  # pixels of a horizontal bar, with its gap
TALL = 260


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


def axis(field: str, title: str | None, kind: str = "quantitative", **more: Any) -> Spec:
    """Return an axis of numbers, or of names in the rows' order."""
    own = {"field": field, "type": kind, "title": title}
    return {**own, **({"sort": None} if kind == "nominal" else {}), **more}


def whole(last: int, first: int = 1) -> Spec:
    """Return an axis with a tick at every whole number."""
    return {"values": list(range(first, last + 1)), "format": "d"}


def colour(field: str = "name", **more: Any) -> Spec:
    """Return the colour of a name."""
    return {"field": field, "type": "nominal", "title": None, "sort": None, **more}


def named(told: Told) -> Iterator[tuple[str, Told]]:
    """Yield each row with its name, those behind a red gate left out: a plot cannot grey out a claim."""
    for name, row in zip(row_names(told["rows"]), told["rows"], strict=True):
        if not red(row, told["settings"]):
            yield name, row


def with_intervals(told: Told, key: str, title: str) -> Plot | None:
    """Return a number of each row as a point, its interval as a line through it."""
    data: Records = []
    for name, row in named(told):
        if row[key] is not None:
            low, high = row[f"{key}_ci"] or (row[key], row[key])
            point = {"value": row[key], "low": low, "high": high}
            data.append({"name": name, "drafter": row["drafter"], **point})
    if len(data) < 2:
        return None
    y = axis("name", None, "nominal")
    tip = [{"field": field, "type": "quantitative", "format": ".3f"} for field in ("value", "low", "high")]
    tip.insert(0, {"field": "name", "type": "nominal"})
    x = axis("value", title, scale={"zero": True})
    layers = [
        {"mark": {"type": "rule", "strokeDash": [4, 4], "opacity": 0.6}, "encoding": {"x": {"datum": 1}}},
        {
            "mark": {"type": "rule", "strokeWidth": 3},
            "encoding": {
                "y": y,
                "x": {**x, "field": "low"},
                "x2": {"field": "high"},
                "color": colour("drafter", legend=None),
            },
        },
        {
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
            "encoding": {"y": y, "x": x, "color": colour("drafter", legend=None), "tooltip": tip},
        },
    ]
    return plot(
        f"Each row's {title} with its 95% interval; the dashed line is plain decoding", data, layers, bars(data)
    )


def bars(data: Records) -> int:
    """Return the height of a plot with a bar a name."""
    return BAR * len({each["name"] for each in data})


def acceptance(told: Told) -> Plot | None:
    """Return P(a >= d) by depth."""
    data = [
        {"name": name, "depth": depth, "share": share, "after": row["conditional_by_depth"][depth - 1]}
        for name, row in zip(row_names(clocked(told)), clocked(told), strict=True)
        for depth, share in enumerate(row["accepted_by_depth"], 1)
    ]
    if not data:
        return None
    encoding = {
        "x": axis("depth", "depth d", axis=whole(max(each["depth"] for each in data))),
        "y": axis("share", "P(a ≥ d)", scale={"domain": [0, 1]}),
        "color": colour(),
        "tooltip": [
            {"field": "name", "type": "nominal"},
            {"field": "depth", "type": "quantitative"},
            {"field": "share", "type": "quantitative", "format": ".3f", "title": "P(a ≥ d)"},
            {"field": "after", "type": "quantitative", "format": ".3f", "title": "P(a ≥ d | a ≥ d - 1)"},
        ],
    }
    layer = {"mark": {"type": "line", "point": {"size": 60}}, "encoding": encoding}
    return plot("The share of target passes that accepted d drafted tokens or more", data, [layer])


def against(told: Told, key: str, title: str) -> Plot | None:
    """Return the speedup against the batch size, the temperature or the request rate, where there are several."""
    rows = clocked(told)
    if len({row[key] for row in rows if row.get(key) is not None}) < 2:
        return None
    data: Records = []
    for line, row in lines({**told, "rows": rows}, key):
        if row["speedup"] is not None and row["drafter"] != PLAIN:
            low, high = row["speedup_ci"] or (row["speedup"], row["speedup"])
            data.append({"name": line, "x": row[key], "speedup": row["speedup"], "low": low, "high": high})
    if not data:
        return None
    x = axis("x", title, axis={"values": sorted({each["x"] for each in data}), "format": "~g"})
    x["scale"] = {"nice": False, "padding": 12, **({"type": "log", "base": 2} if key != "temperature" else {})}
    tip = [{"field": "name", "type": "nominal"}, {"field": "x", "type": "quantitative", "title": title}]
    tip += [{"field": each, "type": "quantitative", "format": ".3f"} for each in ("speedup", "low", "high")]
    y = axis("speedup", "speedup", scale={"zero": True})
    bar = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour()}
    layers = [
        {"mark": {"type": "rule", "strokeDash": [4, 4], "opacity": 0.6}, "encoding": {"y": {"datum": 1}}},
        {"mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.5}, "encoding": bar},
        {
            "mark": {"type": "line", "point": {"size": 60}},
            "encoding": {"x": x, "y": y, "color": colour(), "tooltip": tip},
        },
    ]
    what = "Speedup, one of mean latencies," if key == "request_rate" else "Speedup"
    told_as = f"{what} against the {title}, with 95% intervals; the dashed line is plain decoding"
    return plot(told_as, data, layers)


def lines(told: Told, key: str) -> Iterator[tuple[str, Told]]:
    """Yield the rows that have a value of the key, each with the name of its line: what tells it from others but that.

    Those behind a red gate are left out.
    """
    others = [other for other in VARYING if other != key and len({str(row.get(other)) for row in told["rows"]}) > 1]
    for _, row in named(told):
        if row.get(key) is not None:
            told_by = [f"{other.replace('_', ' ')} {_plainly(row[other])}" for other in others if known(row, other)]
            yield ", ".join([row["drafter"], *told_by]), row


def known(row: Told, key: str) -> bool:
    """Whether a row has a value of a key."""
    return row.get(key) not in (None, "")


def _plainly(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def time_split(told: Told) -> Plot | None:
    """Return the milliseconds of a step by part."""
    data = [
        {"name": name, "part": part, "order": order, "ms": 1000 * row["seconds"][part] / row["steps"]}
        for name, row in zip(row_names(told["rows"]), told["rows"], strict=True)
        for order, part in enumerate(("verify", "draft", "other"))
        if row["steps"] and row["tier"] == LIVE
    ]
    if not data:
        return None
    encoding = {
        "y": axis("name", None, "nominal"),
        "x": axis("ms", "ms a step"),
        "order": {"field": "order", "type": "quantitative"},
        "color": colour("part"),
        "tooltip": [
            {"field": "name", "type": "nominal"},
            {"field": "part", "type": "nominal"},
            {"field": "ms", "type": "quantitative", "format": ".2f"},
        ],
    }
    layer = {"mark": {"type": "bar"}, "encoding": encoding}
    return plot("Where the time of a step goes, a step being a target pass with its draft", data, [layer], bars(data))


def ladder(told: Told) -> Plot | None:
    """Return for each row a bar as long as τ: the speedup, and what each cost took of the rest."""
    data: Records = []
    for name, row in named(told):
        if row.get("ladder") is not None:
            left = [row["ladder"]["rungs"][rung] for rung in RUNGS]
            data.append({"name": name, "part": "speedup", "low": 0, "high": left[-1], "size": left[-1]})
            for cost, high, low in reversed(list(zip(COSTS, left, left[1:], strict=False))):
                data.append({"name": name, "part": f"lost to {cost}", "low": low, "high": high, "size": high - low})
    if not data:
        return None
    order = ["speedup", *(f"lost to {cost}" for cost in reversed(COSTS))]
    encoding = {
        "y": axis("name", None, "nominal"),
        "x": axis("low", "times plain decoding; the whole bar is τ"),
        "x2": {"field": "high"},
        "color": colour("part", scale={"domain": order}),
        "tooltip": [
            {"field": "name", "type": "nominal"},
            {"field": "part", "type": "nominal"},
            {"field": "size", "type": "quantitative", "format": ".3f"},
        ],
    }
    rule = {"mark": {"type": "rule", "strokeDash": [4, 4], "opacity": 0.6}, "encoding": {"x": {"datum": 1}}}
    layers = [{"mark": {"type": "bar"}, "encoding": encoding}, rule]
    return plot("What became of τ on the way to the speedup", data, layers, bars(data))
