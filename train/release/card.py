"""The model card of a published head: a dict of the run's records, which README.jinja renders.

Names from outside are shown as code, never as markup. The engines' command lines in README.jinja were tried with the
versions named there; the formats themselves are in heads/formats/published/.
"""

import json
import re
import shlex
from functools import partial
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined

from eval.extras import METRICS, records
from eval.measures.losslessness import COUNTS
from eval.measures.results import LIVE
from eval.report import sections
from eval.report.render import grid
from eval.report.view import results_of, without_ending
from heads.common.typed import Json
from heads.formats import custom_generate
from heads.formats.hub import REPO, on_hub
from heads.formats.published import mimo
from heads.formats.published.export import FORMATS, READERS
from train.release.config import PublishConfig

TASK = "text-generation"
METRIC_NAMES = {"tau": "τ, tokens of a target pass", "speedup": "speedup over autoregressive decoding"}
NAMES = ("drafter", "tree", "workload")  # columns with names from outside


def view(
    config: PublishConfig, content: Json, served: Json, refused: dict[str, str],
    report: Json, provenance: Json, settings: Json,
) -> Json:  # fmt: skip
    """Return the values that the model card's template renders, by the head's own config.json (`content`) and others.

    `served` is the published one, which differs in an engine's format; `refused` has, by format, the reason why it does
    not take the exported head. `report`, `provenance` and `settings` are the run's report.json, provenance.json and
    config.yaml, empty if it has none.
    """
    run, head, target = Path(config.run).expanduser(), content["head"], content["target"]
    hub, kind, log = on_hub(target["name"]), str(head["name"]), run / METRICS
    base = target["name"] if hub else Path(target["name"]).name
    live = [result for result in results_of(report) if result.overall and result.row.get("tier", LIVE) == LIVE]
    mine = []  # this head's results: the drafter is its kind, followed by the run if several heads share a kind
    for result in live:
        drafter, _, folder = result.row["drafter"].partition(" ")
        if drafter == kind and (not folder or Path(folder).name == run.resolve().name):
            mine.append(result)
    table = sections.table(sections.CARD, live)
    cells = [
        [code(text) if title in NAMES else text for title, text in zip(table.titles, line, strict=True)]
        for line in table.lines
    ]
    gates = [result.row["lossless"] for result in mine if result.row["lossless"]]
    steps = list(records(log)) if log.is_file() else []
    counts = provenance.get("data", {})
    data = [
        {"read": read, "kept": counts["kept"][name]}
        | next((source for source in provenance.get("sources", []) if source["name"] == name), {})
        | {"name": Path(name).name if Path(name).is_absolute() else name}
        for name, read in counts.get("records", {}).items()
    ]
    whole = [result for result in mine if result.row.get("request_rate") is None]  # a rate's speedup is of latencies
    fastest = max((result.row["speedup"] for result in whole if result.row["speedup"] is not None), default=1)
    drawbacks = []
    if any(result.failed for result in whole):
        drawbacks.append("It is not lossless in its own report, which therefore gives it no speedup.")
    if fastest < 1:
        best = f"{fastest:.2f} times the same engine without drafts at best"
        drawbacks.append(f"It is slower than decoding without it in its own report: {best}.")
    return {
        "config": config, "head": head, "tree": content["tree"], "target": {**target, "name": base},
        "hub": hub, "path": base if hub else f"path/to/{base}",  # the target, in command lines
        "served": served, "refused": refused, "overrides": mimo.overrides(served),
        "forms": [form for form, kinds in FORMATS.items() if kind in kinds and form != config.format],
        "decodes": config.format is None and config.base is None and bool(custom_generate.files(head)),
        "drawbacks": drawbacks, "mine": mine,
        "results": grid(table.titles, cells) if cells else "",
        "wide": any(not result.row["tree"].startswith("chain") for result in mine),
        "gate": {key: sum(counted[key] for counted in gates) for key in COUNTS},
        "device": report.get("device", {}), "settings": report.get("settings", {}),
        "data": data, "counts": counts, "trainer": settings.get("trainer", {}),
        "losses": settings.get("objective", {}).get("losses"),
        "steps": max((record["step"] for record in steps if record.get("loss") is not None), default=None),
        "best": max((record["step"] for record in steps if record.get("best")), default=None),
        "provenance": {key: value for key, value in provenance.items() if key not in ("data", "sources")},
    }  # fmt: skip


def card(shown: Json) -> str:
    """Return the text of README.md, with its YAML metadata."""
    environment = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    quoted = partial(json.dumps, ensure_ascii=False)  # a one-line string for Python and YAML
    to_yaml = partial(yaml.safe_dump, allow_unicode=True)
    environment.filters |= {"shell": shlex.quote, "quoted": quoted, "yaml": to_yaml, "block": fenced, "code": code}
    template = environment.from_string(Path(__file__).with_name("README.jinja").read_text(encoding="utf-8"))
    return re.sub(r"\n{3,}", "\n\n", template.render(shown, metadata=metadata(shown).to_yaml()))


def code(value: object) -> str:
    """Return a value as inline code, even if it holds backticks."""
    text = " ".join(str(value).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def fenced(text: str, language: str = "") -> str:
    """Return lines as a fenced code block, even if they hold backticks."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def metadata(shown: Json) -> ModelCardData:
    """Return the card's metadata, checked by huggingface_hub's own types."""
    config, kind, measured = shown["config"], shown["head"]["name"], []
    for result in shown["mine"]:
        row, workload = result.row, without_ending(result.row["workload"])
        where = f"T={row['temperature']:g}, batch {row['batch_size']}, tree {row['tree']}"
        where += f", {rate:g} requests per second" if (rate := row.get("request_rate")) is not None else ""
        for metric, name in METRIC_NAMES.items():
            if row[metric] is not None and not (metric == "speedup" and result.failed):
                measured.append(EvalResult(TASK, workload, workload, metric, round(row[metric], 4), metric_name=name,
                                           dataset_config=where))  # fmt: skip
    readers = []  # engines that read this format and accept this head
    if config.format is not None:
        writer = FORMATS[config.format][kind]
        readers = [name for name in READERS if FORMATS[name].get(kind) is writer and name not in shown["refused"]]
    datasets = {str(source["name"]).partition(":")[0] for source in shown["data"] if "revision" in source}
    return ModelCardData(
        license=config.license,
        base_model=shown["target"]["name"] if shown["hub"] else None,
        datasets=sorted(filter(REPO.fullmatch, datasets)) or None,
        library_name="headstart",
        pipeline_tag=TASK,
        tags=["speculative-decoding", "draft-head", kind, *readers],
        model_name=config.repo.split("/")[1] if measured else None,
        eval_results=measured or None,
    )
