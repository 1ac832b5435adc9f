"""How many positions a target has, as its configuration says, and how long a row of packed text may be for it."""

from typing import Any

from heads.common.target_config import read_target_config

UNBOUNDED = 2**31  # of a target that says nothing


def context_of(config: Any) -> int:
    """Return the most tokens that a sequence may have, from a model's configuration."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else UNBOUNDED


def row_length(path: str, wanted: int) -> int:
    """Return the length of packed rows: what is wanted, or the target's context where that is known to be less.

    A target that has still to be downloaded is not known here; `check_rows` comes once it is.
    """
    try:
        config = read_target_config(path, trust_remote_code=False, cached_alone=True)
    except ValueError:
        return wanted
    return min(wanted, context_of(config))


def check_rows(length: int, context: int, name: str) -> None:
    """Check that a target can read rows of this length.

    Raises:
        ValueError: it cannot.
    """
    if length > context:
        raise ValueError(f"data.length is {length}, but {name} reads at most {context} tokens: give {context} or less")
