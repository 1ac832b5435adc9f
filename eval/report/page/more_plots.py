"""The page's plots of the training of the heads."""

from typing import Any

from eval.report.page.names import Told
from eval.report.page.plots import Plot, Records, axis, colour, plot


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
