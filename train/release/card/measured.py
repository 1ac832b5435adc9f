"""The results of a head: their table, and the plots of the report's page as PNG, rendered by the same library.

Pictures lie on an opaque white ground, so that they read the same on a light and on a dark page.
"""

import json
from typing import Any, NamedTuple

from eval.live import extras
from eval.report import plots
from eval.report.columns import CARD, Cell, results
from eval.report.plots import Plot, Spec
from eval.report.text import grid
from train.release.card.facts import Facts
from train.release.card.text import escaped

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


class Picture(NamedTuple):
    """A plot's picture and its caption."""

    caption: str
    png: bytes


def table(facts: Facts) -> str:
    """Return the table of the results by decoding, that of a failed one withheld; empty where there are none."""
    shown = results(facts.live, CARD)
    return grid(shown.titles(), [[_text(cell) for cell in line] for line in shown.lines]) if shown.lines else ""


def _text(cell: Cell) -> str:
    """Return a cell's text, with names escaped; the table itself escapes the signs that end a cell."""
    words = isinstance(cell.values[0], str)
    return "|".join(escaped(text) for text in cell.text.split("|")) if words else cell.text


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
    report = {**facts.report, "rows": [result.row for result in facts.live]}
    plots_by_name: dict[str, list[Plot]] = {}
    if report["rows"]:
        for key, title in (("tau", "τ"), ("speedup", "speedup")):
            plots_by_name[key] = plots.with_intervals(report, key, title)
        plots_by_name["acceptance"] = plots.acceptance(report)
    plots_by_name["training"] = plots.training({"training": _curves(facts)})
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


def _picture(plots_shown: list[Plot]) -> Picture:
    """Return plots beneath each other as one picture."""
    size = {"width": WIDTH} if len(plots_shown) == 1 else {"width": WIDTH, "height": LOW}
    specs: list[Spec] = [{**plot.spec, **size, "title": plot.caption} for plot in plots_shown]
    for spec in specs:
        spec.pop("autosize", None)  # to the page
    whole = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "config": CONFIG,
        **(specs[0] if len(specs) == 1 else {"vconcat": specs, "resolve": {"scale": {"color": "independent"}}}),
    }
    import vl_convert

    png = vl_convert.vegalite_to_png(json.dumps(whole), scale=SCALE)
    return Picture(". ".join(plot.caption for plot in plots_shown), bytes(png))
