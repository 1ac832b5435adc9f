"""How the stages of a device step run: each by itself, compiled by torch.compile, or captured in CUDA graphs.

A stage is a method of the step whose tensors are buffers that stay, or what the stage before it gave, and whose shapes
follow from the step's key. So it can be compiled once, and a graph of it that is captured once serves all later steps.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Stage = Callable[..., Any]
BACKEND = "inductor"
FORMS = 64  # of a stage, one for every tree, size of a batch and dtype; dynamo's own limit is lower


@cache
def compiled(stage: Stage) -> Stage:
    """Return a stage compiled for the shapes that it meets.

    Its first call with new ones compiles it, or raises a ValueError that says why it cannot.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FORMS)
    run = torch.compile(stage, fullgraph=True, dynamic=False, backend=BACKEND)

    def call(*args: Any) -> Any:
        try:
            return run(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(getattr(error, "inner_exception", error)).strip().split("\n")[0]
            raise ValueError(f"torch.compile fails on drafts ({reason}): give engine.compile_drafts=false") from error

    return call


class Graphs:
    """The stages of a step as CUDA graphs: the first call of a key runs a stage, the second captures it, others replay.

    The first one also makes tables and chooses kernels, which a capture cannot. All stages of a key are captured in the
    same step, so that each reads what the captured one before it writes.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self.met: set[Any] = set()
        self.captured: dict[Any, tuple[Any, Any]] = {}

    def clear(self) -> None:
        """Drop all graphs: buffers that they read and write have moved."""
        self.met.clear()
        self.captured.clear()

    def __call__(self, key: Any, stage: Stage, *args: Any) -> Any:
        """Run a stage; what it returns is written over by the next call with this key."""
        if key not in self.met:
            self.met.add(key)
            return stage(*args)
        if key not in self.captured:
            self.captured[key] = self.capture(stage, *args)
        graph, result = self.captured[key]
        graph.replay()
        return result

    def capture(self, stage: Stage, *args: Any) -> tuple[Any, Any]:
        """Capture a stage, which does not run it; return the graph and what it will write its results to."""
        self.pool = torch.cuda.graph_pool_handle() if self.pool is None else self.pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = stage(*args)
        return graph, result
