"""The provenance of a head: its target, the training text and its authors, and the length of the training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.live.extras import METRICS, records
from train.release.card.facts import Facts
from train.release.card.text import bullets, code, escaped


def lines_of(facts: Facts) -> dict[str, list[str]]:
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
