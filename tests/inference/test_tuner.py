"""The dynamic programme against all trees there are, and the speed model on numbers done by hand."""

import itertools
import math

import pytest
import torch

from inference.policy import TreeConfig
from inference.tuner import Costs, Step, acceptance, best_static, between, draft_key, predict, rising

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


def costs(tree: TreeConfig) -> Costs:
    straight, gaps = {0: 1.0, 8: 3.0}, {0: 2.0, 8: 4.0}
    return Costs(1, 10.0, {0: 9.0, 4: 11.0, 8: 15.0}, (straight, gaps), {draft_key(tree): 5.0}, {1: 1.0, 3: 2.0})


def test_the_speed_model_adds_up_the_parts_of_a_step() -> None:
    tree = TreeConfig("dynamic", 3, 2, 4, [], [])
    found = predict([Step(7, 4, 0), Step(8, 4, 2), Step(11, 0, 0)], 6, tree, costs(tree))
    assert found.tau == 2
    assert found.nodes == pytest.approx(8 / 3)
    parts = {"draft": 5, "verify": (11 + 11 + 9) / 3, "settle": (2 + 3 + 1) / 3, "commit": (1 + 2 + 1) / 3}
    assert found.seconds == pytest.approx(parts)
    assert found.speedup == pytest.approx(2 * 10 / sum(parts.values()))


def test_a_chains_path_leaves_no_gaps() -> None:
    chain, tree = TreeConfig("chain", 4, 0, 0, [], []), TreeConfig("static", 0, 0, 0, [[0], [1], [0, 0]], [])
    settled = [predict([Step(7, 4, 2)], 3, each, costs(each)).seconds["settle"] for each in (chain, tree)]
    assert settled == [2.0, 3.0]


def test_what_lies_between_measured_sizes_is_interpolated() -> None:
    known = {1: 2.0, 3: 6.0, 7: 8.0}
    assert [between(known, at) for at in (0, 1, 2, 3, 5, 7, 9)] == [2, 2, 4, 6, 7, 8, 8]


def test_a_budget_costs_a_dynamic_tree_nothing() -> None:
    def key(kind: str, nodes: int) -> str:
        return draft_key(TreeConfig(kind, 3, 2, nodes, [], []))

    assert key("dynamic", 4) == key("dynamic", 9)
    assert key("best_first", 4) != key("best_first", 9)


def test_dips_are_levelled_and_what_rises_stays() -> None:
    assert rising({0: 1.0, 2: 4.0, 1: 2.0}) == {0: 1.0, 1: 2.0, 2: 4.0}
    assert rising({0: 1.0, 1: 5.0, 2: 3.0, 3: 1.0, 4: 9.0}) == {0: 1.0, 1: 3.0, 2: 3.0, 3: 3.0, 4: 9.0}
