"""The target's verification passes, compiled by `torch.compile`.

Two graphs serve all passes of one sequence, one for a single token and one for trees of any size, and two more serve
batches: the numbers of nodes, entries and sequences are symbolic. On a GPU a device step captures its own passes in
static shapes: there only the decoder layers are compiled.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from inference.target.cache import BatchPass, Pool
from inference.target.model import TargetModel, forwards_replaced

BACKEND = "inductor"
FORMS = 1024  # graphs of one function, one for each shape, layer and dtype; dynamo's limit is lower


def allow_forms() -> None:
    """Raise dynamo's limit of graphs of one function."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, FORMS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, FORMS)


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
        self.target = target
        target.pool = Pool(target.pool.layout, few_sizes=True)
        allow_forms()
        self.compiled = torch.compile(self.forward, fullgraph=True, backend=BACKEND)

    def __call__(
        self,
        token: Tensor,
        position: Tensor,
        attn_mask: Tensor | None,
        batch_pass: BatchPass,
        key_position: Tensor | None,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Run a pass as `Target.run` does; return the outputs of the feature `layers` and the last hidden states."""
        if attn_mask is None:
            attn_mask = torch.ones(*token.shape, batch_pass.end, dtype=torch.bool, device=token.device)
        mask = self.target.attention_mask(attn_mask, position, key_position)
        if batch_pass.steady:
            with self.compiling(), self.compiled_layers():
                return self.target.forward(token, position, mask, batch_pass, layers)
        for tensor in (token, position, batch_pass.write_index, *_tensors(mask)):
            for dim in range(tensor.dim()):
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
        with self.compiling():
            return self.compiled(
                token, position, mask, batch_pass.keys, batch_pass.values, batch_pass.write_index, layers
            )

    @cached_property
    def layer_calls(self) -> list[Any]:
        """The decoder layers' forward methods, each compiled separately: equal layers share inductor's code."""
        calls = []
        for layer in self.target.decoder_layers:
            layer.compile(fullgraph=True, backend=BACKEND)
            calls.append(layer._compiled_call_impl)
        return calls

    @contextmanager
    def compiled_layers(self) -> Iterator[None]:
        """Run the decoder layers compiled for a while; prompts, of any length, run uncompiled."""
        for layer, call in zip(self.target.decoder_layers, self.layer_calls, strict=True):
            layer._compiled_call_impl = call
        try:
            yield
        finally:
            for layer in self.target.decoder_layers:
                layer._compiled_call_impl = None

    def compiling(self) -> AbstractContextManager[None]:
        """See `compiling`."""
        return compiling(f"{self.target.name}: torch.compile fails on its passes", "engine.compile")

    def forward(
        self,
        token: Tensor,
        position: Tensor,
        mask: Any,
        keys: list[Tensor],
        values: list[Tensor],
        write_index: Tensor,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """The compiled function: a pass as a function of tensors."""
        end = _tensors(mask)[0].shape[-1]
        return self.target.forward(token, position, mask, BatchPass(keys, values, write_index, end), layers)


def compiled_forwards(layers: Iterable[nn.Module]) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that runs decoder layers compiled, for passes over many tokens as in training.

    Attention, which knows the packed documents, and the layers' hooks stay uncompiled. Equal layers share their graphs.
    """
    allow_forms()
    forwards = {layer: torch.compile(layer.forward, backend=BACKEND) for layer in layers}

    @contextmanager
    def run() -> Iterator[None]:
        with forwards_replaced(forwards), compiling("torch.compile fails on the target's layers", "trainer.compile"):
            yield

    return run


def _tensors(mask: Any) -> list[Tensor]:
    return list(mask.values()) if isinstance(mask, dict) else [mask]
