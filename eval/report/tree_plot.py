"""The page's plot of a tree: each node with the share of the target passes that accepted it."""

from collections.abc import Mapping
from typing import NamedTuple

from eval.report.plots import Plot, Records, Spec, axis, layer, plot, ticks, tooltip
from eval.report.view import Record

Path = tuple[int, ...]

# Pixels. Labels are laid out as they fit on the narrowest page, so that they fit on any.
NARROW = 280  # the depths' axis on a phone
EDGE = 36  # beside the first and the last depth, for their labels
ROOMY, CLOSE = 32, 13  # from leaf to leaf, in a small tree and in a large one
USUAL, TALL = 420, 1100  # the plot
DOT = 14.0
LABEL = (26, 11)
GAP = 3  # from a node to its label
LEAST = 0.005  # share of a node with a label
HUE = "#4c78a8"


class Box(NamedTuple):
    """A rectangle on the page."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Box") -> bool:
        """Whether they overlap."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def tree(name: str, record: Record) -> list[Plot]:
    """Return a tree, its root on the left: the fuller a node and the thicker its edge, the more often it was accepted.

    `record` is the tree as report.json has it, with one node or more.
    """
    accepted: dict[Path, float] = dict(zip(map(tuple, record["paths"]), record["accepted"], strict=True))
    deepest, leaf_count = max(map(len, accepted)), len(leaves(accepted))
    apart = min(max(CLOSE, min(ROOMY, USUAL / leaf_count)), TALL / leaf_count)
    dot = min(DOT, 0.8 * NARROW / deepest, 0.8 * apart)
    height = heights(accepted)
    middle = {path: (len(path) * NARROW / deepest, (y + 1) * apart) for path, y in height.items()}
    beside = labels(middle, accepted, dot)
    nodes = {(): 1.0, **accepted}
    data: Records = [
        {
            "depth": len(path), "y": height[path], "above": max(len(path) - 1, 0), "from": height[path[:-1]],
            "node": "→".join(["root", *(str(rank + 1) for rank in path)]), "share": fraction,
            "after": fraction / nodes[path[:-1]] if nodes[path[:-1]] else None,
            "side": beside.get(path, ""),
        }
        for path, fraction in nodes.items()
    ]  # fmt: skip
    caption = f"{name}: {record['label']}, {record['steps']} target passes. {record['note']}"
    return plot(caption, data, layers(deepest, leaf_count, dot), round(apart * (leaf_count + 0.5)))


def layers(deepest: int, leaf_count: int, dot: float) -> list[Spec]:
    """Return the edges, the nodes and their labels; the names are classes that the page's styles know."""
    depths = {**ticks(range(deepest + 1)), "grid": False}
    x = axis("depth", "depth", axis=depths, scale={"padding": EDGE, "nice": False})
    y = axis("y", "", axis=None, scale={"domain": [-1, leaf_count - 0.5], "reverse": True, "nice": False})
    tip = tooltip("node:N  ranks", "share:Q .3f accepted", "after:Q .3f where its parent was")
    size = {"field": "share", "type": "quantitative", "legend": None}
    thick = {**size, "scale": {"type": "sqrt", "domain": [0, 1], "range": [0.5, 0.5 * dot]}}
    full = {**size, "scale": {"type": "sqrt", "domain": [0, 1], "range": [0, 1]}}
    at = {"x": x, "y": y}
    edge = {"x": {**x, "field": "above"}, "x2": {"field": "depth"}, "y": {**y, "field": "from"}, "y2": {"field": "y"}}
    circle = {"type": "circle", "size": dot * dot, "opacity": 1}
    dots = {**circle, "fill": HUE, "stroke": HUE, "strokeWidth": 1}
    near = dot / 2 + GAP
    sides = {"right": {"align": "left", "dx": near}, "above": {"baseline": "bottom", "dy": -near}}
    texts: list[Spec] = [
        {
            "name": f"shares_{side}",
            "transform": [{"filter": f"datum.side == '{side}'"}],
            **layer({"type": "text", **offset}, **at, text=tooltip("share:Q .2f")[0]),
        }
        for side, offset in sides.items()
    ]
    return [
        layer({"type": "rule", "stroke": HUE, "opacity": 0.5}, **edge, strokeWidth=thick),
        {"name": "backs", **layer(circle, **at)},
        *texts,
        {"name": "nodes", **layer(dots, **at, fillOpacity=full, tooltip=tip)},
    ]


def leaves(accepted: Mapping[Path, float]) -> list[Path]:
    """Return the nodes that no other continues, from top to bottom."""
    inner = {path[:-1] for path in accepted}
    return sorted(path for path in accepted if path not in inner)


def heights(accepted: Mapping[Path, float]) -> dict[Path, float]:
    """Return the vertical position of each node and the root, in leaves: a parent in the middle of its children."""
    height = {path: float(index) for index, path in enumerate(leaves(accepted))}
    below: dict[Path, list[Path]] = {}
    for path in accepted:
        below.setdefault(path[:-1], []).append(path)
    for path in sorted(below, key=len, reverse=True):
        children = [height[child] for child in below[path]]
        height[path] = (min(children) + max(children)) / 2
    return height


def labels(middle: Mapping[Path, tuple[float, float]], accepted: Mapping[Path, float], dot: float) -> dict[Path, str]:
    """Return the nodes whose label fits, with its side; the often accepted ones choose first.

    Args:
        middle: where the nodes and the root are, in pixels.
        accepted: the share of passes by node; one that would read 0.00 has no label.
        dot: a node's width in pixels.
    """
    taken = {path: Box(x - dot / 2, y - dot / 2, x + dot / 2, y + dot / 2) for path, (x, y) in middle.items()}
    outer, sides, put = set(leaves(accepted)), dict[Path, str](), list[Box]()
    wide, high = LABEL
    for path in sorted(
        (path for path in accepted if accepted[path] >= LEAST), key=lambda path: (-accepted[path], path)
    ):
        x, y = middle[path]
        near = dot / 2 + GAP
        above = Box(x - wide / 2, y - near - high, x + wide / 2, y - near)
        right = Box(x + near, y - high / 2, x + near + wide, y + high / 2)
        for side, box in ([("right", right)] if path in outer else []) + [("above", above)]:
            if box.top >= 0 and not any(box.meets(other) for other in [*taken.values(), *put]):
                sides[path] = side
                put.append(box)
                break
    return sides
