"""Strategies to share a head between processes: replicated (DDP), or with sharded weights, gradients and state.

torch and DeepSpeed implement them. Each is called here directly, since accelerate silently skips DeepSpeed and FSDP2 on
a CPU. Under every strategy weights are fp32, matmuls in `trainer.precision`, gradients are summed in fp32, and the
clipped norm is the whole gradient's, so all strategies take the same step.

Sharded strategies gather the whole head for a forward and backward pass. A head is a layer or two, so they save the
memory of optimiser state, gradients and weights between steps. A parameter's type shows the strategy: a DTensor under
FSDP2; under ZeRO-3 DeepSpeed's type, whose shard is `ds_tensor`; under ZeRO-2 a whole tensor with a slice of master
weights; otherwise a whole tensor.
"""

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import all_gather, get_rank, get_world_size
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from heads.base import NamedTensors
from train.config import LauncherConfig

MakeOptimizer = Callable[[nn.Module], Any]
BUCKET = 200_000_000  # maximum number of gradients that DeepSpeed reduces at once


class Strategy:
    """A strategy's part of an optimiser step; this class is one process, or DDP with the whole head on each."""

    module: Any  # the loss module, wrapped by the strategy
    optimizer: Any  # its parameter groups hold the learning rates; `TrainState` reads its state

    def __init__(self, accelerator: Accelerator, loss: Any, make: MakeOptimizer) -> None:
        self.module = accelerator.prepare(loss)
        self.optimizer = make(loss.head)

    def forward(self, *inputs: Any, last: bool) -> Any:
        """Return the loss module's result for a micro-batch; after the step's last one, gradients are averaged."""
        if isinstance(self.module, DistributedDataParallel):
            self.module.require_backward_grad_sync = last
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Add a micro-batch's gradient."""
        loss.backward()

    def clip(self, norm: float) -> Tensor:
        """Clip the gradient to `norm` (0: no clipping); return the whole gradient's norm before clipping."""
        before = nn.utils.clip_grad_norm_(self.module.parameters(), norm or torch.inf)
        return before.full_tensor() if hasattr(before, "full_tensor") else before

    def step(self) -> None:
        """Update the weights and clear the gradient."""
        self.optimizer.step()
        self.drop()

    def drop(self) -> None:
        """Clear the gradient without updating the weights."""
        self.optimizer.zero_grad()


class Fsdp2(Strategy):
    """FSDP2 (torch's fully_shard), with the head as one unit: tensors are sharded by rows.

    The head is one unit, since heads call parts of their layers and read weights beyond them; and layers sharded one by
    one would be gathered once per depth, at which EAGLE-3 runs its layer.
    """

    def __init__(self, accelerator: Accelerator, loss: Any, make: MakeOptimizer) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.device_mesh.init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        self.module = fully_shard(loss, mesh=mesh)
        self.optimizer = make(loss.head)

    def forward(self, *inputs: Any, last: bool) -> Any:
        """Return the loss; before the last micro-batch, weights stay gathered and gradients whole."""
        self.module.set_requires_gradient_sync(last)
        self.module.set_reshard_after_backward(last)
        return self.module(*inputs)


class BackwardMarked(nn.Module):
    """Add a zero with a gradient to the loss; its gradient tells DeepSpeed that the backward pass is complete."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, zero: Tensor, *inputs: Any) -> tuple[Tensor, NamedTensors]:
        """Return the loss."""
        loss, sums = self.loss(*inputs)
        return loss + zero, sums


class Zero(Strategy):
    """DeepSpeed's ZeRO (Rajbhandari et al., arXiv 1910.02054): stage 2 shards gradients and state, 3 weights too."""

    def __init__(self, accelerator: Accelerator, loss: Any, make: MakeOptimizer, clip: float, stage: int) -> None:
        if accelerator.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # deepspeed reads it at import
        import deepspeed
        import deepspeed.ops

        if accelerator.device.type == "cpu":  # otherwise each process compiles C++ for gloo's sums, under a lock
            vars(deepspeed.ops)["__compatible_ops__"] = {}
        from deepspeed.utils import logger, set_z3_leaf_modules

        self.log = logger
        self.log.setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # from calls inside DeepSpeed
        bucket = min(BUCKET, sum(p.numel() for p in loss.parameters() if p.requires_grad))
        config = {
            "train_micro_batch_size_per_gpu": 1,  # only used to count samples; the loss is already normalised
            "gradient_accumulation_steps": 1,  # `last` marks the boundary of a step
            "gradient_clipping": clip,
            "steps_per_print": None,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "stage3_param_persistence_threshold": 0,
            },
        }
        marked = BackwardMarked(loss)
        if stage == 3:
            set_z3_leaf_modules(marked, [BackwardMarked])  # gathered as one unit, as under FSDP2
        engine, *_ = deepspeed.initialize(model=marked, optimizer=make(loss.head), config=config)
        self.module, self.optimizer = engine, engine.optimizer
        self.start()

    def start(self) -> None:
        """Create the state that AdamW would create at its first step, so that a checkpoint can be loaded."""
        inner = self.optimizer.optimizer
        stage3 = hasattr(self.optimizer, "fp32_partitioned_groups_flat")
        pieces = "fp32_partitioned_groups_flat" if stage3 else "single_partition_of_fp32_groups"
        for piece in getattr(self.optimizer, pieces):
            zeros = {key: torch.zeros_like(piece) for key in ("exp_avg", "exp_avg_sq")}
            inner.state[piece] = {"step": torch.zeros((), device=counts_on(inner, piece)), **zeros}
        if not stage3:
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def forward(self, *inputs: Any, last: bool) -> Any:
        """Return the loss."""
        self.module.set_gradient_accumulation_boundary(last)
        return self.module(torch.zeros((), device=self.module.device, requires_grad=True), *inputs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient, of which each process keeps its shard."""
        self.module.backward(loss)

    def clip(self, norm: float) -> Tensor:
        """Return the gradient's norm; the engine clips in its step."""
        if hasattr(self.optimizer, "scaled_global_norm"):
            return self.optimizer.scaled_global_norm()
        norms = torch.stack(self.optimizer._get_norm_groups())  # here a norm of -1 means not finite
        return torch.where((norms >= 0).all(), norms.norm(), torch.inf)

    def step(self) -> None:
        """Update the weights."""
        self.module.step()

    def drop(self) -> None:
        """Clear the gradient by making it NaN: the engine then skips the update and clears it."""
        for gradients in self.optimizer.averaged_gradients.values():
            for gradient in gradients:
                gradient.fill_(torch.nan)
        self.log.setLevel(logging.ERROR)  # hides the warning of the intended skip
        self.module.step()
        self.log.setLevel(logging.WARNING)


def prepare(
    launcher: LauncherConfig, accelerator: Accelerator, loss: Any, make: MakeOptimizer, clip: float
) -> Strategy:
    """Wrap the module `loss`, whose `head` is trained, with `launcher.strategy`.

    DeepSpeed clips gradients to the norm `clip` in its own step.
    """
    if launcher.strategy == "ddp":
        return Strategy(accelerator, loss, make)
    if launcher.strategy == "fsdp2":
        return Fsdp2(accelerator, loss, make)
    return Zero(accelerator, loss, make, clip, int(launcher.strategy[-1]))


def zero_stage(p: Tensor) -> int:
    """Return the ZeRO stage that sharded a parameter or its optimiser state; 0 without ZeRO."""
    return 3 if hasattr(p, "ds_id") else 2 if hasattr(p, "_hp_mapping") else 0


def counts_on(optimizer: Any, p: Tensor) -> torch.device:
    """Return the device of torch's step counter for a parameter: the parameter's if fused, else the CPU."""
    return p.device if optimizer.defaults.get("fused") else torch.device("cpu")


def local_shard(p: Tensor) -> Tensor:
    """Return this process's shard of a parameter; during training always the same, updated tensor."""
    return getattr(p, "ds_tensor", p).detach()


def gather(p: Tensor, shard: Tensor) -> Tensor:
    """Gather a tensor that is sharded like parameter `p`; like all functions below, a collective call."""
    from torch.distributed.tensor import DTensor

    if isinstance(shard, DTensor):
        return shard.full_tensor()
    if zero_stage(p) < 3 or not shard.ndim:  # a count of steps is not sharded
        return shard
    shards = [torch.empty_like(shard) for _ in range(get_world_size())]
    all_gather(shards, shard.contiguous())
    shape = vars(p)["ds_shape"]
    return torch.cat(shards)[: shape.numel()].view(shape)


@torch.no_grad()
def write_local_shard(p: Tensor, shard: Tensor, value: Tensor) -> None:
    """Write this process's part of an unsharded `value` to a `shard`, sharded like parameter `p`."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(shard.device)
    if isinstance(shard, DTensor):
        shard.copy_(distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None))
    else:
        shard.copy_(local_slice(value, shard) if zero_stage(p) == 3 else value)


def local_slice(value: Tensor, shard: Tensor) -> Tensor:
    """Return this process's slice under ZeRO-3; all slices have the shard's size; the last is padded with zeros."""
    flat = value.flatten()
    padded = functional.pad(flat, (0, get_world_size() * shard.numel() - len(flat)))
    return padded.narrow(0, get_rank() * shard.numel(), shard.numel())


def write_master_shard(p: Tensor, value: Tensor, key: str | None = None) -> None:
    """Write the master weights of a parameter sharded by ZeRO, or with `key` its optimiser state."""
    from deepspeed import utils

    extra = () if key is None else (key,)
    if zero_stage(p) == 3:
        put_local = utils.safe_set_local_fp32_param if key is None else utils.safe_set_local_optimizer_state
        put_local(p, local_slice(value, local_shard(p)).to(local_shard(p).device), *extra)
    else:
        put_full = utils.safe_set_full_fp32_param if key is None else utils.safe_set_full_optimizer_state
        put_full(p, value.to(p.device), *extra)
