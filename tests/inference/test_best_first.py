"""Best-first trees on a head that is a table: calls, budgets and sharpness; the trees themselves are in test_policy."""

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
    """The law of a node's children is a row of a table, by depth and the node's token."""

    max_depth = 5
    vocab = None

    def __init__(self, seed: int, sharpness: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = sharpness * torch.randn(self.max_depth, VOCAB, VOCAB, generator=generator)
        self.calls: list[int] = []

    def root(self, token: int) -> Level:
        return Level(self.table[0, token][None, None], torch.zeros(1, 1, 1))

    def expand(self, state: Any, level: Level, nodes: Nodes) -> Level:
        self.calls.append(nodes.token.shape[1])
        return Level(self.table[nodes.depth, nodes.token], torch.zeros(*nodes.token.shape, 1))


def grown(head: TableHead, root: int, depth: int, nodes: int) -> set[tuple[int, ...]]:
    config = TreeConfig("best_first", depth, 0, nodes, [], [])
    context = Context([root], GREEDY, Generator(0, torch.device("cpu")), 9)
    tree = grow(head, None, head.root(root), config, [context])[0].tree
    token, embeddings = (
        tree.token.tolist(),
        {path[: i + 1] for path in map(tuple, trees.paths(tree)) for i in range(len(path))},
    )
    return {tuple(token[node] for node in path) for path in embeddings if len(path) > 1}


def test_it_takes_one_call_a_level_and_only_where_a_better_node_may_be() -> None:
    sure, unsure = TableHead(0, 6.0), TableHead(0, 0.1)
    assert max(map(len, grown(sure, 0, 5, 8))) == 6  # five tokens and the root
    assert len(sure.calls) == 4
    assert max(map(len, grown(unsure, 0, 5, 5))) == 2
    assert unsure.calls == [4]  # their children might have been better than the fifth
    assert grown(unsure, 0, 5, 1)
    assert unsure.calls == [4]


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
