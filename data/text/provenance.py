"""Provenance of a run's text: its sources by name, hashes of their content, and who wrote the answers."""

import hashlib
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.text.files import META, content_hash
from data.text.sources import Files, Hub, open_sources
from heads.common.redact import redacted_values
from heads.common.untrusted import parse_json


def source_records(config: DataConfig) -> list[dict[str, Any]]:
    """Return a record for each source, for provenance.json.

    Returns:
        for each its `name`; a Hub data set's `revision`, or the files' `sha256` (of several, that of the list of
        theirs; none of streamed ones, which are not read to their end); `answers`: the settings that data/run.py wrote
        them with, from the metadata beside the file.

    Raises:
        ValueError: a source or the metadata beside it cannot be read.
    """
    return [_record(source) for source in open_sources(config)]


def _record(source: Any) -> dict[str, Any]:
    if isinstance(source, Hub):
        return {"name": source.name, "revision": source.revision}
    assert isinstance(source, Files)
    record: dict[str, Any] = {"name": source.name, "files": len(source.files)}
    if not source.streaming:
        hashes = [content_hash(file) for file in source.files]
        record["sha256"] = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    written = [settings for settings in map(_answers, source.files) if settings]
    if written:
        record["answers"] = written[0] if all(other == written[0] for other in written) else {"by": "several"}
    return record


def _answers(file: Path) -> dict[str, Any]:
    """Return the settings by which a file's answers were written; empty where there are none beside it."""
    meta = file.with_name(file.name + META)
    if not meta.is_file():
        return {}
    try:
        metadata = parse_json(meta.read_bytes())
    except ValueError as error:
        raise ValueError(f"{meta}: damaged ({error}); restore it, or remove it") from None
    settings = metadata.get("settings") if isinstance(metadata, dict) else None
    if not isinstance(settings, dict):
        return {}
    redacted: dict[str, Any] = redacted_values({key: value for key, value in settings.items() if key != "data"})
    return redacted
