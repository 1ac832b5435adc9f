"""The parts of the card: the metadata by which the Hub finds it, the results with their plots, and the provenance.

Pictures are rendered by the report's library on an opaque white ground, so that they read the same on a dark page.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData

from eval.live import extras
from eval.live.extras import METRICS, records
from eval.report import plots, sections
from eval.report.plots import Plot
from eval.report.render import grid
from eval.report.view import without_ending
from heads.formats.hub import REPO
from heads.formats.published.export import FORMATS, READERS
from train.release.card.facts import Facts, bullets, code, escaped

TASK = "text-generation"
METRIC_NAMES = {"tau": "τ, tokens of a target pass", "speedup": "speedup over autoregressive decoding"}
WIDTH = 620  # pixels, of which each is SCALE on a side
SCALE = 1.6
NAMES = ("drafter", "tree", "workload")  # columns of names from outside
STYLE = {
    "background": "white",
    "padding": 14,
    "view": {"stroke": None},
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "gridColor": "#e6e6e6", "labelLimit": 300},
    "legend": {"orient": "bottom", "columns": 3, "labelLimit": 260, "symbolOpacity": 1, "title": None},
    "title": {"fontSize": 13, "anchor": "start", "fontWeight": "normal"},
    "point": {"filled": True},
}


def metadata(facts: Facts) -> ModelCardData:
    """Return the metadata, checked by huggingface_hub's own types."""
    measured, names, readers = eval_results(facts), set[str](), list[str]()
    for source in facts.provenance.get("sources") or []:
        if "revision" in source and REPO.fullmatch(name := str(source["name"]).partition(":")[0]):
            names.add(name)
    if facts.publish.format is not None:  # the engines that share its writer and take this head
        writer = FORMATS[facts.publish.format][facts.kind]
        readers = [name for name in READERS if FORMATS[name].get(facts.kind) is writer and name not in facts.refused]
    return ModelCardData(
        license=facts.publish.license,
        base_model=facts.model,
        datasets=sorted(names) or None,
        library_name="headstart",
        pipeline_tag=TASK,
        tags=["speculative-decoding", "draft-head", facts.kind, *readers],
        model_name=facts.publish.repo.split("/")[1] if measured else None,
        eval_results=measured or None,
    )


def eval_results(facts: Facts) -> list[EvalResult]:
    """Return the head's own results by decoding, a failed one without its speedup."""
    evaluations = []
    for result in facts.mine:
        row = result.row
        workload, rate = without_ending(row["workload"]), row.get("request_rate")
        where = f"T={row['temperature']:g}, batch {row['batch_size']}, tree {row['tree']}"
        where += f", {rate:g} requests a second" if rate is not None else ""
        where += f", {row['category']}" if row.get("category") else ""
        for metric, name in METRIC_NAMES.items():
            if row[metric] is None or (metric == "speedup" and result.failed):
                continue
            ends = [round(end, 4) for end in row[f"{metric}_ci"] or ()]
            uncertain = len({*ends}) > 1  # of no width where requests are alike or too few, which is no certainty
            evaluations.append(
                EvalResult(
                    task_type=TASK,
                    dataset_type=workload,
                    dataset_name=workload,
                    dataset_config=where,
                    metric_type=metric,
                    metric_name=name,
                    metric_value=round(row[metric], 4),
                    metric_args={"interval_95": ends} if uncertain else None,
                )
            )
    return evaluations


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
        "config": STYLE,
        "width": WIDTH,
        "title": shown.caption,
    }
    import vl_convert

    return Picture(shown.caption, bytes(vl_convert.vegalite_to_png(json.dumps(whole), scale=SCALE)))


def origin(facts: Facts) -> dict[str, list[str]]:
    """Return the lines about the origin of target, data and training."""
    target = {**facts.config["target"], "name": facts.base, "sha256 of tokenizer.json": facts.tokenizer_sha256}
    return {"Target": [bullets(target)], "Data": list(_data(facts)), "Training": list(_training(facts))}


def _data(facts: Facts) -> Iterator[str]:
    counts, sources = facts.provenance.get("data") or {}, facts.provenance.get("sources") or []
    paths = (facts.settings.get("data") or {}).get("path") or []
    names = [str(source["name"]) for source in sources] or list(counts.get("records", {}))
    names = names or [str(source) for source in (paths if isinstance(paths, list) else [paths])]
    if not names:
        yield "The run has not recorded on what it was trained."
        return
    by_name = {str(source["name"]): source for source in sources}
    for name in names:
        read, trained_on = counts.get("records", {}).get(name), counts.get("kept", {}).get(name, 0)
        records_of_it = "" if read is None else f", {trained_on:,} of {read:,} records"
        yield f"- {code(shown(name))}{records_of_it}{_identity(by_name.get(name, {}))}"
    dropped = {key: counts[key] for key in ("duplicates", "contaminated", "short") if counts.get(key)}
    if dropped:
        yield "- dropped: " + ", ".join(f"{n:,} {escaped(key)}" for key, n in dropped.items())
    if counts.get("tokens"):
        fraction = counts.get("trained", 0) / counts["tokens"]
        yield f"- {counts['samples']:,} samples of {counts['tokens']:,} tokens, {fraction:.0%} of them trained on"
    if counts.get("held_out"):
        yield f"- {counts['held_out']:,} records held out for measuring"
    if fingerprint := facts.provenance.get("data_fingerprint"):
        yield f"- fingerprint of the samples: {code(fingerprint)}"


def _identity(source: dict[str, Any]) -> str:
    """Return the revision or hash of a source, and who wrote its answers."""
    text = "".join(f", {key} {code(source[key])}" for key in ("revision", "sha256") if source.get(key))
    answers = source.get("answers")
    if answers:
        text += "; who wrote its answers: " + ", ".join(
            f"{escaped(key)} {code(value)}" for key, value in _flat(answers) if value not in (None, "", [], {})
        )
    return text


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key.replace("_", " "), value


def _training(facts: Facts) -> Iterator[str]:
    trainer, file = facts.settings.get("trainer") or {}, facts.run / METRICS
    steps_recorded = list(records(file)) if file.is_file() else []
    steps = [record["step"] for record in steps_recorded if record.get("loss") is not None]
    rows = sum(record.get("rows") or 0 for record in steps_recorded)
    if steps:
        of = f" of {trainer['steps']:,}" if trainer.get("steps") else ""
        yield f"- {max(steps):,}{of} optimiser steps"
        if trainer.get("batch_tokens"):
            yield f"- {max(steps) * trainer['batch_tokens']:,} tokens seen at most, {trainer['batch_tokens']:,} a step"
        if rows:
            yield f"- {rows:,} positions trained on, those of repeated passes counted again"
    best = [record for record in steps_recorded if record.get("best") and record.get("tau") is not None]
    if best:
        yield f"- the published weights are those of step {best[-1]['step']:,}, the best by the verifier"
    objective = facts.settings.get("objective") or {}
    if objective.get("losses"):
        yield f"- losses by weight: {code(objective['losses'])}, depths trained: {code(objective.get('depths'))}"
    if facts.provenance.get("init"):
        yield f"- started from {code(shown(str(facts.provenance['init'])))}"


def shown(name: str) -> str:
    """Return a source's name without the folders of the machine that it lay on."""
    return Path(name).name if Path(name).is_absolute() else name
