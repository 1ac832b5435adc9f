"""Shapes are checked in every test, where a signature has some; types alone are left to mypy."""

import inspect
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import jaxtyping
import torch

CHECKED = jaxtyping.jaxtyped
PACKAGES = ["heads", "inference", "data", "eval", "train", "ops"]
FIRST, EVERY = 16, 16  # a test's calls of a function that are checked: the first 16, then every 16th
calls: Counter[Any] = Counter()  # in this test, of each function


def has_shapes(function: Any) -> bool:
    """Whether an argument, a field or what is returned has a shape."""
    inner = getattr(function, "__func__", None) or getattr(function, "fget", None) or function
    return any("jaxtyping." in repr(annotation) for annotation in inspect.get_annotations(inner).values())


def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    """Decorate what has shapes: `jaxtyping.jaxtyped` wraps all functions, which doubles the time of the tests."""

    def decorated(function: Any) -> Any:
        if not has_shapes(function):
            return function
        checked = CHECKED(function, typechecker=typechecker)
        return sampled(function, checked) if inspect.isfunction(function) else checked

    return decorated


def sampled(function: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks FIRST calls of a test and some others: all would take a fifth of its time."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which would compile once more for every count
            return function(*args, **kwargs)
        calls[function] += 1
        is_checked = calls[function] <= FIRST or calls[function] % EVERY == 0
        return (checked if is_checked else function)(*args, **kwargs)

    return called


def check() -> None:
    """Check the shapes of modules that are imported from now on."""
    patched: Any = jaxtyping
    patched.jaxtyped = jaxtyped  # which is what the import hook writes before a function
    jaxtyping.install_import_hook(PACKAGES, "beartype.beartype")
