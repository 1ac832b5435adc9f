"""One micro-batch of a head, followed without numbers: what it takes of memory and of computation.

The head's own code runs on torch's fake tensors, which have shapes and no values: unroll, loss and backward pass. So a
plan holds for every head, option and recomputation, and there is no formula beside the code that could go stale. What
depends on values is taken at its largest: every row is trained.
"""

import weakref
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from heads import HEADS
from heads.base import Features, LayerShape
from heads.modules.layers import Recomputing
from heads.modules.rope import Rotary
from train.adapt import adapt
from train.distributed.processes import LARGE
from train.objective import ROWS, objective, suited

CHUNKS = 2  # of the loss that are followed: the others are like them


class Size(NamedTuple):
    """Bytes in blocks of LARGE and more, and in smaller ones."""

    large: int
    small: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.large + self.small

    def __add__(self, other: Any) -> "Size":
        """Return both together."""
        return Size(self.large + other[0], self.small + other[1])

    def less(self, other: "Size") -> "Size":
        """Return what is above another, not below nothing."""
        return Size(max(0, self.large - other.large), max(0, self.small - other.small))

    def most(self, other: "Size") -> "Size":
        """Return the larger of each kind."""
        return Size(max(self.large, other.large), max(self.small, other.small))

    def times(self, factor: int | float) -> "Size":
        """Return a multiple."""
        return Size(round(self.large * factor), round(self.small * factor))


NONE = Size(0, 0)


def block(size: int) -> Size:
    """Return the size of one block."""
    return Size(size, 0) if size >= LARGE else Size(0, size)


class Embeddings:
    """The ends of a target that is not there: its shapes, and weights without values."""

    def __init__(self, width: int, vocab: int, layers: int, layer: LayerShape, dtype: torch.dtype) -> None:
        self.hidden_size, self.vocab_size, self.num_layers, self.layer = width, vocab, layers, layer
        self.weight = torch.empty(vocab, width, dtype=dtype)
        self.some: Tensor | None = None

    def embed(self, token: Int[Tensor, "*n"]) -> Float[Tensor, "*n D"]:
        """Return embeddings."""
        return functional.embedding(token, self.weight)

    def logits(self, hidden: Float[Tensor, "*n D"], ids: Int[Tensor, "W"] | None = None) -> Float[Tensor, "*n W"]:
        """Return logits; the rows of a pruned vocabulary are kept, as a target's ends keep them."""
        if ids is not None and self.some is None:
            self.some = self.weight[ids]
        weight = self.weight if ids is None else self.some
        assert weight is not None
        return functional.linear(hidden.to(weight.dtype), weight)

    def head_weight(self) -> Float[Tensor, "V D"]:
        """Return the lm_head's weight."""
        return self.weight


class Shadow(TorchDispatchMode):
    """Follows what is allocated and computed while it is entered, over fake tensors.

    Attributes:
        peak: the most that was there at once, of each kind of block by itself; most: of both together.
        flops: floating-point operations by the part that was named last.
    """

    def __init__(self, tokens: int, share: float, used: int) -> None:
        init: Any = super().__init__
        init()
        self.tokens, self.share, self.used = tokens, share, used
        self.live, self.peak, self.most, self.part = NONE, NONE, 0, ""
        self.flops: dict[str, int] = {}
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on shapes, and note what it makes and costs."""
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):  # what an operation is first seen to read was there before, and may come out
                self.know(each.untyped_storage(), NONE)
        if func is torch.ops.aten.nonzero.default:
            out: Any = torch.empty(self.found(args[0]), args[0].ndim, dtype=torch.long)
        elif func is torch.ops.aten._local_scalar_dense.default:
            out = 1
        else:
            out = func(*args, **(kwargs or {}))
        cost = flop_registry.get(func.overloadpacket)
        if cost is not None:
            self.flops[self.part] = self.flops.get(self.part, 0) + cost(*args, **(kwargs or {}), out_val=out)
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.know(each.untyped_storage(), block(each.untyped_storage().nbytes()))
        return out

    def found(self, flags: Tensor) -> int:
        """Return how many flags are set, as far as that is known before there is data."""
        if flags.ndim == 2:  # anchors
            return flags.shape[0] * round(flags.shape[1] * self.share)
        return self.used if flags.numel() == self.tokens else round(flags.numel() * self.share)

    def know(self, storage: Any, size: Size) -> None:
        """Count a storage, with this size, until it is freed; one that is known already is not counted again."""
        key = id(storage)
        if key not in self.known:
            self.known.add(key)
            self.live += size
            self.peak, self.most = self.peak.most(self.live), max(self.most, self.live.total)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: Size) -> None:
        """Count a storage no longer."""
        self.known.discard(key)
        self.live = Size(self.live.large - size.large, self.live.small - size.small)


class Job(NamedTuple):
    """What a trace depends on; hashable but for the configurations, which stand behind their text."""

    head: Any
    peft: Any
    objective: Any
    layer: LayerShape
    layers: int
    width: int
    vocab: int
    dtype: torch.dtype
    autocast: bool
    device: str
    rows: int
    length: int
    recompute: bool
    accumulates: bool


class Trace(NamedTuple):
    """What a micro-batch takes of memory above weights and features, and of computation.

    Attributes:
        whole, trained, resting: parameters of the head, those that are trained, and those that rest beside factors.
        feature_layers: how many of the target's layers it reads.
        weights: the trained parameters' own blocks, in fp32.
        largest: the largest of them.
        vectors: parameters whose state Muon does not halve.
        kept: what is kept of the unrolling for the backward pass.
        peak: the most at any time of each kind of block, gradients included unless they are there from an earlier
            micro-batch; most: of both kinds together.
        flops: of forward and backward pass.
    """

    whole: int
    trained: int
    resting: int
    feature_layers: int
    weights: Size
    largest: int
    vectors: int
    kept: Size
    peak: Size
    most: int
    flops: int


_traced: dict[str, Trace] = {}


def trace(job: Job) -> Trace:
    """Return what one micro-batch takes; the same question is answered once.

    Raises:
        ValueError: the head does not fit the target, as when its default layers fall together.
    """
    key = repr(job)
    if key not in _traced:
        _traced[key] = _followed(job)
    return _traced[key]


def _followed(job: Job) -> Trace:
    config = job.objective
    tokens = job.rows * job.length
    share = 1.0 if config.anchors is None else min(1.0, config.anchors / job.length)
    used = min(tokens, round(tokens * share * config.depths)) if share < 1 else tokens
    with torch.device("meta"):
        embeddings = Embeddings(job.width, job.vocab, job.layers, job.layer, job.dtype)
        head: Any = HEADS[job.head.name](job.head, embeddings)
        whole = sum(p.numel() for p in head.parameters())
        adapt(head, job.peft)
    chunk = suited(head, job.device)
    with FakeTensorMode(allow_non_fake_inputs=True):
        embeddings.weight = torch.empty(embeddings.weight.shape, dtype=job.dtype)
        _place(head)
        for module in head.modules():
            if isinstance(module, Recomputing):
                module.recompute = job.recompute
        trained = [p for p in head.parameters() if p.requires_grad]
        if job.accumulates:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
        features, weight, anchors = _batch(job, len(head.feature_layers), share)
        shown = min(used, CHUNKS * max(1, min(ROWS, chunk // job.vocab)))
        with Shadow(tokens, share, shown) as shadow, torch.autocast("cpu", torch.bfloat16, enabled=job.autocast):
            kept = _run(shadow, head, features, weight, anchors, config, chunk)
    sizes = [4 * p.numel() for p in trained]
    vocabulary = {job.vocab} if head.vocab is None else {job.vocab, len(head.vocab.ids)}
    counts = {part: count * (used / shown if part == "loss" else 1) for part, count in shadow.flops.items()}
    return Trace(
        whole, sum(sizes) // 4, sum(p.numel() for p in head.parameters()) - sum(sizes) // 4, len(head.feature_layers),
        sum(map(block, sizes), NONE), max(sizes),
        sum(p.numel() for p in trained if p.ndim != 2 or p.shape[0] in vocabulary),
        kept, shadow.peak, shadow.most, round(sum(counts.values())),
    )  # fmt: skip


def _place(head: nn.Module) -> None:
    """Put a module of the meta device on the CPU, in the fake mode that is entered, where autocast knows it."""
    for module in head.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            there = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(module, name, nn.Parameter(there, requires_grad=parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
        for value in vars(module).values():
            if isinstance(value, Rotary):
                value.frequency = torch.empty(value.frequency.shape, dtype=value.frequency.dtype)
                value.table = torch.empty(value.table.shape)


def _run(shadow: Shadow, head: Any, features: Features, weight: Tensor, anchors: Any, config: Any, chunk: int) -> Size:
    """Run the micro-batch; return what the unrolling keeps."""
    shadow.part = "unroll"
    drafts = head.unroll(features, config.depths, anchors)
    kept, shadow.part = shadow.live, "loss"
    loss, sums = objective(head, drafts, features, weight, config, chunk)
    shadow.part = "backward"
    del drafts, sums
    with torch.autocast("cpu", enabled=False):
        loss.backward()
    return kept


def _batch(job: Job, layers: int, share: float) -> tuple[Features, Tensor, Tensor | None]:
    """Return features, weights and anchors of a micro-batch, without values."""
    size, dtype = (job.rows, job.length), job.dtype if job.autocast else torch.float32
    token = torch.zeros(size, dtype=torch.long)
    features = Features(
        token,
        torch.empty(*size, layers, job.width, dtype=dtype),
        torch.empty(*size, job.width, dtype=dtype),
        torch.zeros(size, dtype=torch.long),
    )
    anchors = None if share == 1 else torch.ones(size, dtype=torch.bool)
    return features, torch.ones(job.objective.depths, *size), anchors
