"""The model card of a published head: what it is, what was measured, where it comes from, how to use it, its limits."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from eval.row import LIVE
from eval.tables import grid
from heads.hub import on_hub

LIMITS = """\
- The head serves the one target named above: another vocabulary, width, depth or other weights are refused on loading.
- The numbers hold for the named workloads, device and settings. Text unlike the training text is accepted less often,
  which costs speed; the verifier keeps the target's output what it was.
- {layout}
- The head reads the target's embedding and lm_head, {ends}: the target's licence
  applies to them, and to any text that the target wrote for the training."""
ENDS = {True: "which are not in this repository", False: "of which this repository may hold a copy"}  # in our own form


@dataclass(frozen=True)
class Facts:
    """What the card is made of: the head's config.json and, where the run has them, its report and provenance."""

    repo: str
    license: str
    config: dict[str, Any]
    tokenizer_sha256: str | None
    form: str | None
    report: dict[str, Any]
    provenance: dict[str, Any]


def card(facts: Facts) -> str:
    """Return README.md with its YAML metadata."""
    head, target = facts.config["head"], facts.config["target"]
    hub = on_hub(target["name"])
    base = target["name"] if hub else Path(target["name"]).name
    meta = ModelCardData(
        license=facts.license,
        base_model=base if hub else None,
        library_name="headstart",
        tags=["speculative-decoding", "draft-head", head["name"]],
    )
    about = {"head": head, "target": {**target, "name": base}, "tree": facts.config["tree"]}
    if facts.tokenizer_sha256:
        about["tokenizer"] = {"from": base, "sha256 of tokenizer.json": facts.tokenizer_sha256}
    sections = {
        "What it is": "\n".join(_bullets(about)),
        "Measured": _measured(facts.report),
        "Use": _use(facts, base, hub, target.get("adapter")),
        "Provenance": "\n".join(_bullets(facts.provenance)) or "Not recorded.",
        "Limits": LIMITS.format(layout=_layout(facts.form), ends=ENDS[facts.form is None]),
    }
    title = (
        f"# {facts.repo.split('/')[-1]}\n\nA {head['name']} draft head for lossless speculative decoding of `{base}`, "
        "trained with headstart."
    )
    body = "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items())
    return f"---\n{meta.to_yaml()}\n---\n\n{title}\n\n{body}\n"


def _use(facts: Facts, base: str, hub: bool, adapter: str | None) -> str:
    repo, model = facts.repo, (f" model.path={base}" if hub else "") + (f" model.adapter={adapter}" if adapter else "")
    model += " tree=chain" if facts.form else ""  # which foreign formats do not hold
    carried = f', adapter="{adapter}"' if adapter else ""
    return (
        f"```\npython eval/run.py run={repo}{model}\npython inference/run.py run={repo}{model} prompt='...'\n```\n\n"
        "or from Python, in a checkout of headstart:\n\n"
        "```python\nfrom heads.hub import load_found, resolve_head\n"
        "from inference.target import Target\n\n"
        f'target = Target.load("{base}"{carried})\n'
        f'head = load_found(resolve_head("{repo}"), target.ends, target.spec)\n```\n\n'
        "or in plain transformers, whose output it does not change, with the code in `custom_generate`:\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{base}")\nmodel = AutoModelForCausalLM.from_pretrained("{base}")\n'
        'prompt = tokenizer("...", return_tensors="pt")\n'
        f'tokens = model.generate(**prompt, custom_generate="{repo}", trust_remote_code=True)\n```'
    )


def _layout(form: str | None) -> str:
    if form is None:
        return "The files are in headstart's own layout. Serving engines need an export (format=… of train/publish.py)."
    return f"The files are as format={form} has them; headstart reads them too, where a tree is given (tree=chain)."


HEADER = ("drafter", "workload", "T", "batch", "τ [95 %]", "P(a≥1), P(a≥2) …", "tok/s", "speedup [95 %]", "lossless")


def _measured(report: dict[str, Any]) -> str:
    """Return the table of the report's rows by decoding; a row whose gate failed has no speedup."""
    rows = [row for row in report.get("rows", []) if row.get("tier", LIVE) == LIVE]
    if not rows:
        return "Not measured: the run has no report."
    table = grid(HEADER, [_cells(row) for row in rows])
    device = report.get("device", {})
    where = ", ".join(str(device[key]) for key in ("name", "dtype", "threads") if device.get(key) is not None)
    return (
        f"{table}\n\nτ: tokens committed per target pass, the bonus token included. speedup: against plain decoding in "
        "the same engine; at a rate of requests, of mean latencies. lossless: prompts with the same greedy output as "
        "plain decoding. Device, dtype, threads: "
        f"{where}."
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    gate = row.get("lossless") or {}
    failed, rate = gate.get("failed", 0), row.get("request_rate")
    verdict = f"{gate.get('identical', 0)}/{gate['checked']} identical" if gate.get("checked") else "-"
    if gate.get("near_tie"):
        verdict += f", {gate['near_tie']} near tie"
    return (
        str(row["drafter"]),
        Path(str(row["workload"])).stem,
        f"{row['temperature']:g}",
        str(row["batch_size"]) + (f" at {rate:g} req/s" if rate is not None else ""),
        _spread(row.get("tau"), row.get("tau_ci")),
        " ".join(f"{share:.2f}" for share in row.get("accepted_by_depth") or []) or "-",
        "-" if row.get("tokens_per_second") is None else f"{row['tokens_per_second']:.1f}",
        "withheld" if failed else _spread(row.get("speedup"), row.get("speedup_ci")),
        f"{verdict}, {failed} FAILED" if failed else verdict,
    )


def _spread(value: float | None, interval: list[float] | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _bullets(values: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Yield a nested list of everything that is set."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield f"{indent}- {key}:"
            yield from _bullets(value, indent + "  ")
        elif value not in (None, [], {}, ""):
            yield f"{indent}- {key}: `{value}`"
