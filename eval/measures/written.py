"""Plain values for JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict
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
