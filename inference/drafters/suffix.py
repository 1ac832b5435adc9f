"""SuffixDecoding (Oliaro et al., arXiv 2411.04975): what most often followed the longest known suffixes of the text."""

import copy
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch

from heads.common.ranges import LARGEST, Amount, Count, Fraction, Within
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.suffix_tree import Locus, SuffixTree
from inference.protocol import Context, Proposal
from inference.target.target import Target
from inference.verification.tree import chain


class Draft(NamedTuple):
    """Drafted tokens, one after another, and how many of them the counts expect to be accepted."""

    token: list[int]
    score: float


class Suffix(HostDrafter):
    """Drafts from two counted suffix trees: of this request, prompt and output, and of past requests' outputs.

    Every suffix of the text that occurs in a tree may be continued, by a budget that grows with its length; the
    continuation with the highest score stands, this request's before the past's.

    Memory: the request's tree grows linearly with its text. The past's holds at most `memory_nodes` nodes of about
    0.3 KB, forgetting the oldest outputs first. What a request's last pass commits is not remembered: the engine does
    not report it.
    """

    expects_acceptance = True

    @dataclass(frozen=True)
    class Config:
        """Depth of the trees, budget of a draft, and the past's use."""

        depth: Annotated[int, Within(2, LARGEST)]
        tokens: Count
        factor: Amount
        offset: float
        min_probability: Fraction
        memory: bool
        memory_nodes: Count

    def __init__(self, config: Config, target: Target, name: str) -> None:
        self.config, self.name = config, name
        self.tree = f"path-{config.tokens}"
        self.remembers = config.memory
        self.past = SuffixTree(config.depth)
        self.current: SuffixState | None = None  # the sequence whose output comes next into the past's tree

    def start(self, prompt: list[int]) -> "SuffixState":
        """Remember the last request's output and index a new prompt."""
        self._remember()
        self.current = SuffixState(self, prompt)
        return self.current

    def reset(self) -> None:
        """Forget past requests, so that the next one starts cold: the order of requests matters to a warm start."""
        self.past = SuffixTree(self.config.depth)
        if self.current is not None:
            self.current.reset()

    def clone(self) -> "Suffix":
        """Return a drafter with a copy of the past's tree."""
        self._remember()
        other = copy.copy(self)
        other.past = self.past.copy()
        return other

    def _remember(self) -> None:
        """Take the output of the last sequence into the past's tree."""
        output = [] if self.current is None else self.current.text[self.current.answer :]
        self.current = None
        if self.remembers and output:
            self.past.start()
            self.past.extend(output)
            while self.past.nodes > self.config.memory_nodes:
                self.past.drop_oldest()


class SuffixState(DrafterState):
    """One request's text with its suffix tree, and where its suffixes end in the past's tree."""

    def __init__(self, drafter: Suffix, prompt: list[int]) -> None:
        self.drafter, self.config = drafter, drafter.config
        self.text: list[int] = []
        self.answer = len(prompt)  # where the output begins that will be remembered
        self.past_matches: list[Locus] = []
        self.suffixes = SuffixTree(self.config.depth)
        self.suffixes.start()
        self.extend(prompt)

    def reset(self) -> None:
        """Leave the past's old tree; the text so far will not be remembered either."""
        self.past_matches = []
        self.answer = len(self.text)

    def propose(self, context: Context) -> Proposal:
        """Return the draft of the highest score."""
        self.extend(context.token[len(self.text) :])
        best = Draft([], 0.0)
        for matches in (self.suffixes.matches(), self.past_matches):
            best = self.improve(best, matches, context.max_draft_depth)
        return Proposal(chain(torch.tensor([context.token[-1], *best.token])), expected=best.score)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens to the text, its tree, and the search in the past's tree."""
        self.text.extend(tokens)
        self.suffixes.extend(tokens)
        if len(tokens) > self.config.depth:  # what came before no longer matters
            self.past_matches, tokens = [], tokens[-self.config.depth :]
        for token in tokens:
            self.past_matches = self.drafter.past.advance(self.past_matches, token)

    def improve(self, best: Draft, matches: list[Locus], max_draft_depth: int) -> Draft:
        """Return the best draft from the loci where suffixes of the text end, shortest first, or the one at hand.

        Of equal scores the longer match's stands, and the one at hand before all.
        """
        config, longest = self.config, len(matches) + 1
        budgets = [
            (
                min(config.tokens, int(config.factor * length + config.offset), config.depth - length, max_draft_depth),
                length,
            )
            for length in range(1, longest)
        ]
        # A drafted token scores 1 at most: where much repeats, the first draft leaves most others no chance.
        for budget, length in sorted(budgets, reverse=True):
            if budget < max(best.score, 1):
                break
            draft = _path(matches[length - 1], budget, config.min_probability)
            if (draft.score, length) > (best.score, longest):
                best, longest = draft, length
        return best


def _path(locus: Locus, budget: int, floor: float) -> Draft:
    """Follow the most frequent child while the path stays likely enough."""
    (node, used), probability, score = locus, 1.0, 0.0
    token: list[int] = []
    while len(token) < budget:
        if used == node.length:
            child = node.best
            if child is None:
                break
            probability *= child.count / node.count
            if probability < floor:
                break
            node, used = child, 0
        token.append(node.text[node.start + used])
        score += probability
        used += 1
    return Draft(token, score)
