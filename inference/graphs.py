"""How the stages of a device step run: eagerly, compiled by torch.compile, or captured in CUDA graphs.

A stage is a method of the step whose tensors are buffers that stay, or what the stage before it gave, and whose shapes
follow from the step's key. So it can be compiled once, and a graph of it that is captured once serves all later steps.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from inference.target import compiled as passes

log = logging.getLogger(__name__)

Stage = Callable[..., Any]


# Launching a draft's many small kernels from Python would take longer than they do.
OPTIONS: dict[str, dict[str, Any]] = {"cpu": {"cpp_wrapper": True}}  # of the compiler, by kind of device


@cache
def compiled(stage: Stage, kind: str) -> Stage:
    """Return a stage compiled for a kind of device and the shapes that it meets, new ones in their first call.

    Raises:
        ValueError: in that call: it cannot be compiled, and why.
    """
    passes.allow_forms()
    options = OPTIONS.get(kind) if passes.BACKEND == "inductor" else None
    run = torch.compile(stage, fullgraph=True, dynamic=False, backend=passes.BACKEND, options=options)

    def call(*args: Any) -> Any:
        with passes.compiling("torch.compile fails on drafts", "engine.compile_drafts"):
            return run(*args)

    return call


class StageCache:
    """Calls of compiled stages, whose guards dynamo evaluates in full only in a key's first call.

    Most of them ask attributes of the step what its key and the addresses of its buffers say already; later calls
    evaluate those that tell one graph from another. No other thread of the process may compile meanwhile: how guards
    are evaluated is one setting of torch for all.
    """

    def __init__(self) -> None:
        self.known: set[Any] = set()
        self.addresses: list[int] = []

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Forget all keys unless the tensors that stages read and write are where they were."""
        if self.addresses != (addresses := [tensor.data_ptr() for tensor in tensors]):
            self.addresses = addresses
            self.known.clear()

    def __call__(self, key: Any, run: Stage, *args: Any) -> Any:
        """Run a compiled stage; its key tells its shapes and branches from all others."""
        if key in self.known:
            try:
                with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                    return run(*args)
            except RuntimeError as error:  # no graph is for this call: nothing has run
                if "skip_guard_eval_unsafe" not in str(error):
                    raise
        result = run(*args)
        self.known.add(key)
        return result


class Graphs:
    """The stages of a step as CUDA graphs: the first call of a key runs a stage, the second captures it, others replay.

    The first one also makes tables and chooses kernels, which a capture cannot. All stages of a key are captured in the
    same step, so that each reads what the captured one before it writes. Once a capture fails, stages run as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.able = device, True
        self.pool: Any = None
        self.stream: Any = None  # of all captures: memory of the pool is used again on the stream that it was used on
        self.met: set[Any] = set()
        self.captured: dict[Any, tuple[Any, Any]] = {}
        self.addresses: list[int] = []

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Keep the graphs if the tensors that stages read and write are where they were; else drop them all."""
        if self.addresses != (addresses := [tensor.data_ptr() for tensor in tensors]):
            self.addresses, self.pool = addresses, None
            self.met.clear()
            self.captured.clear()

    def __call__(self, key: Any, stage: Stage, *args: Any) -> Any:
        """Run a stage; what it returns is written over by the next call with this key."""
        if key in self.met and key not in self.captured and self.able:
            try:
                self.captured[key] = self.capture(stage, *args)
            except RuntimeError as error:
                self.able = False
                log.warning("decoding steps are not captured in CUDA graphs: %s", str(error).strip().split("\n")[0])
        self.met.add(key)
        if key not in self.captured or not self.able:
            return stage(*args)
        graph, result = self.captured[key]
        graph.replay()
        return result

    def capture(self, stage: Stage, *args: Any) -> tuple[Any, Any]:
        """Capture a stage, which does not run it; return the graph and what it will write its results to."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            self.pool = torch.cuda.graph_pool_handle() if self.pool is None else self.pool
            self.stream = torch.cuda.Stream(self.device) if self.stream is None else self.stream
            before = torch.cuda.current_stream(self.device)
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    result = stage(*args)
            except RuntimeError:  # what torch leaves as it is where a capture cannot be ended
                torch.cuda.set_stream(before)
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(before.device_index, self.pool)
                raise
        return graph, result
