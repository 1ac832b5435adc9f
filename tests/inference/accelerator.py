"""A dummy accelerator: tensors without values on a device of their own, which tell where a host would wait for them.

`main` runs the device step of heads and prints, as JSON, how many operations each part takes. Every read of a value,
every copy between host and device and every mix of devices raises, naming the line. Registering a device is for good,
so it has a process of its own.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from heads.base import Features, NewRows
from heads.modules.kv_cache import KVCache
from inference.drafters import policy
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.request import PhaseTimer, RequestParams
from inference.step import DeviceStep, Slots
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling
from tests import toys

NAME = "dummy"
CAPACITY, PROMPT = 96, 11
TREES = {
    "chain": TreeConfig("chain", 2, 0, 0, [], []),
    "static": TreeConfig("static", 0, 0, 0, [[0], [1], [0, 0], [1, 0]], []),
    "dynamic": TreeConfig("dynamic", 2, 3, 6, [], []),
    "best_first": TreeConfig("best_first", 2, 0, 6, [], []),
    "sampled": TreeConfig("sampled", 0, 0, 0, [], [2, 1]),
}
WARM = Sampling(0.8, 0, 0.9, repetition_penalty=1.2)
SAMPLINGS = {
    "greedy": (GREEDY, "auto"), "coupled": (WARM, "coupled"), "sampled": (WARM, "auto"),
    "recursive": (WARM, "recursive"),
}  # fmt: skip


class Watch(TorchDispatchMode):
    """Counts operations that launch something, and refuses copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (*_tensors(args), *_tensors(kwargs), *_tensors(out)) if t.ndim]
        if len({t.device.type for t in tensors}) > 1:
            raise RuntimeError(f"{func} copies between {sorted({t.device.type for t in tensors})}")
        if not func.is_view:
            self.counts[str(func)] += 1
        return out


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def on_dummy(module: nn.Module) -> None:
    """Give a module parameters and buffers of the same shapes on the dummy."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, value in held.items():
                if value is not None:
                    fake = torch.empty(value.shape, dtype=value.dtype, device=NAME)
                    held[name] = nn.Parameter(fake, requires_grad=False) if isinstance(value, nn.Parameter) else fake


def real(head: str, tree: str, architecture: str) -> tuple[Target, HeadDrafter]:
    """Return a toy target and a head of values."""
    dtype = (
        torch.bfloat16 if architecture in toys.EXPERTS else torch.float32
    )  # in others the host asks for their tokens
    target: Any = toys.target.__wrapped__(architecture, dtype)  # its parameters are replaced
    own: Any = toys.head(head, target)
    return target, HeadDrafter(own, TREES[tree], head)


def step_of(target: Target, drafter: HeadDrafter, size: int) -> DeviceStep:
    """Return the step of a full batch on the dummy, each with a prompt."""
    on_dummy(target.model)
    head: Any = drafter.head
    on_dummy(head)
    target.device = torch.device(NAME)
    layout = {
        layer: (keys._replace(device=target.device), values._replace(device=target.device))
        for layer, (keys, values) in target.layout.items()
    }
    target.layout = layout
    cache = target.batch_cache(size)
    cache.storage.reserve(CAPACITY)
    cache.storage.fit(0, *[torch.empty(1, form.groups, 1, form.width, device=NAME) for form in layout[0]], end=1)
    batch = drafter.batch(size)
    width, layers = target.embeddings.hidden_size, len(batch.feature_layers)
    token = torch.empty(size, 1, dtype=torch.long, device=NAME)
    hidden, last = (
        torch.empty(size, 1, *rest, dtype=target.dtype, device=NAME) for rest in ((layers, width), (width,))
    )
    if batch.head.has_kv_cache:
        batch.cache = KVCache(size, getattr(batch.head.config, "length", None), target.device)
    batch.set_longest(PROMPT)  # the rows of a prompt are not a step's, and need not run here
    _, batch.buffers = batch.head.extend(batch.cache, NewRows(Features(token, hidden, last, token), token))
    for _ in range(size):
        cache.allocate()
    step = DeviceStep(target, cache, batch, drafter.name)
    step.fixed_shapes, step.plan = True, batch.plan
    return step


def counted(step: DeviceStep, sampling: str) -> dict[str, int]:
    """Run a step twice, which builds tables the first time; return the operations of its parts and in all."""
    size = step.cache.storage.size
    how, rule = SAMPLINGS[sampling]
    vocab = step.target.embeddings.vocab_size if how.repetition_penalty != 1 else 0
    seen = torch.empty(size, vocab, dtype=torch.bool, device=NAME)
    slots = Slots(*torch.empty(6, size, dtype=torch.long, device=NAME), seen)
    settings, step.masks_eos = RequestParams(40, how, rule=rule, logit_gaps=True), True
    type(step.target).eos_mask = torch.empty(1, step.target.embeddings.vocab_size, dtype=torch.bool, device=NAME)
    with tables_made(), torch.inference_mode():
        step.run_stages(slots, step.kv_length(PROMPT), settings, PhaseTimer(step.target.device))
    watch, parts = Watch(), Counting(step.target.device)
    parts.watch = watch
    with watch, torch.inference_mode():
        told = step.run_stages(slots, step.kv_length(PROMPT), settings, parts)[1]
    return {"all": watch.counts.total(), "told": told.numel() // size, **parts.parts}


@contextmanager
def tables_made() -> Iterator[None]:
    """Let tables be made of numbers that the host knows, as they are in a first step."""
    made = torch.tensor
    policy._shape.cache_clear()
    torch.tensor = lambda data, device=None: torch.empty(made(data).shape, dtype=made(data).dtype, device=device)
    try:
        yield
    finally:
        torch.tensor = made


class Counting(PhaseTimer):
    """Counts operations where others count seconds."""

    watch: Watch

    def __init__(self, on: torch.device) -> None:
        super().__init__(on)
        self.parts: Counter[str] = Counter()
        self.before = 0

    def mark(self, ended: str | None) -> None:
        """End a part."""
        self.parts[ended or ""] += self.watch.counts.total() - self.before
        self.before = self.watch.counts.total()


def refused() -> list[str]:
    """Return what the dummy says to a host that reads or copies: values, two ways to copy, and a mix of devices."""
    said: list[str] = []
    with FakeTensorMode(allow_non_fake_inputs=True), Watch():
        x = torch.zeros(3, device=NAME)
        for read in (x.tolist, lambda: int(x[0]), x.cpu, lambda: x.copy_(torch.zeros(3)), lambda: x + torch.zeros(3)):
            try:
                read()
            except Exception as error:
                said.append(type(error).__name__)
    return said


def main(cases: list[str]) -> None:
    """Print what is refused, then the counts of every case: head:tree:size:sampling:architecture."""
    _setup_privateuseone_for_python_backend(NAME)
    print(json.dumps({"refused": refused()}))
    for case in cases:
        head, tree, size, sampling, architecture = case.split(":")
        made = real(head, tree, architecture)
        with FakeTensorMode(allow_non_fake_inputs=True):
            try:
                found: Any = counted(step_of(*made, int(size)), sampling)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
        print(json.dumps({case: found}), flush=True)
