"""Exact laws by enumeration: the real code is run on every outcome of its random choices.

`Replay` replaces the random numbers: each choice forks, and every fork is run with its probability. Targets and draft
heads are tables, so the law of what one drafted and verified pass emits can be compared with the target's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jaxtyping
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from heads.base import LevelNodes, LevelOutput
from inference.drafters.policy import TreeConfig, grow
from inference.protocol import DraftContext, Proposal
from inference.verification import rules
from inference.verification import tree as trees
from inference.verification.rng import RequestRng
from inference.verification.rules import RULES, is_chain, resolve_rule
from inference.verification.sample import Sampling, distribution, penalize
from inference.verification.tree import DraftTree
from tests.heads.stub import TinyEnds
from tests.oracle import WALKS, Rng, by_node, seen_tokens

VOCAB, HORIZON = 3, 3
PROMPT = [2, 0]  # the last one is the root
EXACT = 1e-10

Result = TypeVar("Result")
Law = dict[tuple[int, ...], float]
Rule = Callable[[DraftTree, Tensor, Tensor | None, Rng], tuple[list[int], int]]  # tree, p, q, rng


def verify(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng, rule: str = "auto") -> tuple[list[int], int]:
    """Verify a draft by the oracle's rules, given the target's probs p after each node."""
    return WALKS[resolve_rule(rule, is_chain(tree.parent.tolist()), q is not None, False)](tree, p, q, rng)


def verify_on_device(
    tree: DraftTree, logits: Tensor, q: Tensor | None, sampling: Sampling, rng: Rng, rule: str = "auto"
) -> tuple[list[int], int]:
    """Verify a draft by the engine's rules, whose q has a row for each node with children."""
    batch = DraftTree(tree.token[None], tree.parent[None])
    ancestor_mask = trees.ancestors(batch)
    depth, greedy = ancestor_mask.sum(-1) - 1, sampling.temperature == 0
    valid, tree_depth = (
        rules.valid_nodes(batch, ancestor_mask, depth, torch.tensor([len(tree.token)])),
        int(depth.max()),
    )
    parents = tree.parent.tolist()
    walk = RULES["match" if len(parents) == 1 else resolve_rule(rule, is_chain(parents), q is not None, greedy)].verify
    p = distribution(logits, sampling)
    if greedy:
        best = logits.max(-1).indices[None]
        last = rules.follow(batch, ancestor_mask, valid, batch.token == best.gather(1, batch.parent.clamp_min(0)))
        token = best[0, last]
    elif walk is None:

        def choose(node: Tensor, _: int) -> Tensor:
            return torch.tensor(rng.sample(p[node]))

        last, token = rules.walk(batch, valid, choose, tree_depth, allow_host_sync=True)
    else:
        draft = rules.Sampled(parents, batch.token, valid, q[None])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rules, "AcceptDraws", lambda *_: Coins(rng))
            last, probs = walk(draft, p[None], torch.zeros(1, len(parents)), True)
        token = torch.tensor(rng.sample(probs))
    found = rules.accepted_paths(batch, ancestor_mask, last, token, tree_depth)
    count = int(found.committed)
    return found.path[0, :count].tolist(), int(found.token[0, count - 1])


class Coins:
    """The coins of one sequence: a toss that is made forks."""

    def __init__(self, rng: Rng) -> None:
        self.rng, self.used_uniforms = rng, torch.zeros(1, dtype=torch.long)

    def sample(self, probability: Tensor, tossing: Tensor) -> Tensor:
        return torch.tensor([bool(tossing) and self.rng.accept(float(probability))])


class Replay(RequestRng):
    """Random numbers that follow a script of choices and note the alternatives that they did not take."""

    coupled = False

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.probability = script, [], 1.0
        self.open: list[list[int]] = []

    def choose(self, weights: list[float]) -> int:
        """Take the scripted option, or the first possible one."""
        possible = [i for i, w in enumerate(weights) if w > 0]
        at = len(self.taken)
        choice = self.script[at] if at < len(self.script) else possible[0]
        if at >= len(self.script):
            self.open += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.probability *= weights[choice]
        return choice

    def sample(self, law: Tensor, depth: int = 1) -> list[int]:
        return [self.choose(row) for row in law.tolist()]

    def sample_distinct(self, law: Tensor, count: int) -> Tensor:
        """Draw without replacement, one after another."""
        rows = []
        for row in law[0].tolist():
            drawn: list[int] = []
            for _ in range(min(count, len(row))):
                total = sum(row)
                drawn.append(self.choose([weight / total for weight in row]) if total > 0 else -1)
                if total > 0:
                    row[drawn[-1]] = 0.0
            rows.append(drawn)
        return torch.tensor([rows])

    def token(self, law: Tensor, depth: int) -> int:
        return self.sample(law)[0]

    def samples(self, _: torch.device) -> "Replay":
        return self

    def at(self, _: int) -> "Replay":  # the script goes on
        return self

    def accept(self, probability: float) -> bool:
        """Fork on acceptance."""
        probability = min(1.0, probability)
        return self.choose([1 - probability, probability]) == 1


def outcomes(program: Callable[[Any], Result]) -> list[tuple[Result, float]]:
    """Return every result of a program with its probability; equal results may stand there more than once."""
    found = []
    scripts: list[list[int]] = [[]]
    try:
        while scripts:
            rng = Replay(scripts.pop())
            found.append((program(rng), rng.probability))
            scripts += rng.open
            jaxtyping.config.update("jaxtyping_disable", True)  # the first outcome has had its shapes checked
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert abs(sum(weight for _, weight in found) - 1) < EXACT
    return found


def law(program: Callable[[Any], tuple[int, ...]]) -> Law:
    """Return the probability of every result of a program."""
    found = Law()
    for result, weight in outcomes(program):
        found[result] = found.get(result, 0.0) + weight
    return found


def distance(found: Law, expected: Law) -> float:
    """Return the total variation between two laws."""
    return 0.5 * sum(abs(found.get(k, 0.0) - expected.get(k, 0.0)) for k in {*found, *expected})


def mild(generator: torch.Generator, spread: float = 0.5) -> Tensor:
    return torch.randn(VOCAB, generator=generator, dtype=torch.float64) * spread


def holed(generator: torch.Generator) -> Tensor:
    """Return logits of which some are minus infinity: exact zeros."""
    kept = torch.rand(VOCAB, generator=generator) < 0.6
    kept[int(torch.randint(VOCAB, (1,), generator=generator))] = True
    return mild(generator, 1.5).masked_fill(~kept, float("-inf"))


def only(logits: Tensor, tokens: list[int]) -> Tensor:
    return torch.full_like(logits, float("-inf")).scatter(0, torch.tensor(tokens), logits[tokens])


def near(generator: torch.Generator, spread: float) -> tuple[Tensor, Tensor]:
    """Return logits, and the same with a little noise."""
    logits = mild(generator, 1.5)
    return logits, logits + mild(generator, spread)


# How the target's logits after a text, and then the draft's, come about.
FAMILIES: dict[str, Callable[[torch.Generator], tuple[Tensor, Tensor]]] = {
    "mild": lambda g: (mild(g), mild(g)),
    "peaky": lambda g: (mild(g, 3.0), mild(g, 3.0)),
    "close": lambda g: near(g, 0.4),
    "equal": lambda g: near(g, 0.0),
    "zeros": lambda g: (holed(g), holed(g)),
    "disjoint": lambda g: (only(mild(g), [0, 1]), only(mild(g), [2])),
}


class Tables:
    """A target and a draft head that are tables: random logits for every sequence of tokens after the root."""

    config, vocab, embeddings = None, None, TinyEnds()
    max_depth = HORIZON - 1
    feature_layers: tuple[int, ...] = ()

    def __init__(self, seed: int, family: str = "mild") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.family = FAMILIES[family]
        self.rows: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self.known: list[tuple[int, ...]] = []

    def unroll(self, *_: object) -> None:
        raise AssertionError("a table has no features")

    extend = score = unroll

    def logits(self, path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the target's and the draft's logits after a path."""
        if path not in self.rows:
            self.rows[path] = self.family(self.generator)
        return self.rows[path]

    def level(self, paths: list[tuple[int, ...]]) -> LevelOutput:
        start = len(self.known)
        self.known += paths
        index = torch.arange(start, len(self.known), dtype=torch.float64)[:, None]
        return LevelOutput(torch.stack([self.logits(path)[1] for path in paths])[None], index[None])

    def expand(self, state: None, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        above = [self.known[int(i)] for i in level.hidden[0, nodes.parent[0], 0]]
        return self.level([(*path, t) for path, t in zip(above, nodes.token[0].tolist(), strict=True)])

    def scores(self, tree: DraftTree, sampling: Sampling) -> Tensor:
        """Return the target's logits at the nodes, penalised as the engine does it."""
        logits = torch.stack([self.logits(text)[0] for text in texts(tree)])
        if sampling.repetition_penalty == 1:
            return logits
        before = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, torch.tensor(PROMPT), True)
        return penalize(logits, seen_tokens(tree, before), sampling)

    def law(self, path: tuple[int, ...], sampling: Sampling) -> list[float]:
        """Return the target's law after a path, by transformers' own processors."""
        scores, token = self.logits(path)[0][None], torch.tensor([[*PROMPT, *path]])
        if sampling.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(token, scores)
        if sampling.temperature == 0:
            return [float(i == int(scores.argmax())) for i in range(VOCAB)]
        scores = TemperatureLogitsWarper(sampling.temperature)(token, scores)
        scores = TopKLogitsWarper(sampling.top_k)(token, scores) if sampling.top_k else scores
        scores = TopPLogitsWarper(sampling.top_p)(token, scores) if sampling.top_p < 1 else scores
        return MinPLogitsWarper(sampling.min_p)(token, scores)[0].softmax(-1).tolist()

    def continued(self, law: Law, sampling: Sampling) -> Law:
        """Return the law of the first HORIZON tokens where texts of the given law go on by plain sampling."""
        open_, done = dict(law), Law()
        while open_:
            path, weight = open_.popitem()
            if len(path) >= HORIZON:
                done[path[:HORIZON]] = done.get(path[:HORIZON], 0.0) + weight
                continue
            for token, share in enumerate(self.law(path, sampling)):
                if share > 0:
                    longer = (*path, token)
                    open_[longer] = open_.get(longer, 0.0) + weight * share
        return done

    def target_law(self, sampling: Sampling) -> Law:
        """Return the law of the first HORIZON tokens by plain sampling."""
        return self.continued({(): 1.0}, sampling)


def texts(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return the tokens after the root that lead to each node."""
    made: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token.tolist(), tree.parent.tolist(), strict=True):
        made.append(() if parent < 0 else (*made[parent], token))
    return made


class Passed(NamedTuple):
    """What one drafted and verified pass emits: the law of its tokens, as many as they are, and their mean count."""

    law: Law
    tokens: float


class Draft(NamedTuple):
    """A proposal with the target's logits at its nodes, and its probability."""

    proposal: Proposal
    logits: Tensor
    weight: float


def drafts(tables: Tables, config: TreeConfig, sampling: Sampling) -> list[Draft]:
    """Return everything that `grow` may propose after the prompt."""

    def program(draws: Any) -> Proposal:
        return grow(tables, None, tables.level([()]), config, DraftContext(list(PROMPT), sampling, draws, HORIZON - 1))

    return [Draft(made, tables.scores(made.tree, sampling), weight) for made, weight in outcomes(program)]


def one_pass(found: list[Draft], sampling: Sampling, rule: str | Rule) -> Passed:
    """Verify every draft, by a rule's name as the engine does it or by a rule of the test's own."""
    law: Law = {}
    for draft in found:
        token = draft.proposal.tree.token.tolist()
        for (path, last), weight in outcomes(partial(judged, draft, sampling, rule)):
            text = (*[token[node] for node in path[1:]], last)
            law[text] = law.get(text, 0.0) + weight * draft.weight
    return Passed(law, sum(len(text) * weight for text, weight in law.items()))


def judged(draft: Draft, sampling: Sampling, rule: str | Rule, rng: Rng) -> tuple[list[int], int]:
    """Verify one draft."""
    tree, q = draft.proposal.tree, draft.proposal.q
    if isinstance(rule, str):
        return verify_on_device(tree, draft.logits, q, sampling, rng, rule)
    kept, index = trees.keep(tree, tree.token >= 0)
    nodes = by_node(tree, q)
    path, token = rule(kept, distribution(draft.logits[index], sampling), None if nodes is None else nodes[index], rng)
    return index[path].tolist(), token


class Ragged(TreeConfig):
    """A sampled tree whose nodes have different numbers of children."""

    def shape(self) -> list[tuple[int, ...]]:
        return [(0,), (1,), (1, 0), (1, 1)]


TREES = {
    "chain": TreeConfig("chain", 2, 0, 0, [], []),
    "static": TreeConfig("static", 0, 0, 0, [[0], [1], [0, 0], [0, 1]], []),
    "uneven": TreeConfig("static", 0, 0, 0, [[0], [1], [2], [2, 1], [2, 0]], []),
    "dynamic": TreeConfig("dynamic", 2, 2, 4, [], []),
    "sampled": TreeConfig("sampled", 0, 0, 0, [], [2, 1]),
    "single": TreeConfig("sampled", 0, 0, 0, [], [1, 2]),
    "siblings": TreeConfig("sampled", 0, 0, 0, [], [3]),
    "ragged": Ragged("sampled", 0, 0, 0, [], [2, 2]),
}
SAMPLINGS = {
    "greedy": Sampling(0.0, 0, 1.0),
    "greedy, penalty": Sampling(0.0, 0, 1.0, 0.0, 1.6),
    "T0.7": Sampling(0.7, 0, 1.0),
    "T1": Sampling(1.0, 0, 1.0),
    "T1.5": Sampling(1.5, 0, 1.0),
    "top-k": Sampling(1.0, 2, 1.0),
    "top-p": Sampling(0.8, 0, 0.7),
    "min-p": Sampling(1.0, 0, 1.0, 0.5),
    "penalty": Sampling(1.0, 0, 1.0, 0.0, 1.6),
    "reward": Sampling(0.7, 0, 1.0, 0.0, 0.6),
    "all": Sampling(1.3, 2, 0.9, 0.2, 1.3),
}
