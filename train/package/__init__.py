"""The package headstart: a target with its drafter in three lines of Python, and the command.

An installed headstart has all other packages below this one; in a checkout they are top-level folders, and
headstart.heads is another name of heads.

command.py   the command `headstart`, its sub-commands and its shell completion
build.py     the build step that puts everything under headstart
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.api import GREEDY, Generation, RequestParams, Sampling, Service, generate, load, speculate

PACKAGES = ("heads", "inference", "data", "eval", "train", "ops")
__all__ = ["GREEDY", "Generation", "RequestParams", "Sampling", "Service", "generate", "load", "speculate"]


def __getattr__(name: str) -> Any:
    """Import the engine at its first use: the command starts without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from inference import api

    return getattr(api, name)


class Checkout(MetaPathFinder, Loader):
    """Finds headstart.heads and the like in a checkout: the very modules of the top-level packages, not second ones."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return the spec of a name below headstart that no file of this package has."""
        package, _, rest = name.partition(".")
        ours = package == "headstart" and rest.partition(".")[0] in PACKAGES
        return ModuleSpec(name, self, origin=rest) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module by its own name."""
        module = import_module(spec.name.partition(".")[2])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it its own spec: it has run already."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


if __name__ == "headstart" and not Path(__file__).with_name("heads").is_dir():
    sys.meta_path.insert(0, Checkout())  # else the path of heads gives headstart.heads.rows once more
