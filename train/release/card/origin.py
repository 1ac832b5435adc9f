"""Where a head comes from: its target, the text it was trained on and who wrote that, and how long it was trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.live.extras import METRICS, records
from train.release.card.facts import Facts
from train.release.card.text import bullets, code, escaped

NONE = "The run has not recorded on what it was trained."


def section(facts: Facts) -> str:
    """Return the lineage of target and data."""
    parts = {"Target": _target(facts), "Data": "\n".join(_data(facts)), "Training": "\n".join(_training(facts))}
    return "\n\n".join(f"**{name}**\n\n{text}" for name, text in parts.items() if text)


def _target(facts: Facts) -> str:
    said = {**facts.config["target"], "name": facts.base}
    if facts.tokenizer_sha256:
        said["sha256 of tokenizer.json"] = facts.tokenizer_sha256
    return "\n".join(bullets(said))


def _data(facts: Facts) -> Iterator[str]:
    counts, sources = facts.provenance.get("data"), facts.provenance.get("sources") or []
    asked = (facts.settings.get("data") or {}).get("path") or []
    counts = counts or {}
    names = [str(each["name"]) for each in sources] or list(counts.get("records", {}))
    names = names or [str(each) for each in (asked if isinstance(asked, list) else [asked])]
    if not names:
        yield NONE
        return
    told = {str(each["name"]): each for each in sources}
    for name in names:
        yield f"- {code(shown(name))}{_kept(name, counts)}{_identity(told.get(name, {}))}"
    dropped = {key: counts[key] for key in ("duplicates", "contaminated", "short") if counts.get(key)}
    if dropped:
        yield "- dropped: " + ", ".join(f"{n:,} {escaped(key)}" for key, n in dropped.items())
    if counts.get("tokens"):
        share = counts.get("trained", 0) / counts["tokens"]
        yield f"- {counts['samples']:,} samples of {counts['tokens']:,} tokens, {share:.0%} of them trained on"
    if counts.get("held_out"):
        yield f"- {counts['held_out']:,} records held out for measuring"
    if mark := facts.provenance.get("data_fingerprint"):
        yield f"- fingerprint of the samples: {code(mark)}"


def _kept(name: str, counts: dict[str, Any]) -> str:
    read, kept = counts.get("records", {}).get(name), counts.get("kept", {}).get(name, 0)
    return "" if read is None else f", {kept:,} of {read:,} records"


def _identity(source: dict[str, Any]) -> str:
    """Return what tells a source's content from another's, and who wrote its answers."""
    said = "".join(f", {key} {code(source[key])}" for key in ("revision", "sha256") if source.get(key))
    answers = source.get("answers")
    if answers:
        said += "; who wrote its answers: " + ", ".join(
            f"{escaped(key)} {code(value)}" for key, value in _flat(answers) if value not in (None, "", [], {})
        )
    return said


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key.replace("_", " "), value


def _training(facts: Facts) -> Iterator[str]:
    trainer, file = facts.settings.get("trainer") or {}, facts.run / METRICS
    told = list(records(file)) if file.is_file() else []
    steps = [each["step"] for each in told if each.get("loss") is not None]
    rows = sum(each.get("rows") or 0 for each in told)
    if steps:
        of = f" of {trainer['steps']:,}" if trainer.get("steps") else ""
        yield f"- {max(steps):,}{of} optimiser steps"
        if trainer.get("batch_tokens"):
            yield f"- {max(steps) * trainer['batch_tokens']:,} tokens seen at most, {trainer['batch_tokens']:,} a step"
        if rows:
            yield f"- {rows:,} positions trained on, those of repeated passes counted again"
    best = [each for each in told if each.get("best") and each.get("tau") is not None]
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
