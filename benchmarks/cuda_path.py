"""The path that a step takes on CUDA, for fake tensors, which are a CPU's.

torch has no fake tensors of a device that its build does not know, so those of a CPU stand for them, and the choices
that follow from a device are replaced: which attention runs, how gradients of a vocabulary are summed, whether the norm
and the optimiser are fused. A kernel that a CPU lacks becomes an operator of its sizes, and another one for its
gradient.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from heads.modules import attention, flex, vocab
from train import optim


@contextmanager
def cuda_path() -> Iterator[None]:
    """Let fake tensors of a CPU take the path of CUDA."""
    with ExitStack() as patches:
        for module, name, there in (
            (attention, "runs_fused", runs_fused),
            (attention, "attend_fused", attend_fused),
            (vocab, "SUMS_WIDE", ("cpu",)),
            (optim, "FUSED", ("cpu",)),
            (functional, "rms_norm", rms_norm),
        ):
            patches.enter_context(patch.object(module, name, there))
        yield


def runs_fused(query: Tensor, value: Tensor) -> bool:
    """Whether a head's rows in training are what the fused kernel takes on a device with room for all its blocks."""
    return flex.fits(query, value, flex.WIDE)


def attend_fused(query: Tensor, pairs: list[tuple[Tensor, Tensor]], _seen: attention.Pattern) -> Tensor:
    """Attend as `heads.modules.attention.attend_fused` does, by the operator that stands for its kernel.

    Without its mask of tiles, which is thousands of times smaller than the rows, and would be a third of a trace.
    """
    key, value = (torch.cat(halves, 2) for halves in zip(*pairs, strict=True))
    length, steps = pairs[0][0].shape[2], len(pairs) - 1
    # Of one document: a query sees half of the rows, and of each step the tile that its row is in.
    out: Tensor = torch.ops.headstart.attention(query, key, value, length - length // 2 + flex.TILE * steps)[0]
    return out


def rms_norm(x: Tensor, _shape: torch.Size, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Return the norm of the last dimension, by the operator that stands for its kernel."""
    del eps
    out: Tensor = torch.ops.headstart.rms_norm(x)[0]
    return out if weight is None else out * weight


def _norm(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))


def _norm_backward(grad: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    del x, scale
    return torch.empty_like(grad)


def _keep_norm(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])


def _forward(query: Tensor, key: Tensor, value: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    del key, keys
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(query.shape[:3], dtype=torch.float32)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, keys: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del grad, out, keys
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), torch.empty_like(lse)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.keys = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradient(ctx: Any, grad: Tensor, _lse: Tensor) -> tuple[Tensor | None, ...]:
    gradients: Any = torch.ops.headstart.attention_backward(grad, *ctx.saved_tensors, ctx.keys)
    return (*gradients[:3], None)


# The fused kernel of queries that are each multiplied with so many `keys`, and its gradient, whose fourth result is the
# rowsum of the output with its gradient.
_attention = torch.library.custom_op("headstart::attention", _forward, mutates_args=())
_attention_backward = torch.library.custom_op("headstart::attention_backward", _backward, mutates_args=())
_attention.register_fake(_forward)
_attention.register_autograd(_gradient, setup_context=_keep)
_attention_backward.register_fake(_backward)

# The norm, whose second result is what it divides by; and its gradient.
_rms_norm = torch.library.custom_op("headstart::rms_norm", _norm, mutates_args=())
_rms_norm_backward = torch.library.custom_op("headstart::rms_norm_backward", _norm_backward, mutates_args=())
_rms_norm.register_fake(_norm)
_rms_norm.register_autograd(
    lambda ctx, grad, _: torch.ops.headstart.rms_norm_backward(grad, *ctx.saved_tensors), setup_context=_keep_norm
)
_rms_norm_backward.register_fake(_norm_backward)


@register_flop_formula(torch.ops.headstart.attention)
def _flops(query: Any, _key: Any, value: Any, keys: int, **_: Any) -> int:
    """Return the operations of two products."""
    return 2 * math.prod(query[:3]) * keys * (query[3] + value[3])


@register_flop_formula(torch.ops.headstart.attention_backward)
def _backward_flops(_grad: Any, query: Any, _key: Any, value: Any, _out: Any, _lse: Any, keys: int, **_: Any) -> int:
    """Return the operations of five products, three of them as wide as queries."""
    return 2 * math.prod(query[:3]) * keys * (3 * query[3] + 2 * value[3])
