"""SuffixDecoding (Oliaro et al., arXiv 2411.04975): the most frequent continuations of the text's suffixes."""

import copy
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch

from heads.base import Tokens
from heads.common.typed import LARGEST, Amount, Count, Fraction, Within
from inference.drafters.host import DrafterState, HostDrafter
from inference.protocol import DraftContext, Proposal
from inference.target.target import Target
from inference.verification.tree import chain

OPEN = sys.maxsize  # the end of an edge that grows with its text


class Node:
    """An edge and the node at its end: `text[start:end]`, which occurs `count` times after the edges above it.

    `best` is the most frequent child, of equals the latest; the root does not need it.
    """

    __slots__ = ("best", "children", "count", "end", "start", "text")

    def __init__(self, text: Tokens, start: int, end: int, count: int) -> None:
        self.text, self.start, self.end, self.count = text, start, end, count
        self.children: dict[int, Node] = {}
        self.best: Node | None = None

    @property
    def length(self) -> int:
        """Number of tokens on the edge so far."""
        return min(self.end, len(self.text)) - self.start

    def promote(self, child: "Node") -> None:
        """Make a child whose count has just risen the best one if none is more frequent."""
        if self.best is None or child.count >= self.best.count:
            self.best = child


class Locus(NamedTuple):
    """The end of a substring in the tree: after `used` tokens of a node's edge."""

    node: Node
    used: int

    def follow(self, token: int) -> "Locus | None":
        """Return the locus after one more token; None if that never occurred."""
        node, used = self
        if used < node.length:
            return Locus(node, used + 1) if node.text[node.start + used] == token else None
        child = node.children.get(token)
        return None if child is None else Locus(child, 1)


class SuffixTree:
    """Counts the occurrences of every substring of at most `depth` tokens, overlaps included.

    Edges have several tokens (path compression).

    Appending a token costs one step for each repeated suffix of the text, at most `depth`. Nodes: at most two for each
    token and repeated suffix, and about two a token altogether.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.nodes = 0
        self.root = Node([], 0, 0, 0)
        self.texts: list[Tokens] = []
        # The nodes at which the repeated suffixes of the newest text end, shortest first. A suffix that occurs once is
        # a leaf, which grows with its text.
        self.active: list[Node] = []

    @classmethod
    def of(cls, depth: int, texts: Iterable[Tokens]) -> "SuffixTree":
        """Return the tree of texts, the oldest first."""
        tree = cls(depth)
        for text in texts:
            tree.start()
            tree.extend(text)
        return tree

    def start(self) -> None:
        """Begin another text; substrings do not cross texts."""
        self.texts.append([])
        self.active = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the newest text."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append one token: every suffix becomes one longer and is counted."""
        text = self.texts[-1]
        text.append(token)
        reached = []
        for node in (self.root, *self.active):
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = Node(text, len(text) - 1, OPEN, 1)
                self.nodes += 1
                node.promote(child)
                continue
            ends = node  # the node at which the suffix ends that is longer by the token
            if child.length == 1:
                child.count += 1
                node.promote(child)
                ends = child
            else:
                if node is not self.root and node.count == child.count + 1:
                    # Every occurrence of this node continues with the token: its edge takes it over.
                    node.end += 1
                    del node.children[token]
                else:
                    ends = node.children[token] = Node(child.text, child.start, child.start + 1, child.count + 1)
                    ends.best = child
                    if node.best is child:
                        node.best = ends
                    node.promote(ends)
                    self.nodes += 1
                child.start += 1
                ends.children[child.text[child.start]] = child
            reached.append(ends)
        self.active = reached[: self.depth - 1]
        if len(reached) == self.depth:  # deeper substrings are not counted
            tree_depth = reached[-1]
            pending = [*tree_depth.children.values()]
            while pending:
                self.nodes -= 1
                pending += pending.pop().children.values()
            tree_depth.children, tree_depth.best = {}, None

    def advance(self, loci: list[Locus], token: int) -> list[Locus]:
        """Return the loci of another text's suffixes after `token`, shortest first.

        `loci` are those before the token, [] for an empty text.
        """
        followed = (locus.follow(token) for locus in [Locus(self.root, 0), *loci])
        return [locus for locus in followed if locus is not None][: self.depth - 1]


class Suffix(HostDrafter):
    """Drafts from two suffix trees with counts: this request's prompt and output, and past requests' outputs.

    Every suffix of the text that occurs in a tree may be continued, up to a budget that grows with its length; the
    continuation with the highest score is drafted, of equal ones this request's.

    Memory: the request's tree grows linearly with its text. The past's has at most `memory_nodes` nodes of about 0.3
    KB; beyond it the older half of the outputs is dropped. The tokens of a request's last pass are not stored: the
    engine does not report them.
    """

    expects_acceptance = True

    @dataclass(frozen=True)
    class Config:
        """Depth of the trees, budget of a draft, and the use of past outputs."""

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
        self.current: SuffixState | None = None  # the sequence to add to the past's tree next

    def start(self, prompt: Tokens) -> "SuffixState":
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
        other.past = SuffixTree.of(self.config.depth, self.past.texts)
        return other

    def _remember(self) -> None:
        """Add the output of the last sequence to the past's tree."""
        output = [] if self.current is None else self.current.text[self.current.answer :]
        self.current = None
        if self.remembers and output:
            self.past.start()
            self.past.extend(output)
            while self.past.nodes > self.config.memory_nodes:
                self.past = SuffixTree.of(self.config.depth, self.past.texts[(len(self.past.texts) + 1) // 2 :])


class SuffixState(DrafterState):
    """One request's text with its suffix tree, and the loci of its suffixes in the past's tree."""

    def __init__(self, drafter: Suffix, prompt: Tokens) -> None:
        self.drafter, self.config = drafter, drafter.config
        self.answer = len(prompt)  # the start of the output that will be stored
        self.past_matches: list[Locus] = []
        self.suffixes = SuffixTree(self.config.depth)
        self.suffixes.start()
        self.text = self.suffixes.texts[0]
        self.extend(prompt)

    def reset(self) -> None:
        """Drop the loci in the past's old tree; the text so far will not be stored either."""
        self.past_matches = []
        self.answer = len(self.text)

    def propose(self, context: DraftContext) -> Proposal:
        """Return the best draft from the loci of the text's suffixes, shortest first, in the text and in the past.

        A draft follows the most frequent child while the path's probability is at least `min_probability`; its score is
        the expected number of accepted tokens. Of equal scores the text's own draft wins, then the longer match's.
        """
        self.extend(context.token[len(self.text) :])
        config, token, score = self.config, Tokens(), 0.0
        most = min(config.tokens, context.max_draft_depth)
        for matches in ([Locus(node, node.length) for node in self.suffixes.active], self.past_matches):
            longest = len(matches) + 1
            budgets = [
                (min(most, int(config.factor * length + config.offset), config.depth - length), length)
                for length in range(1, longest)
            ]
            # A token scores at most 1, so a budget below the best score cannot win.
            for budget, length in sorted(budgets, reverse=True):
                if budget < max(score, 1):
                    break
                (node, used), probability, expected, path = matches[length - 1], 1.0, 0.0, list[int]()
                while len(path) < budget:
                    if used == node.length:
                        if (child := node.best) is None:
                            break
                        probability *= child.count / node.count
                        if probability < config.min_probability:
                            break
                        node, used = child, 0
                    path.append(node.text[node.start + used])
                    expected += probability
                    used += 1
                if (expected, length) > (score, longest):
                    token, score, longest = path, expected, length
        return Proposal(chain(torch.tensor([context.token[-1], *token])), expected=score)

    def extend(self, tokens: Tokens) -> None:
        """Append tokens to the text, its tree, and the search in the past's tree."""
        self.suffixes.extend(tokens)
        if len(tokens) > self.config.depth:  # earlier tokens no longer matter
            self.past_matches, tokens = [], tokens[-self.config.depth :]
        for token in tokens:
            self.past_matches = self.drafter.past.advance(self.past_matches, token)
