"""The page's plots of what stands beside the rows: the training of the heads, and their trees."""

from typing import Any

from eval.page.names import Told
from eval.page.plots import Plot, Records, Spec, axis, colour, plot, whole

NODES = 400  # more cannot be told apart


def training(told: Told) -> list[Plot]:
    """Return the curves of the heads' training: the loss, the accuracy by depth, and τ with its interval."""
    curves = told.get("training", {})
    loss = [{"name": name, "step": each["step"], "loss": each["loss"]} for name in curves for each in steps(told, name)]
    accuracy = [
        {
            "name": f"{name}, depth {depth}" if len(curves) > 1 else f"depth {depth}",
            "step": each["step"],
            "share": share,
        }
        for name in curves
        for each in steps(told, name)
        for depth, share in enumerate(each["accuracy"], 1)
    ]
    taus = [{"name": name, **each} for name, found in curves.items() for each in found["tau"]]
    made = []
    if loss:
        made.append(plot("Training loss, means over stretches of steps", loss, [line("loss", "loss")]))
    if accuracy:
        share = line("share", "accuracy", scale={"domain": [0, 1]})
        made.append(plot("Accuracy of the drafts in training, by depth", accuracy, [share]))
    if taus:
        x, y = axis("step", "step"), axis("tau", "τ", scale={"zero": False})
        bar = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour()}
        dots = line("tau", "τ", scale={"zero": False})
        dots["mark"]["point"] = {"size": 60}
        bars = {"mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.5}, "encoding": bar}
        made.append(plot("τ by the verifier while the head was trained, with its 95% interval", taus, [bars, dots]))
    return made


def steps(told: Told, name: str) -> Records:
    """Return the records of the training steps of a run."""
    found: Records = told["training"][name]["steps"]
    return found


def line(field: str, title: str, **more: Any) -> dict[str, Any]:
    """Return a line over the training steps."""
    tip = [{"field": "name", "type": "nominal"}, {"field": "step", "type": "quantitative"}]
    tip.append({"field": field, "type": "quantitative", "format": ".3f"})
    encoding = {"x": axis("step", "step"), "y": axis(field, title, **more), "color": colour(), "tooltip": tip}
    return {"mark": {"type": "line"}, "encoding": encoding}


def tree(name: str, found: Told, accepted: list[float]) -> Plot:
    """Return a tree, its root on the left, coloured by the share of passes that accepted so deep.

    Args:
        name: the drafter's.
        found: the tree as report.json has it, a rank path a node.
        accepted: P(a >= d) of the drafter.
    """
    paths = [tuple(path) for path in found["paths"]][:NODES]
    height = {path: float(place) for place, path in enumerate(sorted(leaves(paths)))}
    for path in sorted({*paths, ()}, key=len, reverse=True):
        below = [height[child] for child in paths if len(child) == len(path) + 1 and child[: len(path)] == path]
        if below:
            height[path] = (below[0] + below[-1]) / 2
    share = dict(enumerate([1.0, *accepted]))
    data: Records = [
        {
            "depth": len(path), "y": height[path], "above": max(len(path) - 1, 0), "from": height[path[:-1]],
            "rank": str(path[-1] + 1) if path else "root", "share": share.get(len(path), 0.0),
            "first": path == (0,) * len(path) or path == min(each for each in paths if len(each) == len(path)),
        }
        for path in [(), *paths]
    ]  # fmt: skip
    x = axis("depth", "depth", axis={**whole(max(map(len, paths)), 0), "grid": False}, scale={"padding": 20})
    y = axis("y", "", axis=None, scale={"padding": 20, "reverse": True})
    tip = [
        {"field": "depth", "type": "quantitative"},
        {"field": "rank", "type": "nominal", "title": "rank among its siblings"},
        {"field": "share", "type": "quantitative", "format": ".3f", "title": "P(a ≥ d)"},
    ]
    shade = {"field": "share", "type": "quantitative", "title": "P(a ≥ d)", "scale": {"domain": [0, 1]}}
    edge = {"x": {**x, "field": "above"}, "x2": {"field": "depth"}, "y": {**y, "field": "from"}, "y2": {"field": "y"}}
    layers: list[Spec] = [
        {"mark": {"type": "rule", "opacity": 0.5}, "encoding": edge},
        {
            "mark": {"type": "circle", "size": 160, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": {**shade, "legend": {"gradientLength": 120}}, "tooltip": tip},
        },
        {
            "transform": [{"filter": "datum.first"}],
            "mark": {"type": "text", "dy": -16},
            "encoding": {"x": x, "y": y, "text": {"field": "share", "type": "quantitative", "format": ".2f"}},
        },
    ]
    tall = min(420, max(90, 22 * len(leaves(paths))))
    return plot(f"{name}: {found['label']}. {found['note']}", data, layers, tall)


def leaves(paths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the paths that no other continues."""
    inner = {path[:-1] for path in paths}
    return [path for path in paths if path not in inner]
