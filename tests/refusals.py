"""A mistake that is refused in one line."""

from collections.abc import Callable
from typing import Any

import pytest


def refuses(words: str, call: Callable[..., Any], *unnamed: Any, **named: Any) -> str:
    """Return the one line by which a call refuses its arguments; `words` is a regular expression that it holds."""
    with pytest.raises(ValueError, match=words) as error:
        call(*unnamed, **named)
    assert "\n" not in str(error.value)
    return str(error.value)
