"""The context length of a target, from its configuration, and the length of a row of packed text for it."""

from typing import Any

from heads.common.target_config import read_target_config, read_target_values

UNBOUNDED = 2**31  # of a target whose configuration does not say


def context_of(config: Any) -> int:
    """Return the most tokens that a sequence may have, from a model's configuration."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else UNBOUNDED


def row_length(path: str, length: int) -> int:
    """Return the length of packed rows: `length`, or the target's context where that is known to be less.

    A target that has still to be downloaded is not known here; `check_rows` runs once it is.
    """
    try:
        values = read_target_values(path, trust_remote_code=False, cached_alone=True)
        written = values.get("text_config", values).get("max_position_embeddings")
        if isinstance(written, int) and written > 0:
            return min(length, written)
        return min(length, context_of(read_target_config(path, trust_remote_code=False, cached_alone=True)))
    except ValueError:
        return length


def check_rows(length: int, context: int, name: str) -> None:
    """Check that a target can read rows of this length.

    Raises:
        ValueError: the rows are longer than its context.
    """
    if length > context:
        raise ValueError(f"data.length is {length}, but {name} reads at most {context} tokens: give {context} or less")
