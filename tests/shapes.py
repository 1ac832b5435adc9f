"""Shapes are checked in every test, where a signature has some; types alone are left to mypy."""

import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping

CHECKED = jaxtyping.jaxtyped
PACKAGES = ["heads", "inference", "data", "eval", "train"]


def has_shapes(function: Any) -> bool:
    """Whether an argument, a field or what is returned has a shape."""
    inner = getattr(function, "__func__", None) or getattr(function, "fget", None) or function
    return any("jaxtyping." in repr(annotation) for annotation in inspect.get_annotations(inner).values())


def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    """Decorate what has shapes: `jaxtyping.jaxtyped` wraps all functions, which doubles the time of the tests."""

    def decorated(function: Any) -> Any:
        return CHECKED(function, typechecker=typechecker) if has_shapes(function) else function

    return decorated


def check() -> None:
    """Check the shapes of modules that are imported from now on."""
    patched: Any = jaxtyping
    patched.jaxtyped = jaxtyped  # which is what the import hook writes before a function
    jaxtyping.install_import_hook(PACKAGES, "beartype.beartype")
