"""A forward pass over packed documents on a dummy accelerator, which raises where a host would wait for it.

Started as a script, it prints as JSON what each case in its arguments launches: a toy target, what attends, and how
many documents are packed in each of two rows. Registering a device is for good, so it has a process of its own.
"""

import inspect
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from heads.modules import flex
from inference.target import attention
from inference.target.attention import Span
from tests import toys
from tests.inference.accelerator import NAME, Watch, on_dummy

ROWS, LENGTH = 2, 64


def counted(target: Any, kernel: str, documents: int) -> dict[str, int]:
    """Return the launches of a pass in all, its attentions, and its copies from the host."""
    on_dummy(target.model)
    target.device = torch.device(NAME)
    apart: Counter[str] = Counter()

    def arrived(x: Tensor, device: torch.device) -> Tensor:
        apart["copies"] += 1
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    def one_call(query: Tensor, _key: Tensor, value: Tensor, **_: Any) -> Tensor:
        apart["flex"] += 1
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    def offered(_device: torch.device) -> frozenset[str]:
        return frozenset(inspect.signature(varlen_attn).parameters)

    size = LENGTH // documents
    spans = [Span(row, begin, begin + size) for row in range(ROWS) for begin in range(0, LENGTH, size)]
    token = torch.empty(ROWS, LENGTH, dtype=torch.long, device=NAME)
    with pytest.MonkeyPatch.context() as patch, Watch() as watch:
        patch.setattr(attention, "route", lambda *_: kernel)
        patch.setattr(attention, "varlen_options", offered)
        patch.setattr(attention, "to_device", arrived)
        patch.setattr(flex, "kernel", lambda: one_call)  # torch's runs on devices that it knows alone
        target.own_features(token, token, (0,), spans)
    called = watch.counts["torch_attn._varlen_attn.default"] + apart["flex"]
    return {"launches": watch.counts.total(), "attentions": called, "copies": apart["copies"]}


def main() -> None:
    """Print the counts of every case, or what it raised."""
    _setup_privateuseone_for_python_backend(NAME)
    for case in sys.argv[1:]:
        name, kernel, documents = case.split(":")
        target: Any = toys.target.__wrapped__(name, torch.bfloat16)  # its parameters are replaced
        with FakeTensorMode(allow_non_fake_inputs=True):
            try:
                found: Any = counted(target, kernel, int(documents))
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
        print(json.dumps({case: found}), flush=True)


if __name__ == "__main__":
    main()
