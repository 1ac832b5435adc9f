"""The target's verification passes, compiled by `torch.compile`.

On a CPU two graphs serve all passes of one sequence, one for a single token and one for trees of any size, and two
more serve batches: the numbers of nodes, entries and sequences are symbolic. On a GPU each pass is a CUDA graph, since
launches are expensive; nodes, entries and sequences are padded to a few sizes. A device step captures its own passes in
static shapes: there only the decoder layers are compiled.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from inference.target.cache import BatchPass, Pool, round_up_kv_length
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
    """One target's compiled passes; if `static`, padded to a few sizes, each a CUDA graph."""

    def __init__(self, target: TargetModel) -> None:
        target.check_masks("and without one no pass is compiled: give engine.compile=false")
        self.target = target
        self.static = target.device.type == "cuda"
        target.pool = Pool(target.pool.layout, fixed=True)
        allow_forms()
        mode = "reduce-overhead" if target.device.type == "cuda" else None
        self.compiled = torch.compile(self.forward, fullgraph=True, backend=BACKEND, mode=mode)

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
        batch, count = token.shape
        if attn_mask is None:
            attn_mask = torch.ones(batch, count, batch_pass.end, dtype=torch.bool, device=token.device)
        if batch_pass.steady:
            with self.compiling(), self.compiled_layers():
                return self.target.forward(
                    token, position, self.target.attention_mask(attn_mask, position, key_position), batch_pass, layers
                )
        if self.static:
            token, position, attn_mask, batch_pass, key_position = padded(
                token, position, attn_mask, batch_pass, key_position
            )
        mask = self.target.attention_mask(attn_mask, position, key_position)
        if self.static:
            torch.compiler.cudagraph_mark_step_begin()
        else:
            for tensor in (token, position, batch_pass.write_index, *_tensors(mask)):
                for dim in range(tensor.dim()):
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
        with self.compiling():
            hidden, last = self.compiled(
                token, position, mask, batch_pass.keys, batch_pass.values, batch_pass.write_index, layers
            )
        if not self.static:
            return hidden, last
        return hidden[:batch, :count].clone(), last[:batch, :count].clone()  # the next pass overwrites them

    @cached_property
    def layer_calls(self) -> list[Any]:
        """The decoder layers' forward methods, each compiled alone: equal layers share inductor's code."""
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


def padded(
    token: Tensor, position: Tensor, attn_mask: Tensor, batch_pass: BatchPass, key_position: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, BatchPass, Tensor | None]:
    """Return a pass with its nodes padded to a power of two, its entries to a stride, its sequences to all slots.

    Padding writes after the pass's own entries and to idle slots; both are overwritten before they are read. Padding
    attends to the first entry, since a fully masked row would be NaN.
    """
    batch, count, end = attn_mask.shape
    width, slots = 1 << (count - 1).bit_length(), len(batch_pass.keys[0])
    more, idle, reach = width - count, slots - batch, round_up_kv_length(end + width - count)
    attn_mask = pad(attn_mask, (0, reach - end, 0, more, 0, idle))
    attn_mask[:, count:, 0] = True
    attn_mask[batch:, :, 0] = True
    behind = batch_pass.write_index[:, -1:] + torch.arange(1, more + 1, device=token.device)
    unused = torch.arange(width, device=token.device).expand(idle, -1)
    batch_pass = batch_pass._replace(
        write_index=torch.cat([torch.cat([batch_pass.write_index, behind], 1), unused]), end=reach
    )
    token, position = (pad(tensor, (0, more, 0, idle)) for tensor in (token, position))
    return (
        token,
        position,
        attn_mask,
        batch_pass,
        None if key_position is None else pad(key_position, (0, reach - end, 0, idle)),
    )
