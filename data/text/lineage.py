"""Which text a run was trained on: its sources by name, what tells their content from another's, who wrote answers."""

import hashlib
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.text.files import META, content_hash
from data.text.sources import Files, Hub, open_sources
from heads.common.redact import redacted_values
from heads.common.untrusted import parse_json


def lineage(config: DataConfig) -> list[dict[str, Any]]:
    """Return a record for each source, for provenance.json.

    Returns:
        of each its `name`; a Hub data set's `revision`, of files their `sha256` (of several, of the list of theirs; of
        streamed ones, which are not read to their end, none); `answers`: the settings of who wrote them, where
        data/run.py has written them and says so beside the file.

    Raises:
        ValueError: a source or what stands beside it cannot be read.
    """
    return [_record(source) for source in open_sources(config)]


def _record(source: Any) -> dict[str, Any]:
    if isinstance(source, Hub):
        return {"name": source.name, "revision": source.revision}
    assert isinstance(source, Files)
    found: dict[str, Any] = {"name": source.name, "files": len(source.files)}
    if not source.streaming:
        hashes = [content_hash(file) for file in source.files]
        found["sha256"] = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    written = [each for each in map(_answers, source.files) if each]
    if written:
        found["answers"] = written[0] if all(each == written[0] for each in written) else {"by": "several"}
    return found


def _answers(file: Path) -> dict[str, Any]:
    """Return the settings by which a file's answers were written; nothing where none are told."""
    meta = file.with_name(file.name + META)
    if not meta.is_file():
        return {}
    try:
        told = parse_json(meta.read_bytes())
    except ValueError as error:
        raise ValueError(f"{meta}: damaged ({error}); restore it, or remove it") from None
    settings = told.get("settings") if isinstance(told, dict) else None
    if not isinstance(settings, dict):
        return {}
    found: dict[str, Any] = redacted_values({key: value for key, value in settings.items() if key != "data"})
    return found
