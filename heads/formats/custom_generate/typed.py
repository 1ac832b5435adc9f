"""Configurations of heads where OmegaConf is missing: the keys are checked, the types were when they were written."""

from dataclasses import MISSING, fields
from typing import Any


def typed(schema: Any, values: Any) -> Any:
    """Build the dataclass `schema` from a mapping; refuse unknown and missing keys."""
    valid = {field.name: field for field in fields(schema)}
    if not isinstance(values, dict):
        raise ValueError(f"{schema.__name__} is {values!r}, expected a mapping with the keys {', '.join(valid)}")
    if unknown := sorted(values.keys() - valid.keys()):
        raise ValueError(f"{unknown[0]} is not a known key; valid keys: {', '.join(valid)}")
    missing = [name for name, field in valid.items() if field.default is MISSING and name not in values]
    if missing:
        raise ValueError(f"{missing[0]} is missing; valid keys: {', '.join(valid)}")
    return schema(**values)
