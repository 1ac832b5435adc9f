"""How long a tuning takes, and what is left out of one that is to end within its minutes."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from eval.config import TunerConfig
from eval.measures.cost_model import draft_key
from eval.tuning.grid import AGAIN, FINALISTS, SIZES, proposed
from inference.drafters.head import HeadDrafter

FEW = 4  # prompts that are left, of as many: half of them choose
SIMULATED = 3.5  # times that an answer takes to write, for its simulation: measured with the embedded target
SAMPLED = 1.2  # steps of the baseline that a sample of a tree's costs takes: likewise


@dataclass(frozen=True)
class Extent:
    """What the time of a tuning grows with."""

    prompts: int
    repeats: int
    grid: TunerConfig

    def smaller(self) -> Iterator["Extent"]:
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

    def left_out(self, full: "Extent", minutes: float | None) -> str:
        """Return what of a full one is left out; nothing where nothing is."""
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
        return "" if not lines or minutes is None else f"{', '.join(lines)}, to take {60 * minutes:.0f} s at most"


def fitted(
    full: Extent, minutes: float | None, batch_sizes: Sequence[int], drafter: HeadDrafter, takes_trees: bool,
    answer: Callable[[], int],
) -> tuple[Extent, str]:  # fmt: skip
    """Return the largest extent for the minutes, or the smallest there is, with the line that says what it takes.

    `answer` decodes one answer without drafts and returns its tokens; the second one is timed.
    """
    answer()
    begin = time.perf_counter()
    tokens = answer()
    written = time.perf_counter() - begin
    extent, seconds = full, 0.0
    for extent in (full, *full.smaller()):
        seconds = written * _answers(extent, batch_sizes, drafter, takes_trees, max(tokens, 1))
        if minutes is None or seconds <= 60 * minutes:
            break
    left_out = extent.left_out(full, minutes)
    return extent, f"tuning: about {seconds:.0f} s{left_out and '; '}{left_out}"


def _answers(extent: Extent, batch_sizes: Sequence[int], drafter: HeadDrafter, takes_trees: bool, tokens: int) -> float:
    """Return as many answers as take as long to write without drafts as a tuning of this extent takes."""
    grid, current = extent.grid, drafter.policy
    deepest = min(drafter.head.max_depth, max(current.deepest, *grid.depths))
    rank = torch.arange(max(grid.top_k))
    acceptance = 0.5 ** (1 + rank).expand(deepest, -1)  # any will do: trees are counted
    families = proposed(grid, acceptance, current, deepest, takes_trees)
    trees = len({draft_key(tree) for members in families.values() for tree in members})
    answers = extent.prompts * (1 + SIMULATED)
    steps = (1 + len(grid.contexts)) * len({*SIZES, *grid.nodes}) * (2 * grid.samples + 1.0)
    for batch in {1, *batch_sizes}:
        steps += SAMPLED * grid.samples * trees
        if batch in batch_sizes:
            groups = len(families) if batch == min(batch_sizes) else 2  # then chains and trees
            steps += SAMPLED * AGAIN * grid.samples * FINALISTS * groups
            # The baseline and the best of each group, compared once and timed.
            answers += max(extent.prompts // 2, batch) * (1 + groups) * (1 + 2 * extent.repeats)
    return answers + steps / tokens
