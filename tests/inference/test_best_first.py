"""Best-first trees on a head that is a table: the same tree as the textbook search with a heap."""

import heapq
from typing import Any

import pytest
import torch

from heads.base import Level, Nodes
from inference.drafters.policy import TreeConfig, candidates, grow
from inference.protocol import GREEDY_SHARPNESS, Context
from inference.verification import tree as trees
from inference.verification.rng import Generator
from inference.verification.sample import GREEDY, Sampling

VOCAB = 6


class TableHead:
    """The law of a node's children is a row of a table, by depth and, unless `blind`, by the node's token."""

    max_depth = 5
    vocab = None

    def __init__(self, seed: int, sharpness: float, blind: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = sharpness * torch.randn(self.max_depth, VOCAB, VOCAB, generator=generator)
        if blind:
            self.table = self.table[:, :1].expand(-1, VOCAB, -1)
        self.calls: list[int] = []

    def root(self, token: int) -> Level:
        return Level(self.table[0, token][None, None], torch.zeros(1, 1, 1))

    def expand(self, state: Any, level: Level, nodes: Nodes) -> Level:
        self.calls.append(nodes.token.shape[1])
        return Level(self.table[nodes.depth, nodes.token], torch.zeros(*nodes.token.shape, 1))

    def law(self, path: tuple[int, ...]) -> list[float]:
        """Return the children's log-probs as greedy decoding compares them."""
        return (GREEDY_SHARPNESS * self.table[len(path) - 1, path[-1]]).log_softmax(-1).tolist()


def searched(head: TableHead, root: int, depth: int, nodes: int) -> set[tuple[int, ...]]:
    """Expand the most probable node again and again, one at a time, until the budget is spent."""
    heap = [(-value, (root, token)) for token, value in enumerate(head.law((root,)))]
    heapq.heapify(heap)
    found: set[tuple[int, ...]] = set()
    while heap and len(found) < nodes:
        score, path = heapq.heappop(heap)
        found.add(path)
        if len(path) <= depth:
            for token, value in enumerate(head.law(path)):
                heapq.heappush(heap, (score - value, (*path, token)))
    return found


def grown(head: TableHead, root: int, depth: int, nodes: int, room: int = 9) -> set[tuple[int, ...]]:
    config = TreeConfig("best_first", depth, 0, nodes, [], [])
    context = Context([root], GREEDY, Generator(0, torch.device("cpu")), room)
    tree = grow(head, None, head.root(root), config, [context])[0].tree
    token, embeddings = (
        tree.token.tolist(),
        {path[: i + 1] for path in map(tuple, trees.paths(tree)) for i in range(len(path))},
    )
    return {tuple(token[node] for node in path) for path in embeddings if len(path) > 1}


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("depth", "nodes"), [(1, 4), (3, 1), (3, 2), (4, 9), (5, 8), (5, 40), (2, 300)])
def test_the_tree_is_that_of_the_search_node_by_node(blind: bool, sharpness: float, depth: int, nodes: int) -> None:
    for seed in range(4):
        head = TableHead(seed, sharpness, blind)
        assert grown(head, seed % VOCAB, depth, nodes) == searched(head, seed % VOCAB, depth, nodes)


def test_it_takes_one_call_a_level_and_only_where_a_better_node_may_be() -> None:
    sure, unsure = TableHead(0, 6.0), TableHead(0, 0.1)
    assert max(map(len, grown(sure, 0, 5, 8))) == 6  # five tokens and the root
    assert len(sure.calls) == 4
    assert max(map(len, grown(unsure, 0, 5, 5))) == 2
    assert unsure.calls == [4]  # their children might have been better than the fifth
    assert grown(unsure, 0, 5, 1)
    assert unsure.calls == [4]


def test_the_room_and_the_heads_depth_bound_it() -> None:
    head = TableHead(0, 6.0)
    assert max(map(len, grown(head, 0, 9, 30))) == 6
    assert max(map(len, grown(head, 0, 5, 30, room=2))) == 3
    assert grown(head, 0, 5, 30, room=0) == set()


def test_what_a_larger_budget_drafts_holds_every_smaller_tree() -> None:
    head, context = TableHead(1, 1.5), Context([0], GREEDY, Generator(0, torch.device("cpu")), 9)
    everything, score = candidates(head, None, head.root(0), TreeConfig("best_first", 5, 0, 40, [], []), context)
    for nodes in (3, 8, 20):
        config = TreeConfig("best_first", 5, 0, nodes, [], [])
        alone = grow(head, None, head.root(0), config, [context])[0].tree
        cut, _ = trees.best_n(everything, score, nodes)
        assert sorted(cut.token.tolist()) == sorted(alone.token.tolist())


@pytest.mark.parametrize("config", [TreeConfig("best_first", 5, 0, 12, [], []), TreeConfig("dynamic", 4, 3, 9, [], [])])
def test_greedy_sequences_compare_nodes_under_sharpened_probabilities_and_sampled_ones_beside_them_do_not(
    config: TreeConfig,
) -> None:
    """Alone and in one batch: a greedy sequence's tree is a sampled one's of a head twice as sure."""
    sampled = Sampling(1.0, 0, 1.0)
    once, twice = TableHead(2, 0.7), TableHead(2, 0.7 * GREEDY_SHARPNESS)
    contexts = [
        Context([root], how, Generator(0, torch.device("cpu")), 9) for root in (1, 2) for how in (GREEDY, sampled)
    ]
    level = Level(torch.cat([once.root(context.token[-1]).logits for context in contexts]), torch.zeros(4, 1, 1))
    together = [proposal.tree.token.tolist() for proposal in grow(once, None, level, config, contexts)]
    for context, batched in zip(contexts, together, strict=True):
        root = context.token[-1]
        alone = [
            grow(head, None, head.root(root), config, [context._replace(sampling=sampling)])[0].tree.token.tolist()
            for head, sampling in ((once, context.sampling), (twice if context.sampling == GREEDY else once, sampled))
        ]
        assert alone == [batched, batched]
    assert together[0] != together[1]


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tree.nodes is 0"):
        TreeConfig("best_first", 3, 0, 0, [], [])


@pytest.mark.parametrize("kind", ["chain", "best_first", "dynamic"])
def test_a_penalty_pulls_down_what_stands_before_a_node_the_root_among_it(kind: str) -> None:
    """A head that would repeat every token, and else count on."""
    head = TableHead(0, 1.0)
    head.table = (2.0 * torch.eye(VOCAB) + 1.5 * torch.eye(VOCAB).roll(1, 1)).expand(head.max_depth, -1, -1)
    config = TreeConfig(kind, 4, 1, 1 if kind == "best_first" else 4, [], [])
    for penalty, drafted in ((1.0, [0, 0, 0, 0, 0]), (2.0, [0, 1, 2, 3, 4])):
        context = Context([0], Sampling(0.0, 0, 1.0, 0.0, penalty), Generator(0, torch.device("cpu")), 9)
        token = grow(head, None, head.root(0), config, [context])[0].tree.token.tolist()
        assert token == drafted[: len(token)]
        assert len(token) == (2 if kind == "best_first" else 5)
