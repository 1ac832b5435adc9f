"""The target's verification passes, compiled by `torch.compile`.

On a CPU two graphs serve all passes of one sequence, one for a single token and one for trees of any size, and two
more those of a batch: the numbers of nodes, rows and sequences are symbols in them. On a GPU every launch costs, so
each pass is a CUDA graph: of few sizes, to which nodes, rows and sequences are padded. A device step captures its
passes itself, in shapes that stay: there only the decoder layers are compiled.
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
FORMS = 1024  # of one piece of code, one for every shape, layer and dtype; dynamo's own limit is lower


def allow_forms() -> None:
    """Let dynamo compile as many forms of one piece of code as there may be."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, FORMS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, FORMS)


@contextmanager
def compiling(failure: str, option: str) -> Iterator[None]:
    """Run what torch.compile may compile now.

    Raises:
        ValueError: it cannot: the `failure`, why, and the option that does without.
    """
    try:
        yield
    except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
        reason = str(getattr(error, "inner_exception", error)).strip().split("\n")[0]
        also = f", of a training eval.{option}=false" if option.startswith("engine.") else ""
        raise ValueError(f"{failure} ({reason}): give {option}=false{also}") from error


class Compiled:
    """One target's compiled passes; if `static` padded to a few sizes, each a graph, as CUDA graphs need it."""

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
        return hidden[:batch, :count].clone(), last[:batch, :count].clone()  # the next pass writes over them

    @cached_property
    def layer_calls(self) -> list[Any]:
        """The decoder layers' calls, each compiled by itself: what inductor makes of one serves all that are alike."""
        calls = []
        for layer in self.target.decoder_layers:
            layer.compile(fullgraph=True, backend=BACKEND)
            calls.append(layer._compiled_call_impl)
        return calls

    @contextmanager
    def compiled_layers(self) -> Iterator[None]:
        """Let the decoder layers run compiled for a while: prompts, of any length, run as they are."""
        for layer, call in zip(self.target.decoder_layers, self.layer_calls, strict=True):
            layer._compiled_call_impl = call
        try:
            yield
        finally:
            for layer in self.target.decoder_layers:
                layer._compiled_call_impl = None

    def compiling(self) -> AbstractContextManager[None]:
        """Run what may be compiled now; see `compiling`."""
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
        """Run a pass, as a function of tensors alone: what is compiled."""
        end = _tensors(mask)[0].shape[-1]
        return self.target.forward(token, position, mask, BatchPass(keys, values, write_index, end), layers)


def compiled_forwards(layers: Iterable[nn.Module]) -> Callable[[], AbstractContextManager[None]]:
    """Return what lets decoder layers run compiled, each by itself: for passes over many tokens, as in training.

    Attention, which knows the documents of packed sequences, and the hooks of layers stay outside of what is compiled.
    Layers that are alike share their graphs.
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
    """Return a pass with its nodes padded to a power of two, its rows to a stride, its sequences to all slots.

    Padding writes behind the pass's own rows, and to slots without a sequence: both are written to again before anyone
    sees them. It sees the first row, since a row that saw nothing would be NaN.
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
