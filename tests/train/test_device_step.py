"""What the loss asks of an accelerator: rows sent in one copy, sums in fp32, bounded memory."""

import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from benchmarks.training_kernels import embeddings_of
from heads.base import DepthOutput, Features, HeadModule
from heads.modules.vocab import DraftLmHead, GradientAccumulator
from tests.train.test_objective import CONFIG, all_at_once
from train.objective import chunk_rows, chunked, loss_weights, objective, trainable
from train.step import Flops


class Moves(TorchDispatchMode):
    """Notes what copies from the host to a device, and what else touches one."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[bool] = []
        self.there: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        parts = (args, kwargs), out
        inputs, outputs = ({x.device.type for x in tree_leaves(some) if isinstance(x, Tensor)} for some in parts)
        if inputs == {"cpu"} and outputs - {"cpu"}:
            self.copies.append(bool((kwargs or {}).get("non_blocking")))
        elif inputs | outputs != {"cpu"} and not func.is_view:
            self.there[str(func)] += 1
        return out


def test_rows_are_picked_on_the_host_and_sent_in_one_copy() -> None:
    torch.manual_seed(0)
    trained = torch.rand(3, 2, 50) < 0.4
    trained[:, :, -3:] = False
    with Moves() as moves:
        there = chunked(trained, 16, torch.device("meta"))
    assert (moves.copies, moves.there) == ([True], {})
    here = chunked(trained, 16, torch.device("cpu"))
    shapes = [[x.shape for x in tree_leaves(chunks)] for chunks in (here, there)]
    assert shapes[0] == shapes[1]
    for depth in range(1, 4):
        source = torch.cat([by_depth[depth - 1].source for _, by_depth in here])
        assert source.equal(trained[depth - 1].flatten().nonzero()[:, 0])
        for teacher, by_depth in here:
            assert len(teacher) <= 16
            assert teacher[by_depth[depth - 1].position].equal(by_depth[depth - 1].source + depth)


class Wide(TorchDispatchMode):
    """Stands in for the overload of `addmm` that only CUDA has."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.addmm.dtype_out:
            return func(*args, **(kwargs or {}))
        total, d_logits, hidden, dtype = args
        assert (total.dtype, d_logits.dtype, hidden.dtype) == (dtype, torch.bfloat16, torch.bfloat16)
        assert kwargs["out"] is total
        return total


def test_narrow_products_are_summed_in_fp32_on_a_device() -> None:
    """Their dtypes are those that CUDA asks for, and their operations are counted."""
    counter: Any = Flops
    with FakeTensorMode(), Wide(), counter() as count:
        weight = torch.empty(7, 4, device="cuda")
        gradient = GradientAccumulator(weight)
        for _ in range(2):
            gradient.add(*(torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((7, 3), (3, 4))))
    assert gradient.total is not None
    assert (gradient.total.dtype, gradient.total.shape) == (torch.float32, weight.shape)
    assert count.total == 2 * 2 * 7 * 3 * 4


class Plain(HeadModule):
    """A head that is an lm_head of its own over a target's vocabulary."""

    feature_layers = max_depth = has_kv_cache = None

    def __init__(self, vocab: int, width: int) -> None:
        config = LlamaConfig(hidden_size=width, vocab_size=vocab, num_hidden_layers=1, num_attention_heads=1)
        super().__init__(SimpleNamespace(draft_vocab=None), embeddings_of(config, torch.float32))
        self.lm_head = DraftLmHead(self.embeddings, "own", None)

    def compute_logits(self, state: Tensor, _depth: int) -> Tensor:
        return self.lm_head(state)

    unroll = extend = expand = compute_logits  # the loss calls none of these


class Allocations(TorchDispatchMode):
    """Notes the most bytes that the results of operations on fake tensors have at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):  # an input that was there before
                self.count(leaf.untyped_storage(), 0)
        out = 1 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.count(leaf.untyped_storage(), leaf.untyped_storage().nbytes())
        return out

    def count(self, storage: Any, size: int) -> None:
        """Count a storage until it is freed, unless it is counted already."""
        if id(storage) not in self.known:
            self.known.add(id(storage))
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.release, id(storage), size)

    def release(self, key: int, size: int) -> None:
        """Remove a freed storage."""
        self.known.discard(key)
        self.live -= size


def peak(rows: int, depths: int, width: int, *, whole: bool) -> int:
    """Return the bytes that loss and gradient of a vocabulary of 128,256 take above their inputs.

    The last rows are trained at no depth, so that what teaches a depth is gathered, as of any text.
    """
    head: Any = Plain(128_256, width)
    of, token, states = replace(CONFIG, depths=depths), torch.zeros(1, rows).long(), torch.zeros(1, rows, width)
    features = Features(token, states[:, :, None][:, :, :0], states, token)
    drafts = [DepthOutput(states.clone().requires_grad_()) for _ in range(depths)]
    weight = loss_weights(token, trainable(token, token + 1, of.depths), None, of).row
    chunks = chunked(weight > 0, rows if whole else chunk_rows(head, "cuda", weight.numel()), torch.device("cpu"))
    quick = torch.autocast("cpu", torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True), Allocations() as allocated, quick:
        if whole:
            loss, _ = all_at_once(head, drafts, features, weight, of, parts=chunks)
        else:
            loss, _ = objective(head, drafts, features, weight, of, chunks)
        loss.backward()
    return allocated.peak


def test_the_loss_in_chunks_of_a_device_takes_a_sixth_of_all_rows_at_once() -> None:
    assert peak(4096, 5, 8, whole=True) >= 6 * peak(4096, 5, 8, whole=False) > 0
