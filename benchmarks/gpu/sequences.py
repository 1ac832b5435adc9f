"""Sequences in the engine at a context that is wanted, without a text: their caches are filled with random rows.

What a step costs depends on how many rows it looks at, hardly on what stands in them. So a step is taken again and
again from the same place, and a head of random weights drafts trees of the size that is asked for, of which nothing is
accepted. What the parts of a step took is what the engine itself notes of it, with what its clock waits for.
"""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from benchmarks.gpu.common import Asked, seconds
from benchmarks.gpu.traces import OWN
from benchmarks.long_context import Planted
from benchmarks.training import composed
from eval.measures.machine import synchronize
from eval.tuning.costs import planted
from heads import HEADS
from heads.base import DraftHead
from inference.batch import Batch, Running
from inference.drafters.head import BatchedHead, BatchedState, HeadBatch, HeadDrafter
from inference.drafters.plain import Plain
from inference.drafters.policy import TreeConfig
from inference.protocol import Commit, Drafter
from inference.session import Session, Settings
from inference.target import compiled
from inference.target.cache import TargetCache, roomy
from inference.target.model import TargetOutput
from inference.target.target import Target
from inference.verification.sample import GREEDY

LARGEST = 128  # nodes of a pass; a cache has room for as many, and for what they are padded to
# A pass of as many nodes as the goal speaks of, the root among them; EAGLE-2's depth and width.
TREE = TreeConfig("dynamic", 6, 10, 63, [], [])
TOY_TREE = TreeConfig("dynamic", 3, 4, 15, [], [])
WARM = 3  # steps that do not count


class Parts(NamedTuple):
    """Seconds of a step, of all its sequences together.

    `draft` is all that the head does: it takes in the committed rows and grows the tree. `verify` is the target's pass
    with its mask and the lm_head, `rest` the choice of the path, the caches' compaction, and the engine around it.
    """

    draft: float
    verify: float
    rest: float

    @property
    def step(self) -> float:
        """Return the whole."""
        return sum(self)


class Sequences:
    """So many sequences of so many committed rows each, whose buffers outlive every step.

    Raises:
        torch.OutOfMemoryError: the device has no room for them.
    """

    def __init__(self, target: Target, size: int, context: int) -> None:
        self.target, self.context = target, context
        self.cache = target.batch_cache(size)
        self.caches = [self.cache.enter() for _ in range(size)]
        for each in self.caches:
            fill(target, each, context)

    @torch.inference_mode()
    def measure(self, drafters: Sequence[Drafter], repeats: int) -> Parts:
        """Return the median parts of a step, one drafter a sequence."""
        step = self.stepper(drafters)
        taken: list[Parts] = []
        seconds(lambda: taken.append(step()), self.target.device, repeats, WARM)
        return Parts(*map(statistics.median, zip(*taken[WARM:], strict=True)))

    def stepper(self, drafters: Sequence[Drafter]) -> Callable[[], Parts]:
        """Return what takes a step, goes back to where it began, and tells what the step took."""
        target = self.target
        drafts = drafters[0].batch if isinstance(drafters[0], Warm) else None
        batch = Batch(target, drafters, drafts)
        batch.cache = self.cache
        if batch.device_step is not None:
            batch.device_step.cache = self.cache
        states = [drafter.start([0] * (self.context + 1)) for drafter in drafters]
        settings = Settings(2 * LARGEST, GREEDY)
        for i, cache in enumerate(self.caches):
            session = Session(target, drafters[i], [0] * (self.context + 1), settings, cache)
            session.state = copy.copy(states[i]) if drafts is None else states[i]
            session.generation.tokens.append(0)
            batch.slots.append(Running(i, session, 0.0))

        def step() -> Parts:
            wait(target.device)
            begin = time.perf_counter()
            with torch.inference_mode():
                batch.step()
            wait(target.device)
            spent = time.perf_counter() - begin
            done = [row.session.generation.steps.pop() for row in batch.running]
            draft, verify = sum(each.draft_s for each in done), sum(each.verify_s for each in done)
            for row, state in zip(batch.running, states, strict=True):
                row.session.cache.keep(self.context, [])
                del row.session.context[self.context + 1 :], row.session.generation.tokens[1:]
                row.session.state = copy.copy(state) if drafts is None else state
            if batch.device_step is not None:
                batch.device_step.current = []  # the slots hold what came after the step
            if drafts is not None and drafts.cache is not None:
                with torch.inference_mode():
                    drafts.cache.length.fill_(self.context)
            return Parts(draft, verify, spent - draft - verify)

        return step

    def plain(self) -> list[Drafter]:
        """Return what decodes plainly."""
        return [Plain(self.target.device) for _ in self.caches]

    def planted(self, nodes: int) -> list[Drafter]:
        """Return what drafts trees whose passes have so many nodes, the root among them."""
        draft = planted(0, [1, 2, 3, 4], nodes - 1, self.target)
        return [Planted(draft) for _ in self.caches]

    @torch.inference_mode()
    def drafted(self, head: DraftHead, tree: TreeConfig) -> list[Drafter]:
        """Return what drafts with a head that has taken in as many random rows as it looks back at."""
        target, rows = self.target, min(self.context, getattr(head.config, "length", None) or self.context)
        width, layers = target.embeddings.hidden_size, len(head.feature_layers)
        hidden = torch.randn(1, rows, layers, width, device=target.device, dtype=target.dtype)
        last = torch.randn(1, rows, width, device=target.device, dtype=target.dtype)
        prefill = Commit(torch.arange(rows, device=target.device) % 100, TargetOutput(hidden, last, None), None)
        drafter = HeadDrafter(head, tree, head.config.name)
        _, batch = drafter.clones(len(self.caches))
        return [Warm(drafter, batch, prefill) for _ in self.caches]


class Warm(BatchedHead):
    """A head whose sequences all begin behind the same rows."""

    def __init__(self, drafter: HeadDrafter, batch: HeadBatch, prefill: Commit) -> None:
        super().__init__(drafter, batch)
        self.prefill = prefill

    @torch.inference_mode()
    def start(self, prompt: list[int]) -> BatchedState:
        """Begin a sequence behind the rows."""
        state = super().start(prompt)
        state.update(self.prefill)
        if self.batch.cache is not None:
            self.batch.cache.length.fill_(len(prompt) - 1)
        return state


def fill(target: Target, cache: TargetCache, rows: int) -> None:
    """Give an empty cache so many random rows, in buffers that a step from there on need not enlarge.

    In two halves: buffers that are full double, and those of a long context should not.
    """
    config: Any = target.config
    whole = roomy(rows + 2 * LARGEST)
    for start, end in ((0, whole // 2), (whole // 2, whole)):
        shape = 1, config.num_key_value_heads, end - start, target.embeddings.layer.head_dim
        keys, values = (torch.randn(shape, device=target.device, dtype=target.dtype) for _ in range(2))
        for layer in range(config.num_hidden_layers):
            cache.hf.update(keys, values, layer)
    cache.keep(rows, [])


def random_head(name: str, target: Target) -> Any:
    """Return a head of random weights, otherwise as `conf/head` has it, in the target's dtype."""
    torch.manual_seed(1)
    head: Any = HEADS[name](composed(f"head={name}").head, target.embeddings)
    return head.to(target.device, target.dtype).eval().requires_grad_(False)


def compile_anew(target: Target, asked: Asked) -> None:
    """Compile the target's passes, and forget all that was compiled before, whose sizes were others.

    A toy is compiled by dynamo alone, whose graph runs as it is: what inductor makes of it takes minutes on a CPU.
    """
    release(target)
    compiled.BACKEND = "eager" if asked.toy else "inductor"
    target.compile()


def wait(device: torch.device) -> None:
    """Wait for the device, as the measurement does and not the step: a profile tells the two apart."""
    with record_function(OWN):
        synchronize(device)


def release(target: Target) -> None:
    """Take the target's compiled passes and their buffers back."""
    target.compiled = None
    torch.compiler.reset()
    gc.collect()  # target and compiled passes know each other
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
