"""The dynamic programme against all trees there are."""

import itertools
import math

import pytest
import torch

from eval.tuning.grid import acceptance, best_static, levelled
from inference.drafters.policy import TreeConfig

Path = tuple[int, ...]


def all_trees(depth: int, ranks: int, nodes: int) -> set[frozenset[Path]]:
    """Return every tree of at most this many nodes."""
    found = layer = {frozenset[Path]()}
    for _ in range(nodes):
        layer = {
            tree | {(*above, rank)}
            for tree in layer
            for above in [(), *tree]
            for rank in range(ranks)
            if len(above) < depth and (*above, rank) not in tree
        }
        found = found | layer
    return found


def worth(tree: frozenset[Path], table: torch.Tensor) -> float:
    """Return the expected number of accepted tokens."""
    return sum(math.prod(float(table[d, rank]) for d, rank in enumerate(path)) for path in tree)


def random_table(seed: int, depth: int, ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(depth, ranks, generator=generator, dtype=torch.float64)
    return raw / raw.sum(1, keepdim=True) * 0.9


@pytest.mark.parametrize("seed", range(4))
def test_no_tree_is_better(seed: int) -> None:
    table = random_table(seed, 3, 3)
    found = best_static(table, 5)
    every = all_trees(3, 3, 5)
    assert len(every) > 300
    for nodes in range(6):
        best = max(worth(tree, table) for tree in every if len(tree) <= nodes)
        paths = frozenset(map(tuple, found.paths(nodes)))
        assert len(paths) == nodes
        assert found.value[nodes] == pytest.approx(best)
        assert worth(paths, table) == pytest.approx(best)


@pytest.mark.parametrize("nodes", [1, 16, 60])
def test_a_large_tree_holds_the_likeliest_paths(nodes: int) -> None:
    table = random_table(9, 5, 6)
    every = [path for length in range(1, 6) for path in itertools.product(range(6), repeat=length)]
    chances = sorted((worth(frozenset([path]), table) for path in every), reverse=True)
    found = best_static(table, 60)
    assert found.value[nodes] == pytest.approx(sum(chances[:nodes]))
    assert (
        len(TreeConfig("static", 0, 0, 0, found.paths(nodes), []).shape()) == nodes
    )  # whole: no node lacks its parent


def test_nodes_that_gain_nothing_are_left_out() -> None:
    table = torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    assert best_static(table, 4).paths(4) == [[0]]


def test_acceptance_counts_ranks_where_the_text_goes_on() -> None:
    rank = torch.tensor([[0, 1], [0, 5], [1, 0], [7, -1], [0, -1]])
    expected = [[3 / 5, 1 / 5, 0.0], [1 / 3, 1 / 3, 0.0]]
    torch.testing.assert_close(acceptance(rank, 3), torch.tensor(expected, dtype=torch.float64))


def test_no_rank_counts_more_than_a_better_one() -> None:
    table = torch.tensor([[0.5, 0.1, 0.3, 0.0], [0.2, 0.4, 0.3, 0.05]], dtype=torch.float64)
    expected = torch.tensor([[0.5, 0.2, 0.2, 0.0], [0.3, 0.3, 0.3, 0.05]], dtype=torch.float64)
    torch.testing.assert_close(levelled(table), expected)


def test_a_chance_hit_of_a_low_rank_draws_no_lone_node_there() -> None:
    """Of ten tokens one had rank 3 and none rank 1 or 2: the raw table drafts ranks 0 and 3, the levelled one not."""
    table = torch.tensor([[0.9, 0.0, 0.0, 0.1]], dtype=torch.float64)
    assert best_static(table, 2).paths(2) == [[0], [3]]
    assert best_static(levelled(table), 2).paths(2) == [[0], [1]]
