"""The card's plots as PNG: those of the report's page, drawn by the library that the page carries.

They lie on an opaque white ground, so that they read the same on a light and on a dark page.
"""

import json
from typing import Any, NamedTuple

import vl_convert

from eval.live import extras
from eval.report.plots import results as plots
from eval.report.plots.results import Plot, Spec
from train.release.card.facts import Facts
from train.release.card.measured import clocked

WIDTH = 620  # pixels, of which each is SCALE on a side
LOW = 170  # of several beneath each other
SCALE = 1.6
CONFIG = {
    "background": "white",
    "padding": 14,
    "view": {"stroke": None},
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "gridColor": "#e6e6e6", "labelLimit": 300},
    "legend": {"orient": "bottom", "columns": 3, "labelFontSize": 12, "labelLimit": 260, "title": None},
    "title": {"fontSize": 13, "anchor": "start", "fontWeight": "normal"},
    "point": {"filled": True},
}


class Drawn(NamedTuple):
    """A plot's picture, and what it shows."""

    caption: str
    png: bytes


def drawn(facts: Facts) -> dict[str, Drawn]:
    """Return the plots that the run has numbers for, by the names of their files."""
    told = {**facts.report, "rows": clocked(facts.report)}
    found: dict[str, list[Plot]] = {}
    if told["rows"]:
        for key, title in (("tau", "τ"), ("speedup", "speedup")):
            found[key] = [each for each in [plots.with_intervals(told, key, title)] if each is not None]
        found["acceptance"] = [each for each in [plots.acceptance(told)] if each is not None]
    found["training"] = plots.training({"training": _curves(facts)})
    return {f"plots/{name}.png": _picture(parts) for name, parts in found.items() if parts}


def _curves(facts: Facts) -> dict[str, Any]:
    """Return the training curves, of the run's own records, else of its report."""
    found: dict[str, Any] = extras.training({facts.kind: facts.run / "head"})
    found = found or {
        name: each
        for name, each in facts.report.get("training", {}).items()
        if facts.own(name) and each.keys() >= {"steps", "tau"}  # an earlier version's may lack some
    }
    return {name: {**each, "tau": each["tau"] if len(each["tau"]) > 1 else []} for name, each in found.items()}


def _picture(parts: list[Plot]) -> Drawn:
    """Return plots beneath each other as one picture."""
    specs: list[Spec] = [{**_fixed(part.spec), "title": part.caption} for part in parts]
    if len(specs) > 1:
        specs = [{**spec, "height": LOW} for spec in specs]
    whole = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "config": CONFIG,
        **(specs[0] if len(specs) == 1 else {"vconcat": specs, "resolve": {"scale": {"color": "independent"}}}),
    }
    png = vl_convert.vegalite_to_png(json.dumps(whole), scale=SCALE)
    return Drawn(". ".join(part.caption for part in parts), bytes(png))


def _fixed(spec: Spec) -> Spec:
    """Return a page's specification with a width of its own."""
    return {key: value for key, value in spec.items() if key != "autosize"} | {"width": WIDTH}
