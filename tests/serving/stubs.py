"""Modules that SGLang imports for kernels and media, of which its loaders use nothing: any name in them is a class."""

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from typing import Any

ABSENT = ("IPython", "deep_gemm", "decord", "flash_attn", "flashinfer", "sgl_kernel", "torchaudio")
ABSENT += ("torchvision", "triton")


class Anything(type):
    """The type of classes that are asked for: they have every attribute, and take any arguments."""

    def __getattr__(cls, name: str) -> Any:
        """Return another such class."""
        if name.startswith("__"):
            raise AttributeError(name)
        return made(name)


def made(name: str) -> Any:
    """Return a class that has every attribute and whose instances can be called."""
    return Anything(name, (Nothing,), {})


class Nothing:
    """What is made of such a class: it takes any arguments, and gives nothing when it is called."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Make it."""

    def __call__(self, *given: Any, **named: Any) -> None:
        """Return nothing."""


class Stub(types.ModuleType):
    """A module in which every name is found."""

    __path__: Sequence[str] = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        """Return a class of its own that takes any arguments."""
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made(name))
        return self.__dict__[name]


class Finder(MetaPathFinder, Loader):
    """Finds the absent modules and all that lies in them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Return a spec for a name that is absent."""
        if fullname.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the stub."""
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it as it is."""


def install() -> None:
    """Let absent modules be found, where they are not really there."""
    sys.meta_path.append(Finder())
