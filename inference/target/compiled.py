"""Passes and the stages of a step, compiled by `torch.compile` or captured in CUDA graphs.

Two graphs serve all passes of one sequence, one for a single token and one for trees of any size, and two more serve
batches: the numbers of nodes, entries and sequences are symbolic. On a GPU a device step captures its own passes in
static shapes: there only the decoder layers are compiled.

A stage is a method of the step. Its tensors are persistent buffers or results of the stage before it, and its shapes
follow from the step's key. So it can be compiled once, and a graph of it that is captured once serves all later steps.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from heads.base import Layers
from inference.target.cache import BatchPass
from inference.target.model import LayerStates, TargetModel, forwards_replaced

log = logging.getLogger(__name__)

BACKEND = "inductor"
RECOMPILE_LIMIT = 1024  # graphs of one function, one for each shape, layer and dtype; dynamo's limit is lower


def raise_recompile_limit() -> None:
    """Raise dynamo's limit of graphs of one function."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, RECOMPILE_LIMIT)


@contextmanager
def compiling(failure: str, option: str) -> Iterator[None]:
    """Context in which torch.compile may compile.

    Raises:
        ValueError: compiling fails: the `failure`, the cause, and the option that avoids it.
    """
    try:
        yield
    except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
        reason = str(getattr(error, "inner_exception", error)).strip().split("\n")[0]
        also = f", of a training eval.{option}=false" if option.startswith("engine.") else ""
        raise ValueError(f"{failure} ({reason}): give {option}=false{also}") from error


class Compiled:
    """One target's compiled passes."""

    def __init__(self, target: TargetModel) -> None:
        target.check_masks("and without one no pass is compiled: give engine.compile=false")
        self.target, self.layer_calls = target, dict[nn.Module, Any]()
        target.few_sizes = True
        raise_recompile_limit()
        self.failure = f"{target.name}: torch.compile fails on its passes", "engine.compile"
        self.compiled = torch.compile(self.forward, fullgraph=True, backend=BACKEND)

    def __call__(
        self,
        token: Tensor,
        position: Tensor,
        attn_mask: Tensor | None,
        batch_pass: BatchPass,
        key_position: Tensor | None,
        layers: Layers,
    ) -> LayerStates:
        """Run a pass as `Target.run` does; return the outputs of the feature `layers` and the last hidden states."""
        if attn_mask is None:
            attn_mask = torch.ones(*token.shape, batch_pass.end, dtype=torch.bool, device=token.device)
        mask = self.target.attention_mask(attn_mask, position, key_position)
        if batch_pass.fixed_shapes:  # only decoder layers are compiled; prompts run uncompiled
            for layer in self.target.decoder_layers:  # equal layers share inductor's code
                if layer not in self.layer_calls:
                    layer.compile(fullgraph=True, backend=BACKEND)
                    self.layer_calls[layer] = layer._compiled_call_impl
                layer._compiled_call_impl = self.layer_calls[layer]
            try:
                with compiling(*self.failure):
                    return self.target.forward(token, position, mask, batch_pass, layers)
            finally:
                for layer in self.target.decoder_layers:
                    layer._compiled_call_impl = None
        for tensor in (token, position, batch_pass.write_index, *_tensors(mask)):
            for dim in range(tensor.dim()):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
        with compiling(*self.failure):
            return self.compiled(
                token, position, mask, batch_pass.keys, batch_pass.values, batch_pass.write_index, layers
            )

    def forward(
        self,
        token: Tensor,
        position: Tensor,
        mask: Any,
        keys: list[Tensor],
        values: list[Tensor],
        write_index: Tensor,
        layers: Layers,
    ) -> LayerStates:
        """The compiled function: a pass as a function of tensors."""
        end = _tensors(mask)[0].shape[-1]
        return self.target.forward(token, position, mask, BatchPass(keys, values, write_index, end), layers)


def compiled_forwards(layers: Iterable[nn.Module]) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that runs decoder layers compiled, for passes over many tokens as in training.

    Attention, which knows the packed documents, and the layers' hooks stay uncompiled. Equal layers share their graphs.
    """
    raise_recompile_limit()
    forwards = {layer: torch.compile(layer.forward, backend=BACKEND) for layer in layers}

    @contextmanager
    def run() -> Iterator[None]:
        with forwards_replaced(forwards), compiling("torch.compile fails on the target's layers", "trainer.compile"):
            yield

    return run


def _tensors(mask: Any) -> list[Tensor]:
    return list(mask.values()) if isinstance(mask, dict) else [mask]


Stage = Callable[..., Any]


# Launching a draft's many small kernels from Python takes longer than running them.
OPTIONS: dict[str, dict[str, Any]] = {"cpu": {"cpp_wrapper": True}}  # compiler options by kind of device


@cache
def compiled(stage: Stage, kind: str) -> Stage:
    """Return a stage compiled for a kind of device and the shapes that it meets, new ones in their first call.

    Raises:
        ValueError: in that call: it cannot be compiled, and why.
    """
    raise_recompile_limit()
    options = OPTIONS.get(kind) if BACKEND == "inductor" else None
    run = torch.compile(stage, fullgraph=True, dynamic=False, backend=BACKEND, options=options)
    return compiling("torch.compile fails on drafts", "engine.compile_drafts")(run)


class StageKeys:
    """A set of keys of stages that is valid while the tensors of the stages have the same addresses."""

    def __init__(self) -> None:
        self.known: set[Any] = set()
        self.addresses: list[int] = []

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Drop all keys if the addresses of the tensors have changed."""
        if self.addresses != (addresses := [tensor.data_ptr() for tensor in tensors]):
            self.addresses = addresses
            self.reset()

    def reset(self) -> None:
        """Drop all keys."""
        self.known.clear()


class StageCache(StageKeys):
    """Calls of compiled stages; dynamo evaluates all guards only in a key's first call.

    Most guards check attributes of the step that follow from its key and the addresses of its buffers; later calls
    evaluate only those that distinguish graphs. No other thread of the process must compile meanwhile: the evaluation
    of guards is a global setting of torch.
    """

    def __call__(self, key: Any, run: Stage, *args: Any) -> Any:
        """Run a compiled stage; equal keys mean equal shapes and branches."""
        if key in self.known:
            try:
                with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                    return run(*args)
            except RuntimeError as error:  # no graph matches this call, and nothing has run
                if "skip_guard_eval_unsafe" not in str(error):
                    raise
        result = run(*args)
        self.known.add(key)
        return result


class Graphs(StageKeys):
    """The stages of a step as CUDA graphs: the first call of a key runs a stage, the second captures it, others replay.

    The first one also makes tables and chooses kernels, which a capture cannot. All stages of a key are captured in the
    same step, so that each reads the output of the captured one before it. After a failed capture, stages run eagerly.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.able = device, True
        self.pool: Any = None
        self.stream: Any = None  # all captures share it: the pool's memory is reused on its own stream only
        self.captured: dict[Any, tuple[Any, Any]] = {}
        super().__init__()

    def reset(self) -> None:
        """Drop all graphs."""
        super().reset()
        self.pool = None
        self.captured.clear()

    def __call__(self, key: Any, stage: Stage, *args: Any) -> Any:
        """Run a stage; the next call with this key overwrites its result."""
        if key in self.known and key not in self.captured and self.able:
            try:
                self.captured[key] = self.capture(stage, *args)
            except RuntimeError as error:
                self.able = False
                log.warning("decoding steps are not captured in CUDA graphs: %s", str(error).strip().split("\n")[0])
        self.known.add(key)
        if key not in self.captured or not self.able:
            return stage(*args)
        graph, result = self.captured[key]
        graph.replay()
        return result

    def capture(self, stage: Stage, *args: Any) -> tuple[Any, Any]:
        """Capture a stage without running it; return the graph and its output tensors."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            self.pool = torch.cuda.graph_pool_handle() if self.pool is None else self.pool
            self.stream = torch.cuda.Stream(self.device) if self.stream is None else self.stream
            before = torch.cuda.current_stream(self.device)
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    result = stage(*args)
            except RuntimeError:  # torch does not undo this after a failed capture
                torch.cuda.set_stream(before)
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(before.device_index, self.pool)
                raise
        return graph, result
