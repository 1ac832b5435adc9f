"""Where a host would wait for an accelerator: a CPU's tensors are followed as if they lay on a device of their own."""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
READING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive")
INDEXING = ("index", "index_put", "index_put_")  # by flags they look for those that are set


class Following(TorchDispatchMode):
    """Follows modules' tensors, what is moved with `to`, and all that is computed of either; notes what waits for them.

    `noted` has the project's file and function of every read by the host and of every copy that waits.
    """

    def __init__(self, *modules: nn.Module) -> None:
        init: Any = super().__init__
        init()
        self.known: set[int] = set()
        self.noted: list[str] = []
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self.follow(tensor)

    def follow(self, tensor: Tensor) -> Tensor:
        """Follow a tensor as long as it lives."""
        storage = tensor.untyped_storage()
        if id(storage) not in self.known:
            self.known.add(id(storage))
            weakref.finalize(storage, self.known.discard, id(storage))
        return tensor

    def lies_there(self, tensor: Tensor) -> bool:
        """Whether a tensor is followed."""
        return id(tensor.untyped_storage()) in self.known

    @staticmethod
    def ours(file: str) -> bool:
        """Whether a file is the project's, and no library's in an environment that lies in the checkout."""
        return file.startswith(str(ROOT)) and "site-packages" not in file

    def note(self) -> None:
        """Note the line of the project that is running."""
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename == __file__ or not self.ours(frame.f_code.co_filename):
            frame = frame.f_back
        where = Path(frame.f_code.co_filename).relative_to(ROOT)
        self.noted.append(f"{where}:{frame.f_code.co_name}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and follow what it gives if it takes something that is followed."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        followed = any(map(self.lies_there, given))
        name = func.__name__.partition(".")[0]
        by_flags = name in INDEXING and any(index.dtype == torch.bool for index in given[1:])
        if followed and (name in READING or by_flags):
            self.note()
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if followed and isinstance(leaf, Tensor):
                self.follow(leaf)
        return out


@contextmanager
def followed(monkeypatch: pytest.MonkeyPatch, *modules: nn.Module) -> Iterator[list[str]]:
    """Note every wait of the host for what these modules hold and for what is computed with it."""
    mode = Following(*modules)
    to, made = Tensor.to, torch.tensor

    def reading(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if mode.lies_there(self):
                mode.note()
                self = self.clone()
                mode.known.discard(id(self.untyped_storage()))  # what is read of a copy is the host's
            return original(self, *args, **kwargs)

        return read

    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = to(self, *args, **kwargs)
        places = [arg for arg in (*args, kwargs.get("device")) if isinstance(arg, torch.device)]
        places += [arg for arg in args if isinstance(arg, Tensor) and mode.lies_there(arg)]
        if mode.lies_there(self) or not places:
            return out
        if sys._getframe(1).f_code.co_name != "to_device":
            mode.note()
        return mode.follow(out.clone())

    def from_numbers(*args: Any, **kwargs: Any) -> Tensor:
        out = made(*args, **kwargs)
        if kwargs.get("device") is None:
            return out
        mode.note()
        return mode.follow(out)

    with monkeypatch.context() as patch, mode:
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(Tensor, name, reading(name))
        patch.setattr(Tensor, "to", moved)
        patch.setattr(torch, "tensor", from_numbers)
        yield mode.noted
