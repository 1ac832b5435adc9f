"""How processes share a head: copies of it (DDP), or its weights, gradients and optimiser state cut up between them.

torch and DeepSpeed do the work. Each is called here directly, since accelerate leaves DeepSpeed and FSDP2 out on a CPU
without a word. Whichever is asked for, weights are fp32, matrix products as `trainer.precision` says, gradients are
summed in fp32, and the gradient's norm is that of the whole gradient: a step is the same step.

Sharded strategies gather the head whole for a forward and a backward pass. It is a layer or two, so that what they
save is the optimiser's state, the gradients and the weights between steps.
"""

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from train.config import LauncherConfig

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
BUCKET = 200_000_000  # gradients that DeepSpeed reduces at once, at most


@runtime_checkable
class Strategy(Protocol):
    """What a step does with the processes.

    Attributes:
        optimizer: has the groups whose learning rates are set, and state in which `TrainState` finds its way.
    """

    optimizer: Any

    def forward(self, *inputs: Any, last: bool) -> Any:
        """Return what the loss gives for a micro-batch; with the last of a step the processes average gradients."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add a micro-batch's gradient."""
        ...

    def clip(self, norm: float) -> Tensor:
        """Return the norm of the whole gradient, which does not exceed `norm` in the step; 0 clips nothing."""
        ...

    def step(self) -> None:
        """Move the weights and forget the gradient."""
        ...

    def drop(self) -> None:
        """Forget the gradient: the weights stay where they are."""
        ...


class DdpStrategy:
    """Every process holds the whole head: one process, or DistributedDataParallel."""

    def __init__(self, accelerator: Accelerator, loss: Any, make: MakeOptimizer) -> None:
        made: Any = accelerator.prepare(loss, make(loss.head))
        self.module, self.optimizer = made
        if accelerator.num_processes > 1 and not isinstance(self.module, DistributedDataParallel):
            raise fell_back("ddp", self.module)

    def forward(self, *inputs: Any, last: bool) -> Any:
        """Return the loss."""
        if isinstance(self.module, DistributedDataParallel):
            self.module.require_backward_grad_sync = last
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Add its gradient."""
        loss.backward()

    def clip(self, norm: float) -> Tensor:
        """Clip the gradient, return its norm."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), norm or torch.inf)

    def step(self) -> None:
        """Move the weights."""
        self.optimizer.step()
        self.drop()

    def drop(self) -> None:
        """Forget the gradient."""
        self.optimizer.zero_grad()


class Fsdp2:
    """torch's fully_shard (FSDP2), the head in one piece: rows of its tensors are cut up between the processes.

    One piece, since heads call parts of their layers and read weights outside of them, and EAGLE-3 runs its layer once
    a depth: layers sharded one by one would be gathered that often.
    """

    def __init__(self, accelerator: Accelerator, loss: Any, make: MakeOptimizer) -> None:
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        self.module: Any = fully_shard(loss, mesh=mesh)
        if not isinstance(self.module, FSDPModule) or not all(isinstance(p, DTensor) for p in loss.parameters()):
            raise fell_back("fsdp2", self.module)
        self.optimizer: Any = make(loss.head)

    def forward(self, *inputs: Any, last: bool) -> Any:
        """Return the loss; until the last micro-batch weights stay gathered and gradients whole."""
        self.module.set_requires_gradient_sync(last)
        self.module.set_reshard_after_backward(last)
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Add its gradient."""
        loss.backward()

    def clip(self, norm: float) -> Tensor:
        """Clip the gradient, return its norm."""
        found: Any = nn.utils.clip_grad_norm_(self.module.parameters(), norm or torch.inf)
        whole: Tensor = found.full_tensor()
        return whole

    def step(self) -> None:
        """Move the weights."""
        self.optimizer.step()
        self.drop()

    def drop(self) -> None:
        """Forget the gradient."""
        self.optimizer.zero_grad()


class Rooted(nn.Module):
    """The loss, plus a zero that has a gradient: DeepSpeed takes that of the last input for the end of the backward."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, zero: Tensor, *inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss."""
        loss, sums = self.loss(*inputs)
        return loss + zero, sums


class Zero:
    """DeepSpeed's ZeRO (Rajbhandari et al., arXiv 1910.02054): stage 2 cuts up gradients and state, 3 weights too."""

    def __init__(self, accelerator: Accelerator, loss: Any, make: MakeOptimizer, clip: float, stage: int) -> None:
        if accelerator.device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
        import deepspeed
        import deepspeed.ops

        if accelerator.device.type == "cpu":  # else each process compiles C++ for gloo's sums, behind a lock
            vars(deepspeed.ops)["__compatible_ops__"] = {}
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
        from deepspeed.utils import logger, set_z3_leaf_modules

        self.log = logger
        self.log.setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # of calls that are DeepSpeed's own
        bucket = min(BUCKET, sum(p.numel() for p in loss.parameters() if p.requires_grad))
        config = {
            "train_micro_batch_size_per_gpu": 1,  # it counts samples by this; the loss is divided by what was trained
            "gradient_accumulation_steps": 1,  # `last` says where a step ends
            "gradient_clipping": clip,
            "steps_per_print": None,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "stage3_param_persistence_threshold": 0,
            },
        }
        rooted = Rooted(loss)
        if stage == 3:
            set_z3_leaf_modules(rooted, [Rooted])  # gathered in one piece, as under FSDP2
        engine, *_ = deepspeed.initialize(model=rooted, optimizer=make(loss.head), config=config)
        self.module: Any = engine
        self.optimizer: Any = engine.optimizer
        kinds = {2: DeepSpeedZeroOptimizer, 3: DeepSpeedZeroOptimizer_Stage3}
        if not isinstance(self.optimizer, kinds[stage]) or engine.zero_optimization_stage() != stage:
            raise fell_back(f"zero{stage}", self.optimizer)
        self.start()

    def start(self) -> None:
        """Make the state that AdamW would make at its first step, so that one can be written before it."""
        inner, stage3 = self.optimizer.optimizer, hasattr(self.optimizer, "fp32_partitioned_groups_flat")
        pieces = "fp32_partitioned_groups_flat" if stage3 else "single_partition_of_fp32_groups"
        for piece in getattr(self.optimizer, pieces):
            zeros = {key: torch.zeros_like(piece) for key in ("exp_avg", "exp_avg_sq")}
            inner.state[piece] = {"step": torch.tensor(0.0), **zeros}
        if not stage3:
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def forward(self, *inputs: Any, last: bool) -> Any:
        """Return the loss."""
        self.module.set_gradient_accumulation_boundary(last)
        return self.module(torch.zeros((), device=self.module.device, requires_grad=True), *inputs)

    def backward(self, loss: Tensor) -> None:
        """Add its gradient, of which each process keeps its part."""
        self.module.backward(loss)

    def clip(self, norm: float) -> Tensor:
        """Return the gradient's norm; the engine clips in its step."""
        del norm
        if hasattr(self.optimizer, "scaled_global_norm"):
            found: Tensor = self.optimizer.scaled_global_norm()
            return found
        norms = torch.stack(self.optimizer._get_norm_groups())  # a norm that is not finite is -1 here
        return torch.where((norms >= 0).all(), norms.norm(), torch.inf)

    def step(self) -> None:
        """Move the weights."""
        self.module.step()

    def drop(self) -> None:
        """Forget the gradient: the engine leaves out a step whose gradient is not finite, and clears it away."""
        for gradients in self.optimizer.averaged_gradients.values():
            for gradient in gradients:
                gradient.fill_(torch.nan)
        self.log.setLevel(logging.ERROR)  # it would warn of what is meant
        self.module.step()
        self.log.setLevel(logging.WARNING)


def prepare(
    launcher: LauncherConfig, accelerator: Accelerator, loss: Any, make: MakeOptimizer, clip: float
) -> Strategy:
    """Share a head between the processes as `launcher.strategy` says.

    Args:
        launcher: names the strategy.
        accelerator: the processes.
        loss: the module to call, whose `head` is trained.
        make: makes the optimiser of a head.
        clip: the norm that a gradient is clipped to, for the library that clips by itself.

    Raises:
        ValueError: the library has quietly done something else.
    """
    if launcher.strategy == "ddp":
        return DdpStrategy(accelerator, loss, make)
    if launcher.strategy == "fsdp2":
        return Fsdp2(accelerator, loss, make)
    return Zero(accelerator, loss, make, clip, int(launcher.strategy[-1]))


def fell_back(asked: str, found: object) -> ValueError:
    """Return the error of a strategy that was asked for and does not run."""
    return ValueError(
        f"launcher.strategy={asked} does not run here: {type(found).__name__} does in its place; give another strategy"
    )
