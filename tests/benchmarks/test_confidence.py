"""The replay of adaptive drafting, on planted data whose best policies are known."""

import numpy as np
import pytest

from benchmarks.confidence_replay import Array, Nodes, Policy, Prices, calibrated, chosen, isotonic, play, ranked

DEPTHS, LENGTH = np.arange(1, 5), 20
TEXTS = np.arange(2)  # the target accepts every token drafted in the first, none in the second; the head knows


def planted() -> Nodes:
    """Chains of depth 4 at every token of the two texts."""
    left = np.arange(LENGTH - 1, -1, -1)[:, None]
    right = np.concatenate([left >= DEPTHS, np.zeros((LENGTH, 4), bool)])
    score = np.repeat([-0.1, -2.0], LENGTH)[:, None] * DEPTHS
    return Nodes(score, right, np.tile(DEPTHS - 2, (2 * LENGTH, 1)), DEPTHS)


def prices(batch: int) -> Prices:
    """A pass costs 1 and 0.1 a node, a level 0.1."""
    verify, draft = 1 + 0.1 * np.arange(5), 0.1 * np.arange(5)
    return Prices(batch, {False: verify, True: verify}, {1: draft}, np.zeros(6))


def seconds(kind: str, p: Array) -> float:
    policy = chosen(kind, {1: ranked(planted(), p, 1)}, prices(1), [LENGTH] * 2, TEXTS, 1.0)
    return float(play(policy, [LENGTH] * 2, TEXTS).seconds.sum())


def test_each_policy_reaches_its_planted_optimum() -> None:
    nodes = planted()
    p = calibrated(nodes, np.ones(2 * LENGTH, bool))
    assert seconds("fixed", np.exp(nodes.score)) == pytest.approx(10 * 1.2 + 20 * 1.2)  # depth 1
    assert seconds("nodes", p) == pytest.approx(7 * 1.4 + 20 * 1.2)  # depth 2, of the second text no node
    best = 4 * 1.8 + 20 * 1.1  # depth 4, and depth 1 without a node
    assert [seconds(kind, p) for kind in ("stop", "hindsight")] == pytest.approx([best] * 2)
    assert seconds("oracle", nodes.right.astype(float)) == pytest.approx(best)
    dear = prices(1)._replace(draft={1: np.arange(5.0)})
    assert [Policy(ranked(nodes, p, 1), one, 1, range(1, 5), rate=1.0).choose(np.zeros(1, int)).depth
            for one in (prices(1), dear)] == [4, 1]  # fmt: skip


def test_a_batch_verifies_where_it_pays_and_shares_its_seconds() -> None:
    nodes = planted()
    ranks = {1: ranked(nodes, calibrated(nodes, np.ones(2 * LENGTH, bool)), 1)}
    ragged, padded = (chosen(kind, ranks, prices(2), [LENGTH] * 2, TEXTS, 2.0) for kind in ("nodes", "padded"))
    rows = np.array([0, LENGTH])
    some, all_nodes = ragged.choose(rows), padded.choose(rows)
    assert (some.accepted.tolist(), some.nodes) == ([some.depth, 0], some.depth / 2)
    assert (all_nodes.accepted.tolist(), all_nodes.nodes) == ([all_nodes.depth, 0], all_nodes.depth)
    assert play(ragged, [LENGTH] * 2, TEXTS).rate > play(padded, [LENGTH] * 2, TEXTS).rate


def test_calibration_is_isotonic_and_no_child_is_more_probable() -> None:
    fitted = isotonic(np.array([-3.0, -2, -2, -1]), np.array([1, 0, 0, 1]))
    assert fitted(np.array([-9.0, -2, -1.5, -1, 0])) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1, 1])
    score, right = np.array([[-2.0, -2.5], [-1.0, -2.5], [-1.0, -2.5]]), np.array([[0, 0], [1, 1], [0, 0]])
    nodes = Nodes(score, right, np.array([[-1, 0]] * 3), np.array([1, 2]))
    p = calibrated(nodes, np.array([True, True, False]))  # as the first two rows say
    assert p.tolist() == [[0, 0], [1, 0.5], [1, 0.5]]
