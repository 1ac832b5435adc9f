"""The results of a head: their table, and the plots of the report's page as PNG, rendered by the same library.

Pictures lie on an opaque white ground, so that they read the same on a light and on a dark page.
"""

import json
from typing import Any, NamedTuple

from eval.live import extras
from eval.report import plots, sections
from eval.report.plots import Plot
from eval.report.render import grid
from train.release.card.facts import Facts
from train.release.card.text import escaped

WIDTH = 620  # pixels, of which each is SCALE on a side
SCALE = 1.6
NAMES = ("drafter", "tree", "workload")  # columns of names from outside
CONFIG = {
    "background": "white",
    "padding": 14,
    "view": {"stroke": None},
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "gridColor": "#e6e6e6", "labelLimit": 300},
    "legend": {"orient": "bottom", "columns": 3, "labelLimit": 260, "symbolOpacity": 1, "title": None},
    "title": {"fontSize": 13, "anchor": "start", "fontWeight": "normal"},
    "point": {"filled": True},
}


class Picture(NamedTuple):
    """A plot's picture and its caption."""

    caption: str
    png: bytes


def table(facts: Facts) -> str:
    """Return the table of the results by decoding, that of a failed one withheld; empty where there are none."""
    shown = sections.table(sections.CARD, facts.live)

    def cell(title: str, text: str) -> str:  # the table itself escapes the sign that ends a cell
        return "|".join(map(escaped, text.split("|"))) if title in NAMES else text

    lines = [[cell(title, text) for title, text in zip(shown.titles, line, strict=True)] for line in shown.lines]
    return grid(shown.titles, lines) if lines else ""


def conditions(report: dict[str, Any]) -> str:
    """Return the device, settings and date of the measurement."""
    device, settings = report.get("device", {}), report.get("settings", {})
    where = [str(device[key]) for key in ("name", "dtype", "torch", "transformers") if device.get(key) is not None]
    sentences = [f"Device, dtype, versions of torch and transformers: {escaped(', '.join(where))}."] if where else []
    if settings.get("prompts") is not None:
        sentences.append(
            escaped(f"{settings['prompts']} prompts a workload, {settings.get('max_new_tokens')} new tokens at most.")
        )
    if date := (settings.get("provenance") or {}).get("date"):
        sentences.append(f"Measured on {escaped(str(date)[:10])}.")
    return " ".join(sentences)


def pictures_of(facts: Facts) -> dict[str, Picture]:
    """Return the plots that the run has numbers for, by the names of their files."""
    plots_by_name = {
        "speedup": plots.speedup(facts.live),
        "acceptance": plots.acceptance(facts.live),
        "training": plots.learning_curve(_curves(facts)),
    }
    return {f"plots/{name}.png": _picture(shown) for name, shown in plots_by_name.items() if shown}


def _curves(facts: Facts) -> dict[str, Any]:
    """Return the training curves from the run's records, else from its report."""
    curves: dict[str, Any] = extras.training({facts.kind: facts.run / "head"})
    curves = curves or {
        name: curve
        for name, curve in facts.report.get("training", {}).items()
        if facts.has_drafter(name) and curve.keys() >= {"steps", "tau"}  # an earlier version's may lack some
    }
    return {name: {**curve, "tau": curve["tau"] if len(curve["tau"]) > 1 else []} for name, curve in curves.items()}


def _picture(shown: Plot) -> Picture:
    """Return a plot as a picture."""
    whole = {
        **{key: value for key, value in shown.spec.items() if key != "autosize"},  # to the page
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "config": CONFIG,
        "width": WIDTH,
        "title": shown.caption,
    }
    import vl_convert

    return Picture(shown.caption, bytes(vl_convert.vegalite_to_png(json.dumps(whole), scale=SCALE)))
