"""What is written to a disk: plain values for JSON, and files that are there whole or as they were."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any


def finite(value: Any) -> Any:
    """Return the value as dicts, lists and scalars, every number that is not finite replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else finite(asdict(value))


def write_atomic(path: Path, text: str) -> None:
    """Write a text file through a neighbour that takes its place when complete."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
