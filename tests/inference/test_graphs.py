"""What a capture that fails leaves behind."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference.graphs import Graphs


def test_a_failed_capture_leaves_its_stream_and_ends_its_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch leaves both as they are where the capture cannot be ended, and all that follows would fail."""
    here, ended = SimpleNamespace(device_index=1), list[tuple[int, str]]()
    state = {"stream": here}

    @contextmanager
    def graph(_graph: Any, *, stream: Any, **_: Any) -> Iterator[None]:
        state["stream"] = stream
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    fakes = {"CUDAGraph": object, "device": lambda _: nullcontext(), "graph_pool_handle": lambda: "pool",
             "Stream": lambda _: SimpleNamespace(device_index=1), "current_stream": lambda _: state["stream"],
             "set_stream": lambda stream: state.update(stream=stream), "graph": graph}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *what: ended.append(what), raising=False)
    graphs = Graphs(torch.device("cuda:1"))
    assert [graphs("key", lambda: 3) for _ in range(2)] == [3, 3]
    assert not graphs.able
    assert state["stream"] is here
    assert ended == [(1, "pool")]
