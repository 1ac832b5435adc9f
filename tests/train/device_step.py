"""Whole training steps on a dummy accelerator that take the path of a GPU, with a live target: where the host waits.

Started as a script, it prints as JSON what each case in its arguments waits for and sends: a toy head's name, how many
documents a packed row has and how many micro-batches a step; or what a case of `loss_launches` counts. What the host
knows has values, what lies on the dummy has none. Registering a device is for good, so it has a process of its own.
"""

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import masking_utils

from benchmarks import cuda_path
from data.batches import Batches, Packed
from data.features.source import LiveFeatures
from heads.modules import attention, vocab
from inference.target import attention as documents_of
from tests import toys
from tests.inference.accelerator import NAME, on_dummy
from tests.train import loss_launches, strategy_job
from train import optim
from train.losses import LOSSES
from train.step import Loss, Stepper

ROOT, LENGTH = sys.path[0], 32


def ours(file: str) -> bool:
    """Whether a file is the project's, and no library's in an environment in the checkout."""
    return file.startswith(ROOT) and "site-packages" not in file


class Device(TorchDispatchMode):
    """Runs what concerns the dummy without values; notes what the host reads of it, and copies from the host.

    An operation whose result has a size that follows from values on the dummy raises.
    """

    def __init__(self) -> None:
        init: Any = super().__init__
        init()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: list[str] = []
        self.sent = 0

    def note(self, count: int = 1) -> int:
        """Note the line of the project that is running, which reads so many numbers."""
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename == __file__ or not ours(frame.f_code.co_filename):
            frame = frame.f_back
        self.waits.append(f"{Path(frame.f_code.co_filename).stem}:{frame.f_code.co_name}")
        return count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [isinstance(x, FakeTensor) for x in given]
        if not any(there) and torch.device(kwargs.get("device") or "cpu").type != NAME:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.note()
        if any(x.ndim and not known for x, known in zip(given, there, strict=True)):
            self.sent += 1
            if not kwargs.get("non_blocking"):
                self.note()
        with self.fake:
            if func is torch.ops.aten._to_copy.default and not any(there):
                return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=NAME)
            return func(*args, **kwargs)


def stepper(name: str, target: Any, documents: int, micro_batches: int, device: Device) -> Stepper:
    """Return a toy head's steps on the dummy, of rows that hold so many documents."""
    case = name if name in strategy_job.CASES else "eagle"
    run = strategy_job.run_of(case, "ddp")
    head: Any = toys.head(name, target).train()
    token, depths = torch.ones(1, 4).long(), 2 if head.max_depth == 64 else min(4, head.max_depth)
    first = head.unroll(target.features(token, token * 0, head.feature_layers), depths)[0]
    lacks = {"smooth_l1"} if first.feature is None else set()
    lacks |= {"confidence"} if first.confidence is None else set()
    objective = replace(
        run.objective, losses={kind: 1.0 for kind in LOSSES if kind not in lacks}, depths=depths, anchors=6,
        noise=0.2, depth_weights="decay" if first.confidence is None else "dpace",
    )  # fmt: skip
    trained = [key for key, _ in head.named_parameters()]
    with device.fake:
        on_dummy(target.model)
        on_dummy(head)
    target.device = torch.device(NAME)
    for key in trained:
        head.get_parameter(key).requires_grad_()
    token = torch.randint(toys.VOCAB, (24, LENGTH), generator=torch.Generator().manual_seed(5))
    document = (torch.arange(LENGTH) * documents // LENGTH).expand_as(token)
    batches = Batches(Packed(token, document, torch.ones_like(token)), 2 * micro_batches, 2, 0, 0, 1)
    accelerator: Any = SimpleNamespace(
        device=torch.device(NAME), mixed_precision="no", num_processes=1, prepare=lambda module: module,
        reduce=lambda x, _how: x,
    )  # fmt: skip
    source = LiveFeatures(target, batches, head.feature_layers)
    trainer = replace(run.trainer, ema=0.5)
    return Stepper(trainer, run.launcher, accelerator, Loss(head, objective, compiled=False), source, 32)


def counted(head: str, documents: int, micro_batches: int) -> dict[str, Any]:
    """Return what a step waits for and how often it sends; one before it makes tables and the optimiser's state."""
    device, options = Device(), frozenset({*documents_of.NEEDED, "enable_gqa"})
    target: Any = toys.target.__wrapped__("llama", torch.float32)  # its parameters are replaced
    with ExitStack() as patches:
        patches.enter_context(cuda_path.cuda_path())
        for module, name, there in (
            (optim, "FUSED", (NAME,)),
            (vocab, "SUMS_WIDE", (NAME,)),
            (attention, "runs_fused", mock.Mock(return_value=True)),
            (documents_of, "route", mock.Mock(return_value=documents_of.VARLEN)),
            (documents_of, "varlen_options", mock.Mock(return_value=options)),
            (masking_utils, "is_tracing", mock.Mock(return_value=False)),  # else it reads none that has no values
            (FakeTensor, "tolist", lambda x: [1.0] * device.note(x.numel())),
        ):
            patches.enter_context(mock.patch.object(module, name, there))
        patches.enter_context(device)
        step = stepper(head, target, documents, micro_batches, device)
        step(0, halted=lambda: False)
        device.waits.clear()
        device.sent = 0
        step(1, halted=lambda: False)
    return {"waits": device.waits, "sent": device.sent}


def main() -> None:
    """Print the counts of every case, or what it raised."""
    _setup_privateuseone_for_python_backend(NAME)
    getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]  # autocast asks, though it is off
    for case in sys.argv[1:]:
        name, *sizes = case.split(":")
        try:
            if name == "memory" or name.isdigit():
                found: Any = loss_launches.of_case(name, *sizes)
            else:
                found = counted(name, *map(int, sizes))
        except Exception as error:
            if os.environ.get("HEADSTART_DEBUG"):
                raise
            found = f"{type(error).__name__}: {error}"
        print(json.dumps({case: found}), flush=True)
    os._exit(0)  # the thread that takes the dummy's gradients never ends


if __name__ == "__main__":
    main()
