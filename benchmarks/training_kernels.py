"""The kernels of a training step on CUDA, counted on fake tensors: a library of benchmarks/h100_estimate.py.

A step of one micro-batch with a live target takes its path on CUDA (benchmarks/cuda_path.py): the target's forward
pass in transformers, its attention a kernel a layer, the head, its loss in chunks, gradients, clipping, the optimiser.
Every row is trained. Each operation is a kernel, with its operations and the bytes that it reads and writes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks import cuda_path
from heads import HEADS
from heads.base import Features
from heads.common.rope import Rotary
from inference.target.attention import ATTENTION
from inference.target.embeddings import TargetEmbeddings
from inference.target.model import LayerOutputs
from train import optim
from train.config import RunConfig
from train.objective import Chunk, DepthRows, chunk_rows, objective

TARGET, LOSS, PRODUCTS, ATTEND, SMALL, OPTIMISER = (
    "target's pass", "loss with teacher", "head's products", "head's attention", "head's norms, casts, sums",
    "optimiser, clipping",
)  # fmt: skip
LAUNCHES_NOTHING = (
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh",
)  # fmt: skip
PICKS = ("index", "embedding", "gather", "index_select")  # of a table as many bytes as they give
PUTS = ("index_put", "index_put_", "_index_put_impl_", "scatter", "scatter_")


class Job(NamedTuple):
    """A micro-batch in bf16, all rows of which are trained."""

    run: RunConfig
    config: Any  # the target's (text) configuration
    rows: int


class Kernel(NamedTuple):
    """A kernel: its part of the step, its operations, and the bytes that it reads and writes."""

    part: str
    flops: int
    moved: int


class Kernels(TorchDispatchMode):
    """Note the kernels that are launched while entered."""

    def __init__(self) -> None:
        init: Any = super().__init__
        init()
        self.part, self.noted = "", list[Kernel]()

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count what is launched meanwhile as a part of the step."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on shapes, and note its kernel."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return False  # whether the loss's gradient may stay as it is, which a CPU alone looks at
        # torch has this one for CUDA alone: a product that is added to a sum in fp32.
        out = kwargs["out"] if func is torch.ops.aten.addmm.dtype_out else func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        if func.is_view or func.namespace in ("prim", "profiler") or name in LAUNCHES_NOTHING:
            return out
        cost = flop_registry.get(func.overloadpacket)
        shapes = [x for x in args if not isinstance(x, torch.dtype)]
        flops = 0 if cost is None else int(cost(*shapes, **kwargs, out_val=out))
        self.noted.append(Kernel(self._part_of(func, flops), flops, moved(func, args, kwargs, out)))
        return out

    def _part_of(self, func: Any, flops: int) -> str:
        """Return an operation's part; of the head's own, by its kind."""
        if self.part != PRODUCTS:
            return self.part
        if func.namespace == "headstart" and func.__name__.startswith("attention"):
            return ATTEND
        return self.part if flops else SMALL


def moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    name = func.__name__.partition(".")[0]
    if name in PICKS:
        return 2 * size(out)
    if name in PUTS:
        return 2 * max(size(x) for x in args[1:] if isinstance(x, Tensor))
    written = [
        argument.name for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
    ]
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    results = tree_leaves(out) if out is not None else tree_leaves([given[name] for name in written])
    return sum(size(x) for x in (*tree_leaves((args, kwargs)), *results) if isinstance(x, Tensor))


def size(x: Tensor) -> int:
    """Return the bytes of a tensor's values, without those that a view repeats."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def target_kernels(config: Any, job: Job, layers: tuple[int, ...], document: int) -> list[Kernel]:
    """Return the kernels of the target's forward pass over documents of a length, as `TargetModel.features` runs it."""
    kernels = Kernels()

    def attend(_module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return torch.ops.headstart.attention(query, key, value, document // 2)[0].transpose(1, 2), None

    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        patch.dict(transformers.AttentionInterface._global_mapping, {ATTENTION: attend}),
    ):
        base: Any = model.base_model.to_empty(device="cpu").requires_grad_(False)
        base.config._attn_implementation = ATTENTION
        outputs = LayerOutputs(base.layers)
        noted: list[Any] = []
        outputs.outputs, outputs.wanted = noted, layers
        token = torch.zeros(job.rows, job.run.data.length, dtype=torch.long)
        with kernels, kernels.within(TARGET), torch.no_grad():
            base(input_ids=token, position_ids=token, use_cache=False)
            torch.stack([noted[i] for i in layers], 2)
    return kernels.noted


def inputs_of(job: Job, head: Any) -> tuple[Features, Tensor, list[Chunk]]:
    """Move a head from the meta device to fake tensors; return features, weights and the loss's chunks for it."""
    for module in (head, head.embeddings):
        module.to_empty(device="cpu")
    for module in head.modules():
        for value in vars(module).values():
            if isinstance(value, Rotary):
                value.frequency = torch.empty(value.frequency.shape, dtype=value.frequency.dtype)
                value.table = torch.empty(value.table.shape)
    size, width, depths = (job.rows, job.run.data.length), job.config.hidden_size, job.run.objective.depths
    token = torch.zeros(size, dtype=torch.long)
    states = torch.empty(*size, len(head.feature_layers) + 1, width, dtype=torch.bfloat16)
    features = Features(token, states[:, :, 1:], states[:, :, 0], token)
    index = torch.empty(token.numel(), dtype=torch.long)
    chunks = [
        Chunk(each, [DepthRows(each, each, each)] * depths)
        for each in index.split(chunk_rows(head, "cuda", depths * len(index)))
    ]
    return features, torch.ones(depths, *size), chunks


def embeddings_of(config: Any, dtype: torch.dtype) -> TargetEmbeddings:
    """Return the embeddings of a target that is not loaded, by its (text) configuration."""
    table = nn.Embedding(config.vocab_size, config.hidden_size)
    lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    parts = {"get_input_embeddings": lambda: table, "get_output_embeddings": lambda: lm_head}
    model: Any = SimpleNamespace(config=config, **parts)
    return TargetEmbeddings(model).to(dtype).requires_grad_(False)


def head_kernels(job: Job) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels of the head's step on a micro-batch, and those of the optimiser's."""
    step, update = Kernels(), Kernels()
    attend = cuda_path.attend_fused

    def apart(*inputs: Any) -> Tensor:
        with step.within(ATTEND):
            return attend(*inputs)

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        head: Any = HEADS[job.run.head.name](job.run.head, embeddings_of(job.config, torch.bfloat16))
    with patch.object(cuda_path, "attend_fused", apart), cuda_path.cuda_path(), fake:
        features, weight, chunks = inputs_of(job, head)
        trained = [p for p in head.parameters() if p.requires_grad]
        with step, step.within(PRODUCTS):
            with torch.autocast("cpu", torch.bfloat16):
                drafts = head.unroll(features, job.run.objective.depths)
                with step.within(LOSS):
                    loss, _ = objective(head, drafts, features, weight, job.run.objective, chunks)
            loss.backward()
            with step.within(OPTIMISER):
                nn.utils.clip_grad_norm_(trained, job.run.trainer.clip)
        moving = optim.optimizer(head, job.run.trainer)
        moving.step()  # which makes its state
        with update, update.within(OPTIMISER):
            moving.step()
    return step.noted, update.noted
