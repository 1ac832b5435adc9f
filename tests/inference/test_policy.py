"""Trees of every policy against a plain oracle, node by node, that shares no code with inference/drafters/policy.py.

The head is a table: random logits for every path. The oracle asks it one path at a time and follows each policy's
definition literally.
"""

import heapq
import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from heads.base import DraftVocabulary, LevelNodes, LevelOutput
from inference.drafters.policy import TreeConfig, by_confidence, grow, grow_batch
from inference.protocol import DraftContext, DraftInputs
from inference.verification import tree as trees
from inference.verification.rng import DRAFT_KEY, RequestRng, Samples, exponential_noise, hash_key, seed_key
from inference.verification.sample import Sampling
from inference.verification.tree import DraftTree

VOCAB, SEED, DEEPEST, SHARP = 7, 3, 5, 2.0
DOUBLE = torch.float64
Path = tuple[int, ...]
PROMPTS = [[2, 5, 1], [0, 3], [6, 6, 4, 2]]  # the root is the last token
ROOMS = [5, 2, 3]
TREES = {
    "chain": TreeConfig("chain", 4, 0, 0, [], []),
    "deep": TreeConfig("chain", 9, 0, 0, [], []),
    "static": TreeConfig("static", 0, 0, 0, [[2], [0], [0, 1], [0, 0], [2, 3], [0, 1, 0], [2, 3, 1], [2, 3, 1, 0]], []),
    "sampled": TreeConfig("sampled", 0, 0, 0, [], [3, 2, 1]),
    "wide": TreeConfig("sampled", 0, 0, 0, [], [1, VOCAB + 2]),
    "dynamic": TreeConfig("dynamic", 4, 3, 9, [], []),
    "few": TreeConfig("dynamic", 5, 3, 4, [], []),
    "all": TreeConfig("dynamic", 3, 2, 30, [], []),
    "level": TreeConfig("dynamic", 1, 4, 3, [], []),
    "best_first": TreeConfig("best_first", 4, 0, 6, [], []),
    "one": TreeConfig("best_first", 4, 0, 1, [], []),
    "many": TreeConfig("best_first", 2, 0, 40, [], []),
    "budget": TreeConfig("best_first", 9, 0, 25, [], []),
}
SAMPLINGS = {
    "greedy": Sampling(0.0, 0, 1.0),
    "penalised": Sampling(0.0, 0, 1.0, 0.0, 1.7),
    "coupled": Sampling(0.8, 0, 1.0, 0.0, 1.3),
    "sampled": Sampling(0.8, 5, 0.9, 0.0, 1.3),
}


class Table:
    """A head whose logits after a path are random numbers."""

    max_depth = DEEPEST

    def __init__(self, pruned: bool, sharpness: float = 2.0) -> None:
        self.sharpness, self.calls = sharpness, list[int]()
        self.lineages: list[tuple[int, ...]] = []  # of the known paths, the numbers of the drafted rows on them
        self.generator, self.rows, self.known = torch.Generator().manual_seed(1), dict[Path, Tensor](), list[Path]()
        self.vocab = DraftVocabulary(5, VOCAB) if pruned else None
        if self.vocab is not None:
            self.vocab.choose(torch.tensor([3, 0, 9, 8, 0, 5, 7]))

    def logits(self, path: Path) -> Tensor:
        if path not in self.rows:
            width = VOCAB if self.vocab is None else len(self.vocab.ids)
            self.rows[path] = self.sharpness * torch.randn(width, generator=self.generator, dtype=DOUBLE)
        return self.rows[path]

    def level(self, paths: list[list[Path]]) -> LevelOutput:
        index = torch.arange(len(self.known), len(self.known) + len(paths) * len(paths[0])).view(len(paths), -1, 1)
        self.known += [path for row in paths for path in row]
        self.lineages += [()] * (len(self.known) - len(self.lineages))
        return LevelOutput(
            torch.stack([torch.stack([self.logits(path) for path in row]) for row in paths]), index.double()
        )

    def expand(self, state: Any, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        paths = [
            [(*self.known[int(level.hidden[b, parent, 0])], token) for token, parent in zip(*row, strict=True)]
            for b, row in enumerate(zip(nodes.token.tolist(), nodes.parent.tolist(), strict=True))
        ]
        self.calls.append(nodes.token.shape[1])
        assert all(len(path) == nodes.depth + 1 for row in paths for path in row), "a path begins with its root"
        made, rows = self.level(paths), nodes.mask.shape[2]
        for b, parents in enumerate(nodes.parent.tolist()):  # a drafted row sees those on its own path alone
            for i, parent in enumerate(parents):
                above = self.lineages[int(level.hidden[b, parent, 0])]
                lineage = (*above, rows - len(parents) + i)
                self.lineages[int(made.hidden[b, i, 0])] = lineage
                assert nodes.mask[b, i].nonzero()[:, 0].tolist() == list(lineage)
        return made


class Ranking(NamedTuple):
    """How children are ranked: log-probs and tokens of a path's children, the best first."""

    head: Table
    prompt: list[int]
    sampling: Sampling
    coupled: bool

    def probs(self, path: Path) -> Tensor:
        """Return a path's processed probs over the whole vocabulary, at the sampling's temperature."""
        scores = self.penalised(path) / self.sampling.temperature
        if self.sampling.top_k:
            scores[scores < scores.sort().values[-self.sampling.top_k]] = -torch.inf
        order = scores.sort(descending=True)
        outside = order.values.softmax(-1).cumsum(-1) - order.values.softmax(-1) >= self.sampling.top_p
        scores[order.indices[outside]] = -torch.inf
        return scores.softmax(-1)

    def penalised(self, path: Path) -> Tensor:
        """Return a path's logits over the whole vocabulary, those of seen tokens pulled down."""
        full, vocab = torch.full((VOCAB,), -torch.inf, dtype=DOUBLE), self.head.vocab
        full[torch.arange(VOCAB) if vocab is None else vocab.ids] = self.head.logits(path)
        for token in {*self.prompt, *path}:
            factor = self.sampling.repetition_penalty
            full[token] = full[token] * factor if full[token] < 0 else full[token] / factor
        return full

    def children(self, path: Path) -> list[tuple[float, int]]:
        scores = self.penalised(path)
        if self.coupled:
            position = torch.tensor([len(self.prompt) + len(path) - 1])
            scores = (self.probs(path) / exponential_noise(torch.tensor([seed_key(SEED)]), position, VOCAB)[0]).log()
        compared = (scores * (SHARP if self.sampling.temperature == 0 else 1.0)).log_softmax(-1).tolist()
        return sorted(((value, token) for token, value in enumerate(compared) if value > -torch.inf), reverse=True)


def shape(config: TreeConfig) -> list[Path]:
    """Return the rank paths of a fixed shape, level by level."""
    if config.kind == "static":
        return sorted((tuple(path) for path in config.paths), key=lambda path: (len(path), path))
    widths = [1] * config.depth if config.kind == "chain" else config.widths
    return [path for depth in range(1, len(widths) + 1) for path in itertools.product(*map(range, widths[:depth]))]


def expected(ranking: Ranking, config: TreeConfig, room: int) -> list[Path]:
    """Return the tokens that lead to each node, the root's prompt left out; by level where the policy orders them."""
    depth, root = min(room, DEEPEST), (ranking.prompt[-1],)
    if config.kind == "dynamic":
        level, found = [(0.0, root)], list[tuple[float, Path]]()
        for _ in range(min(depth, config.depth, config.nodes)):
            best = sorted(level, reverse=True)[: config.top_k]
            level = [
                (score + value, (*path, token))
                for score, path in best
                for value, token in ranking.children(path)[: config.top_k]
            ]
            found += level
        kept = sorted(found, reverse=True)[: config.nodes]
        return [node[1] for node in found if node in kept]
    if config.kind == "best_first":
        heap, taken = [(-value, (*root, token)) for value, token in ranking.children(root)], list[Path]()
        heapq.heapify(heap)
        while heap and len(taken) < config.nodes:
            score, path = heapq.heappop(heap)
            taken.append(path)
            if len(path) <= min(depth, config.depth):
                for value, token in ranking.children(path):
                    heapq.heappush(heap, (score - value, (*path, token)))
        return taken
    filled: dict[Path, Path] = {(): root}
    for path in shape(config):
        above = filled.get(path[:-1])
        children = [] if above is None or len(path) > depth else ranking.children(above)
        if above is not None and path[-1] < len(children):
            filled[path] = (*above, children[path[-1]][1])
    return list(filled.values())[1:]


def paths(tree: DraftTree) -> list[Path]:
    made: list[Path] = []
    for token, parent in zip(tree.token.tolist(), tree.parent.tolist(), strict=True):
        made.append((token,) if parent < 0 else (*made[parent], token))
    return made


def contexts(way: str) -> list[DraftContext]:
    draws = [RequestRng(seed_key(SEED), len(prompt), way == "coupled") for prompt in PROMPTS]
    pairs = zip(PROMPTS, draws, ROOMS, strict=True)
    return [DraftContext(prompt, SAMPLINGS[way], of, max_draft_depth) for prompt, of, max_draft_depth in pairs]


def check(tree: DraftTree, ranking: Ranking, config: TreeConfig, room: int) -> None:
    """Compare one tree, without tokens of no probability and what lies deeper than the room."""
    drafted = range(VOCAB) if ranking.head.vocab is None else ranking.head.vocab.ids.tolist()
    found = [path for path in paths(tree)[1:] if {*path[1:]} <= {*drafted} and len(path) <= min(room, DEEPEST) + 1]
    wanted = expected(ranking, config, room)
    if config.kind == "best_first":
        found, wanted = sorted(found), sorted(wanted)
    assert found == wanted


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("way", ["greedy", "penalised", "coupled"])
@pytest.mark.parametrize("name", TREES)
def test_a_ranked_tree_is_the_oracles_alone_and_in_batches(name: str, way: str, pruned: bool) -> None:
    config, head = TREES[name], Table(pruned)
    given = contexts(way)
    rankings = [Ranking(head, context.token, context.sampling, way == "coupled") for context in given]
    roots: list[list[Path]] = [[(context.token[-1],)] for context in given]
    for context, ranking, root in zip(given, rankings, roots, strict=True):
        head.max_depth = min(context.max_draft_depth, DEEPEST)
        alone = grow(head, None, head.level([root]), config, context)
        assert alone.q is None
        check(alone.tree, ranking, config, context.max_draft_depth)
    head.max_depth = DEEPEST
    for allow_host_sync in (True, False):
        level, room = head.level(roots), torch.tensor(ROOMS)
        tree, above, _ = grow_batch(
            head, None, level, config, on_device(given, way), room, allow_host_sync=allow_host_sync
        )
        for b, (ranking, context) in enumerate(zip(rankings, given, strict=True)):
            one = DraftTree(tree.token[b], tree.parent[b])
            check(one, ranking, config, context.max_draft_depth)
            lineage = above.expand(len(given), -1, -1)[b].sum(-1).tolist()
            assert lineage == [len(path) for path in paths(one)]


def on_device(given: list[DraftContext], way: str) -> DraftInputs:
    """Return the roots as the batch's step has them."""
    position = torch.tensor([len(context.token) for context in given])[:, None] + torch.arange(DEEPEST + 9)
    noise = exponential_noise(torch.full(position.shape, seed_key(SEED)), position, VOCAB) if way == "coupled" else None
    seen = torch.zeros(len(given), 1, VOCAB, dtype=torch.bool)
    for row, context in zip(seen, given, strict=True):
        row[:, context.token] = True
    samples = None
    if way == "sampled":
        samples = Samples(
            torch.tensor([hash_key(hash_key(seed_key(SEED), DRAFT_KEY), len(context.token)) for context in given])
        )
    root = torch.tensor([context.token[-1:] for context in given])
    return DraftInputs(root, SAMPLINGS[way], None if SAMPLINGS[way].repetition_penalty == 1 else seen, noise, samples)


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("name", ["chain", "sampled", "wide"])
def test_a_sampled_tree_has_its_shape_and_the_probs_that_it_was_sampled_from(name: str, pruned: bool) -> None:
    config, head, given = TREES[name], Table(pruned), contexts("sampled")
    roots: list[list[Path]] = [[(context.token[-1],)] for context in given]
    tree, _, q = grow_batch(
        head, None, head.level(roots), config, on_device(given, "sampled"), torch.tensor(ROOMS), allow_host_sync=True
    )
    assert q is not None
    for b, (context, root) in enumerate(zip(given, roots, strict=True)):
        alone = grow(head, None, head.level([root]), config, context)
        assert alone.q is not None
        assert torch.equal(alone.tree.token, tree.token[b])
        torch.testing.assert_close(alone.q, q[b])
        ranking, wanted = Ranking(head, context.token, context.sampling, False), shape(config)
        found, inner = paths(alone.tree), sorted({*alone.tree.parent.tolist()} - {-1})
        for row, node in enumerate(inner):
            if -1 in found[node]:
                continue
            below = [other[-1] for other in found if other[:-1] == found[node] and other[-1] >= 0]
            width = len({rank[-1] for rank in wanted if len(rank) == len(found[node])})
            law = ranking.probs(found[node])
            torch.testing.assert_close(alone.q[row], law)
            assert bool((law[below] > 0).all())
            assert len(below) == min(width, int((law > 0).sum()))


def grown(head: Table, depth: int, nodes: int) -> list[Path]:
    config = TreeConfig("best_first", depth, 0, nodes, [], [])
    return paths(grow(head, None, head.level([[(1,)]]), config, contexts("greedy")[0]).tree)


def test_it_takes_one_call_a_level_and_only_where_a_better_node_may_be() -> None:
    sure, unsure = Table(False, 8.0), Table(False, 0.1)
    assert max(map(len, grown(sure, 5, 8))) == 6  # five tokens and the root
    assert len(sure.calls) == 4
    assert max(map(len, grown(unsure, 5, 5))) == 2
    assert unsure.calls == [4]  # their children might have been better than the fifth
    assert grown(unsure, 5, 1)
    assert unsure.calls == [4]


def test_what_a_larger_budget_drafts_holds_every_smaller_tree() -> None:
    head, context = Table(False), contexts("greedy")[0]
    level, budget = head.level([[(1,)]]), TreeConfig("best_first", 5, 0, 40, [], [])
    growth, (score,) = by_confidence(head, None, level, budget, on_device([context], "greedy"), DEEPEST)
    everything = DraftTree(*(row[0] for row in growth.build()))
    for nodes in (3, 8, 20):
        alone = grow(head, None, level, replace(budget, nodes=nodes), context)
        assert sorted(paths(trees.best_n(everything, score, nodes))) == sorted(paths(alone.tree))
