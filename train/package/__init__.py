"""The package headstart: a target with its drafter in three lines of Python, and the command.

An installed headstart has all other packages below this one; in a checkout they are top-level folders.

command.py   the command `headstart`, its sub-commands and its shell completion
build.py     the build step that puts everything under headstart
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.api import GREEDY, Generation, RequestParams, Sampling, SwappableDrafter, generate, load, speculate

__all__ = ["GREEDY", "Generation", "RequestParams", "Sampling", "SwappableDrafter", "generate", "load", "speculate"]


def __getattr__(name: str) -> Any:
    """Import the engine at its first use: the command starts without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from inference import api

    return getattr(api, name)
