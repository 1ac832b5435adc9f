"""How long a tuning takes, and what is left out of one that is to end within its minutes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from eval.config import DecodingConfig, TunerConfig
from eval.measures.cost_model import draft_key
from eval.tuning.grid import AGAIN, FINALISTS, SIZES, proposed
from inference.decode import Settings
from inference.drafters.head import HeadDrafter

FEW = 4  # prompts that are left, of as many: half of them choose
SIMULATED = 3.5  # times that an answer takes to write, for its simulation: measured with the embedded target
SAMPLED = 1.2  # steps of the baseline that a sample of a tree's costs takes: likewise


@dataclass(frozen=True)
class TunePlan:
    """Settings of a tuning of the tree of one run's head."""

    run: str  # a folder or Hub id
    tree: dict[str, Any]  # overrides of that tree, where the search begins
    grid: TunerConfig  # the values to try
    decoding: DecodingConfig  # greedy decoding settings, and the batch sizes
    repeats: int  # timed passes over the prompts
    prompts: int
    minutes: float | None = None  # that it is to take, at most about; None: as many as it takes

    @property
    def settings(self) -> Settings:
        """The request settings of the recorded texts."""
        return self.decoding.settings(0.0)

    @property
    def sizes(self) -> list[int]:
        """The numbers of drafted nodes whose verification pass is timed."""
        return sorted({*SIZES, *self.grid.nodes})

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes, each once."""
        return sorted(set(self.decoding.batch_sizes()))

    def smaller(self) -> Iterator["TunePlan"]:
        """Yield ever smaller ones: without further repeats, of fewer prompts, of fewer trees, of fewer samples."""
        one = replace(self, repeats=1)
        yield one
        while one.prompts > FEW:
            one = replace(one, prompts=max(FEW, one.prompts // 2))
            yield one
        thinned = {key: getattr(self.grid, key)[::2] for key in ("depths", "top_k", "nodes", "contexts")}
        for samples in (self.grid.samples, self.grid.samples // 2, 1):
            one = replace(one, grid=replace(self.grid, **thinned, samples=max(samples, 1)))
            yield one

    def left_out(self, full: "TunePlan") -> str:
        """Return what of a full one is left out for its minutes; nothing where nothing is."""
        numbers = {
            f"{count} of {whole} {name}": count < whole
            for name, count, whole in (
                ("prompts", self.prompts, full.prompts),
                ("repeats", self.repeats, full.repeats),
                ("samples", self.grid.samples, full.grid.samples),
            )
        }
        lines = [line for line, differs in numbers.items() if differs]
        lines += ["every other depth, width and size of tree"] * (self.grid.depths != full.grid.depths)
        return f"{', '.join(lines)}, to take {60 * self.minutes:.0f} s at most" if lines and self.minutes else ""


def fitted(full: TunePlan, drafter: HeadDrafter, takes_trees: bool, answer: Callable[[], int]) -> tuple[TunePlan, str]:
    """Return the largest plan for the minutes, or the smallest there is, with the line that says what it takes.

    `answer` decodes one answer without drafts and returns its tokens; the second one is timed.
    """
    answer()
    begin = time.perf_counter()
    tokens = answer()
    written = time.perf_counter() - begin
    plan, seconds = full, 0.0
    for plan in (full, *full.smaller()):
        seconds = written * _answers(plan, drafter, takes_trees, max(tokens, 1))
        if plan.minutes is None or seconds <= 60 * plan.minutes:
            break
    left_out = plan.left_out(full)
    return plan, f"tuning: about {seconds:.0f} s{left_out and '; '}{left_out}"


def _answers(plan: TunePlan, drafter: HeadDrafter, takes_trees: bool, tokens: int) -> float:
    """Return as many answers as take as long to write without drafts as a tuning takes."""
    grid, current = plan.grid, drafter.policy
    deepest = min(drafter.head.max_depth, max(current.deepest, *grid.depths))
    rank = torch.arange(max(grid.top_k))
    acceptance = 0.5 ** (1 + rank).expand(deepest, -1)  # any will do: trees are counted
    families = proposed(grid, acceptance, current, deepest, takes_trees)
    trees = len({draft_key(tree) for members in families.values() for tree in members})
    answers = plan.prompts * (1 + SIMULATED)
    steps = (1 + len(grid.contexts)) * len(plan.sizes) * (2 * grid.samples + 1.0)
    for batch in {1, *plan.batch_sizes}:
        steps += SAMPLED * grid.samples * trees
        if batch in plan.batch_sizes:
            groups = len(families) if batch == plan.batch_sizes[0] else 2  # then chains and trees
            steps += SAMPLED * AGAIN * grid.samples * FINALISTS * groups
            # The baseline and the best of each group, compared once and timed.
            answers += max(plan.prompts // 2, batch) * (1 + groups) * (1 + 2 * plan.repeats)
    return answers + steps / tokens
