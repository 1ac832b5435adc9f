"""Trace a head's micro-batch on fake tensors: its memory and floating-point operations.

The head's own code runs on torch's fake tensors, which have shapes and no values: unroll, loss, backward pass and
optimiser. So a plan holds for every head, option and recomputation, and there is no formula beside the code that could
go stale. They are a CPU's, since torch has no others without the device; where a run takes another path on its own
device, so do they (`path.py`). Sizes that depend on values are taken at their largest: every row is trained.
"""

import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from heads import HEADS
from heads.base import Features
from heads.common.rope import Rotary
from heads.modules.layers import Recomputing
from heads.mtp import TARGET
from inference.target.embeddings import TargetEmbeddings
from train import optim
from train.adapt import adapt
from train.config import TrainerConfig
from train.distributed.processes import LARGE
from train.objective import Chunk, Pick, chunk_rows, objective
from train.planning.path import path_of
from train.tracking.flops import Flops

CHUNKS = 2  # chunks of the loss that are traced: the others cost the same


# Bytes in "large" blocks, of LARGE and more, and in "small" ones. Sizes are never changed in place; of each kind, a - b
# is at least 0 and a | b the larger.
Size = Counter[str]
NONE: Size = Counter()


def blocks(total: int, size: int | None = None) -> Size:
    """Return the size of `total` bytes in blocks of about `size` bytes; None: in one."""
    return Counter(large=total) if (size or total) >= LARGE else Counter(small=total)


def times(size: Size, factor: int | float) -> Size:
    """Return a multiple of a size."""
    return Counter({kind: round(count * factor) for kind, count in size.items()})


def embeddings_of(config: Any, dtype: torch.dtype) -> TargetEmbeddings:
    """Return the embeddings of a target that is not loaded, by its (text) configuration."""
    table = nn.Embedding(config.vocab_size, config.hidden_size)
    lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    parts = {"get_input_embeddings": lambda: table, "get_output_embeddings": lambda: lm_head}
    model: Any = SimpleNamespace(config=config, **parts)
    return TargetEmbeddings(model).to(dtype).requires_grad_(False)


class Shadow(Flops):
    """Record allocations on fake tensors while entered; with `counts` count operations too."""

    def __init__(self, *, counts: bool = False) -> None:
        init: Any = super().__init__
        init()
        self.counts = counts
        self.live, self.peak, self.most = NONE, NONE, 0  # peak: of each kind of block by itself; most: of both together
        self.counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on shapes, and record its allocations."""
        if func is torch.ops.prim.device.default:  # more than half of all calls
            return args[0].fake_device
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):  # an input not seen before was allocated before, even if it is returned
                self.count(leaf.untyped_storage(), NONE)
        if func is torch.ops.aten._local_scalar_dense.default:
            out: Any = 1
        elif func is torch.ops.aten.addmm.dtype_out:  # which torch has for CUDA alone
            out = kwargs["out"]
        else:
            out = func(*args, **(kwargs or {}))
        if self.counts:
            self.add(func, args, kwargs, out)
        for result in out if isinstance(out, tuple | list) else (out,):
            if isinstance(result, FakeTensor) and result.fake_device.type != "meta":  # which takes nothing
                self.count(result.untyped_storage(), blocks(result.untyped_storage().nbytes()))
        return out

    def count(self, storage: Any, size: Size) -> None:
        """Count a storage with this size until it is freed, unless it is counted already."""
        key = id(storage)
        if key not in self.counted:
            self.counted.add(key)
            self.live = self.live + size
            self.peak, self.most = self.peak | self.live, max(self.most, self.live.total())
            weakref.finalize(storage, self.release, key, size)

    def release(self, key: int, size: Size) -> None:
        """Remove a freed storage from the live bytes."""
        self.counted.discard(key)
        self.live = self.live - size


class Job(NamedTuple):
    """The input of a trace."""

    head: Any
    peft: Any
    objective: Any
    trainer: TrainerConfig
    config: Any  # the target's (text) configuration
    dtype: torch.dtype
    autocast: bool
    device: str
    rows: int
    length: int
    accumulates: bool


class Trace(NamedTuple):
    """The memory of a micro-batch in bytes, above weights and features, and its operations."""

    whole: int  # parameters of the head without adapters
    trained: int
    frozen: int
    feature_layers: int  # of the target, that the head reads
    weights: Size  # of the trained parameters in fp32
    vectors: int  # parameters whose state Muon does not halve
    activations: Size  # that the unrolling keeps for the backward pass
    peak: Size  # of each kind of block, gradients included unless an earlier micro-batch allocated them
    most: int  # peak of both kinds together
    update: Size  # peak of the optimiser's step, above its state
    flops: int  # of forward and backward pass


_traced: dict[str, Trace] = {}
_updates: dict[str, Size] = {}


def trace(job: Job) -> Trace:
    """Return the trace of one micro-batch; traces are cached, and a head that does not fit the target is refused."""
    key = repr(job)  # configurations are not hashable
    if key not in _traced:
        try:
            with path_of(job.device):
                _traced[key] = _run_trace(job)
        except RuntimeError as error:
            if getattr(job.head, "layer", None) != TARGET:
                raise
            raise ValueError(
                "a layer of the target's kind cannot be traced (experts read values): plan with head.layer=llama, and "
                "train with model.placement, launcher.strategy, trainer.micro_tokens and eval.gate_dtype given"
            ) from error
    return _traced[key]


class Inputs(NamedTuple):
    """The inputs of a micro-batch, without values."""

    features: Features
    weight: Tensor
    anchors: Tensor | None
    chunks: list[Chunk]


def head_of(job: Job) -> tuple[Any, int]:
    """Return a head on the meta device, and its number of parameters without adapters."""
    with torch.device("meta"):
        head: Any = HEADS[job.head.name](job.head, embeddings_of(job.config, job.dtype))
        whole = sum(p.numel() for p in head.parameters())
        adapt(head, job.peft)
    return head, whole


def inputs_of(job: Job, head: Any) -> Inputs:
    """Move a head from the meta device to fake tensors, and return a micro-batch for it, whose rows are all trained."""
    config = job.objective
    tokens = job.rows * job.length
    anchored = 1.0 if config.anchors is None else min(1.0, config.anchors / job.length)
    used = min(tokens, round(tokens * anchored * config.depths)) if anchored < 1 else tokens
    size = min(used, chunk_rows(head, job.device, config.depths * tokens))
    head.embeddings.to_empty(device="cpu")
    _materialise(head)
    for module in head.modules():
        if isinstance(module, Recomputing):
            module.recompute = job.trainer.recompute
    sizes = [min(size, used - begin) for begin in range(0, used, size)]
    chunks = [_chunk(rows, round(rows * anchored), config.depths) for rows in sizes]
    return Inputs(*_batch(job, len(head.feature_layers), anchored), chunks)


def _run_trace(job: Job) -> Trace:
    config = job.objective
    head, whole = head_of(job)
    with FakeTensorMode(allow_non_fake_inputs=True):
        features, weight, anchors, chunks = inputs_of(job, head)
        trained = [p for p in head.parameters() if p.requires_grad]
        if job.accumulates:
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
        some = chunks[:CHUNKS]
        with Shadow(counts=True) as shadow, torch.autocast("cpu", torch.bfloat16, enabled=job.autocast):
            drafts = head.unroll(features, config.depths, anchors)
            activations, before = shadow.live, shadow.total
            loss, sums = objective(head, drafts, features, weight, config, some)
            loss_flops = shadow.total - before
            del drafts, sums
            with torch.autocast("cpu", enabled=False):
                loss.backward()
        of = repr((job.head, job.peft, job.config, job.dtype, job.device, job.trainer.optimizer))
        if of not in _updates:  # the same whatever the micro-batch
            _updates[of] = _updated(head, job.trainer)
    sizes = [4 * p.numel() for p in trained]
    share = sum(len(chunk.teacher) for chunk in chunks) / sum(len(chunk.teacher) for chunk in some)
    return Trace(
        whole, sum(sizes) // 4, sum(p.numel() for p in head.parameters()) - sum(sizes) // 4, len(head.feature_layers),
        sum(map(blocks, sizes), NONE),
        sum(p.numel() for p in trained) - sum(p.numel() for p in optim.hidden_matrices(head)),
        activations, shadow.peak, shadow.most, _updates[of],
        round(shadow.total + loss_flops * (share - 1)),
    )  # fmt: skip


def _updated(head: Any, trainer: TrainerConfig) -> Size:
    """Return the peak of an optimiser's second step, which finds its state."""
    moved = optim.optimizer(head, trainer)
    with Shadow():
        moved.step()
    with Shadow() as shadow:
        moved.step()
    return shadow.peak


def _chunk(teachers: int, trained: int, depths: int) -> Chunk:
    """Return a chunk of the loss, without values."""
    teacher, index = (torch.empty(count, dtype=torch.long) for count in (teachers, trained))
    return Chunk(teacher, [Pick(index, index, index)] * depths)


def _materialise(head: nn.Module) -> None:
    """Move a module from the meta device to fake CPU tensors, which autocast supports."""
    head.to_empty(device="cpu")
    for module in head.modules():
        for value in vars(module).values():
            if isinstance(value, Rotary):
                value.frequency = torch.empty(value.frequency.shape, dtype=value.frequency.dtype)
                value.table = torch.empty(value.table.shape)


def _batch(job: Job, layers: int, anchored: float) -> tuple[Features, Tensor, Tensor | None]:
    """Return features, weights and anchors of a micro-batch, without values."""
    size, dtype = (job.rows, job.length), job.dtype if job.autocast else torch.float32
    token = torch.zeros(size, dtype=torch.long)
    features = Features(
        token,
        torch.empty(*size, layers, job.config.hidden_size, dtype=dtype),
        torch.empty(*size, job.config.hidden_size, dtype=dtype),
        torch.zeros(size, dtype=torch.long),
    )
    anchors = None if anchored == 1 else torch.zeros(job.rows, round(anchored * job.length), dtype=torch.long)
    return features, torch.ones(job.objective.depths, *size), anchors
