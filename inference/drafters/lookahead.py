"""Lookahead decoding (Fu et al., arXiv 2402.02057): n-grams from Jacobi iteration of the target."""

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heads.base import Tokens
from heads.common.typed import LARGEST, Count, Within
from inference.drafters.host import DrafterState, HostDrafter
from inference.protocol import CommittedTokens, DraftContext, Proposal
from inference.target.target import Target
from inference.verification.tree import DraftTree, LookAhead


class Lookahead(HostDrafter):
    """Runs a window of guesses as look-ahead tokens of every pass, and drafts the n-grams that it has completed."""

    reads_logits = True

    @dataclass(frozen=True)
    class Config:
        """The paper's W (window), N (ngram) and G (guesses), and whether the prompt's n-grams are drafted too."""

        window: Count
        ngram: Annotated[int, Within(3, LARGEST)]
        guesses: Count
        from_prompt: bool

    def __init__(self, config: Config, target: Target, name: str) -> None:
        target.check_masks(f"which drafter={name} needs: use drafter=prompt_lookup or suffix, which draft chains")
        self.config, self.name = config, name
        self.tree = f"w{config.window}n{config.ngram}g{config.guesses}"

    def start(self, prompt: Tokens) -> "Window":
        """Begin a sequence: fill the window with random tokens of the prompt."""
        return Window(self, prompt)


class Window(DrafterState):
    """One sequence's window of guesses, and the n-grams that it has completed.

    The window has `ngram` - 1 levels of `window` columns. The token of level j in column i is i + j positions after the
    root; level 0 starts with the root itself. A token attends to the root, to level 0 up to its column, and to the
    levels above it in its column. The target's tokens after the last level complete an n-gram in each column and
    become the last level, and level 0 is dropped. At temperatures above 0 the window still takes the argmax; its
    drafts are verified like any other.

    Memory: `guesses` n-grams for each token of the vocabulary at most, and at most `window` more with each pass.
    """

    def __init__(self, drafter: Lookahead, prompt: Tokens) -> None:
        self.config = config = drafter.config
        chance = random.Random(0)
        self.levels = [chance.choices(prompt, k=config.window) for _ in range(config.ngram - 1)]
        self.passes = 0
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}  # n-grams by their first token, the latest last
        if config.from_prompt:
            for end in range(config.ngram, len(prompt) + 1):
                self.collect(prompt[end - config.ngram : end])

    def collect(self, ngram: Tokens) -> None:
        """Put an n-gram into the pool as its token's latest."""
        ngrams = self.pool.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        ngrams.pop(rest, None)
        ngrams[rest] = None
        if len(ngrams) > self.config.guesses:
            del ngrams[next(iter(ngrams))]

    @torch.inference_mode()
    def update(self, commit: CommittedTokens) -> None:
        """Collect the n-grams that the pass completed, and shift the window by one level."""
        if commit.verified is None or commit.verified.look_ahead is None:
            return
        written = commit.verified.look_ahead[-len(self.levels[0]) :].argmax(-1).tolist()
        if self.passes >= self.config.ngram - 2:  # until then the columns have random tokens below their first
            for column in zip(*self.levels, written, strict=True):
                self.collect(list(column))
        self.levels = [*self.levels[1:], written]
        self.passes += 1

    def propose(self, context: DraftContext) -> Proposal:
        """Draft the root's n-grams as one tree, the latest first, with the window as look-ahead tokens."""
        root, max_draft_depth = context.token[-1], context.max_draft_depth
        # Columns beyond the end of the answer are dropped.
        width = max(0, min(len(self.levels[0]), max_draft_depth - self.config.ngram + 3))
        self.levels = [level[:width] for level in self.levels]
        token, parent, node_of = [root], [-1], {}
        for ngram in reversed(self.pool.get(root, {})):  # common prefixes once
            node = 0
            for drafted in ngram[:max_draft_depth]:
                if (node, drafted) not in node_of:
                    node_of[node, drafted] = len(token)
                    token.append(drafted)
                    parent.append(node)
                node = node_of[node, drafted]
        tree = DraftTree(torch.tensor(token), torch.tensor(parent))
        if width == 0:
            return Proposal(tree)
        self.levels[0][0] = root
        token = [token for level in self.levels for token in level][1:]
        shape = window(self.config.ngram - 1, width, len(tree.token))
        return Proposal(tree, None, LookAhead(torch.tensor(token), *shape))


@lru_cache(maxsize=1024)
def window(levels: int, width: int, nodes: int) -> tuple[Int[Tensor, "R"], Bool[Tensor, "R M"]]:
    """Return each look-ahead token's distance from the root, level by level, and its mask over nodes and tokens."""
    index = torch.arange(1, levels * width)
    level, column = index // width, index % width
    before = (level == 0) & (column <= column[:, None])
    above = (column == column[:, None]) & (level <= level[:, None])
    return level + column, torch.cat([(torch.arange(nodes) == 0).expand(len(index), -1), before | above], 1)
