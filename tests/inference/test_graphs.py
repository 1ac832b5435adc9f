"""When stages are captured, and what a capture that fails leaves behind."""

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


def test_a_second_call_is_captured_and_the_next_ones_replayed_until_a_buffer_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, pools, buffers = list[str](), list[object](), [torch.zeros(1), torch.zeros(1)]

    @contextmanager
    def graph(_graph: Any, *, pool: object, **_: Any) -> Iterator[None]:
        pools.append(pool)
        yield

    fakes = {"CUDAGraph": lambda: SimpleNamespace(replay=lambda: calls.append("replay")), "graph_pool_handle": object,
             "device": lambda _: nullcontext(), "Stream": lambda _: None, "current_stream": lambda _: None,
             "graph": graph}  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs = Graphs(torch.device("cuda:1"))
    for buffer in (0, 0, 1):
        graphs.keep([buffers[buffer]])
        for key in "aabb":
            graphs(key, calls.append, key)
    captured = [word for key in "ab" for word in (key, key, "replay")]
    assert calls == [*captured, *["replay"] * 4, *captured]
    assert [pools.index(pool) for pool in pools] == [0, 0, 2, 2]
