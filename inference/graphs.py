"""How the stages of a device step run: each by itself, compiled by torch.compile, or captured in CUDA graphs.

A stage is a method of the step whose tensors are buffers that stay, or what the stage before it gave, and whose shapes
follow from the step's key. So it can be compiled once, and a graph of it that is captured once serves all later steps.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Stage = Callable[..., Any]
BACKEND = "inductor"
FORMS = 1024  # of a stage, one for every tree, size of a batch and dtype; dynamo's own limit is lower


@cache
def compiled(stage: Stage) -> Stage:
    """Return a stage compiled for the shapes that it meets.

    Its first call with new ones compiles it, or raises a ValueError that says why it cannot.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, FORMS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, FORMS)
    run = torch.compile(stage, fullgraph=True, dynamic=False, backend=BACKEND)

    def call(*args: Any) -> Any:
        try:
            return run(*args)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            reason = str(getattr(error, "inner_exception", error)).strip().split("\n")[0]
            raise ValueError(f"torch.compile fails on drafts ({reason}): give engine.compile_drafts=false") from error

    return call


class Graphs:
    """The stages of a step as CUDA graphs: the first call of a key runs a stage, the second captures it, others replay.

    The first one also makes tables and chooses kernels, which a capture cannot. All stages of a key are captured in the
    same step, so that each reads what the captured one before it writes. Once a capture fails, stages run as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.able = device, True
        self.pool: Any = None
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
            stream = torch.cuda.Stream(self.device)
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                result = stage(*args)
        return graph, result
