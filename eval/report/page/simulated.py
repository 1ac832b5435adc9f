"""The page's plots of what no clock measured: other trees, other loads, and the head along the text."""

from typing import Any

from eval.report import advice
from eval.report.page.names import Told
from eval.report.page.plots import Plot, Records, axis, colour, plot, whole


def trees(told: Told) -> list[Plot]:
    """Return τ and the predicted speedup of every tree against the nodes that it drafts: the view at equal budget."""
    made = []
    for name, found in told.get("other_trees", {}).items():
        for key, title in (("tau", "τ"), ("speedup", "predicted speedup")):
            data: Records = [dict(each) for each in found["trees"] if each[key] is not None]
            if data:
                made.append(plot(f"{name}: {title} of every tree by the nodes it drafts", data, [_dots(key, title)]))
    return made


def _dots(key: str, title: str) -> dict[str, Any]:
    tip: list[dict[str, Any]] = [{"field": field, "type": "nominal"} for field in ("family", "tree")]
    tip += [{"field": field, "type": "quantitative", "format": ".2f"} for field in ("nodes", "tau", "speedup")]
    encoding = {
        "x": axis("nodes", "drafted nodes a step"),
        "y": axis(key, title, scale={"zero": False}),
        "color": colour("family"),
        "shape": {"field": "family", "type": "nominal", "title": None, "sort": None},
        "tooltip": tip,
    }
    return {"mark": {"type": "point", "size": 45}, "encoding": encoding}


def loads(told: Told) -> list[Plot]:
    """Return the predicted speedups by batch size of each head's own tree, and of the best for each size."""
    data: Records = []
    for name, found in told.get("other_trees", {}).items():
        for each in found.get("loads", []):
            for who, called in (("own", "its own tree"), ("best", "best tree")):
                if each[who] is not None:
                    label = "" if who == "own" else each["tree"]
                    line = {"name": f"{name}, {called}", "batch": each["batch_size"], "tree": label}
                    data.append({**line, "speedup": each[who]})
    sizes = sorted({each["batch"] for each in data})
    if len(sizes) < 2:
        return []
    encoding = {
        "x": axis("batch", "batch size", axis={"values": sizes, "format": "d"}, scale={"type": "log", "base": 2}),
        "y": axis("speedup", "predicted speedup", scale={"zero": True}),
        "color": colour(),
        "tooltip": [
            {"field": "name", "type": "nominal"},
            {"field": "tree", "type": "nominal"},
            {"field": "batch", "type": "quantitative"},
            {"field": "speedup", "type": "quantitative", "format": ".2f"},
        ],
    }
    one = {"mark": {"type": "rule", "strokeDash": [4, 4], "opacity": 0.6}, "encoding": {"y": {"datum": 1}}}
    line = {"mark": {"type": "line", "point": {"size": 60}}, "encoding": encoding}
    caption = "Predicted speedup by batch size; where a line falls below the dashed one, speculation no longer pays"
    return [plot(caption, data, [one, line])]


def along(told: Told) -> list[Plot]:
    """Return acceptance by depth and rank of each head, and n-alpha with P(a >= k) of chains after every token."""
    made = []
    curves: Records = []
    for name, found in told.get("teacher_forced", {}).items():
        cells: Records = [
            {"depth": depth, "rank": rank, "share": share}
            for depth, row in enumerate(found["rank"], 1)
            for rank, share in enumerate(row, 1)
        ]
        made.append(_heat(name, cells))
        for called, key in (("n-alpha", "n_alpha"), ("P(a≥k)", "at_every_token")):
            for depth, share in enumerate(found[key], 1):
                curves.append({"name": f"{name}, {called}", "depth": depth, "share": share})
    if curves:
        line = {
            "mark": {"type": "line", "point": {"size": 60}},
            "encoding": {
                "x": axis("depth", "depth", axis=whole(max(each["depth"] for each in curves))),
                "y": axis("share", "share", scale={"domain": [0, 1]}),
                "color": colour(),
                "tooltip": [
                    {"field": "name", "type": "nominal"},
                    {"field": "depth", "type": "quantitative"},
                    {"field": "share", "type": "quantitative", "format": ".3f"},
                ],
            },
        }
        made.append(plot("n-alpha by depth n + 1, and P(a≥k) of a chain after every token", curves, [line]))
    return made


def _heat(name: str, cells: Records) -> Plot:
    tip: list[dict[str, Any]] = [{"field": field, "type": "ordinal"} for field in ("depth", "rank")]
    tip.append({"field": "share", "type": "quantitative", "format": ".3f"})
    x, y = ({"field": field, "type": "ordinal", "axis": {"labelAngle": 0}} for field in ("rank", "depth"))
    shade = {"field": "share", "type": "quantitative", "scale": {"domain": [0, 1], "range": [0, 0.8]}, "legend": None}
    square = {"mark": {"type": "rect"}, "encoding": {"x": x, "y": y, "opacity": shade, "tooltip": tip}}
    written = {"field": "share", "type": "quantitative", "format": ".2f"}
    number = {"mark": {"type": "text", "fontSize": 10}, "encoding": {"x": x, "y": y, "text": written}}
    caption = f"{name}: the share of the text's tokens by depth and rank of the guess"
    return plot(caption, cells, [square, number], 30 * len({each["depth"] for each in cells}))


def text(told: Told) -> list[str]:
    """Return which tree to take and at which load to stop, in words."""
    said = [line for name, found in told.get("other_trees", {}).items() for line in advice.lines(name, found)]
    return [*said, advice.NOTE] if said else []
