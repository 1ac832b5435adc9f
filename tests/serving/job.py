"""What the scripts that load heads by an engine's classes share: one answer a head, refusals among them."""

import json
from collections.abc import Callable, Sequence
from typing import Any


def answer(version: str, heads: Sequence[Any], load: Callable[[Any], dict[str, Any]]) -> None:
    """Print what became of every head, and the engine's version."""
    found = []
    for head in heads:
        try:
            found.append(load(head))
        except Exception as error:  # whatever an engine raises is its refusal
            found.append({"refused": f"{type(error).__name__}: {error}"})
    print(json.dumps({"version": version, "heads": found}))
