"""Pure functions on trees, on one that can be drawn by hand, and the published shapes."""

from time import process_time
from typing import Any

import pytest
import torch

from heads.common.typed import typed
from inference.drafters.host import HostBatch
from inference.drafters.policy import TreeConfig
from inference.protocol import DraftInputs, Proposal
from inference.verification import tree as trees
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree
from tests import toys
from tests.inference.model_free import make
from tests.oracle import paths

#     0
#    / \
#   1   2
#   |  / \
#   3 4   5
#         |
#         6
TREE = DraftTree(torch.tensor([10, 11, 12, 13, 14, 15, 16]), torch.tensor([-1, 0, 0, 1, 2, 2, 5]))


def test_positions_paths_children_and_a_mask_of_prefix_and_lineage() -> None:
    assert trees.layout(TREE, 5)[0].tolist() == [5, 6, 6, 7, 7, 7, 8]
    assert paths(TREE) == [[0, 1, 3], [0, 2, 4], [0, 2, 5, 6]]
    assert trees.children(TREE) == [[1, 2], [3], [4, 5], [], [], [6], []]
    _, mask = trees.layout(TREE, 2)
    assert mask[:, :2].all()
    assert mask[6, 2:].nonzero()[:, 0].tolist() == [0, 2, 5, 6]
    assert mask[3, 2:].nonzero()[:, 0].tolist() == [0, 1, 3]


def test_a_long_chain_keeps_its_whole_lineage() -> None:
    chain = DraftTree(torch.arange(70), torch.arange(-1, 69))
    assert trees.ancestors(chain).equal(torch.ones(70, 70, dtype=torch.bool).tril())


def test_keep_drops_descendants_too() -> None:
    wanted = torch.tensor([True, True, True, False, True, False, True])
    kept, index = trees.keep(TREE, wanted)
    assert index.tolist() == [0, 1, 2, 4]
    assert kept.parent.tolist() == [-1, 0, 0, 2]


def test_best_n_is_a_tree_even_with_ties() -> None:
    score = torch.tensor([0.0, -1.0, -0.5, -1.0, -0.5, -0.5, -0.5])
    kept = trees.best_n(TREE, score, 3)
    assert kept.token.tolist() == [10, 12, 14, 15]
    assert kept.parent.tolist() == [-1, 0, 1, 1]


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("bush", {}, "choose chain"),
        ("static", {"paths": [[0, 1]]}, "without its parent"),
        ("dynamic", {"depth": 2, "top_k": 2}, "tree.nodes is 0"),
        ("best_first", {"depth": 3}, "tree.nodes is 0"),
        ("sampled", {"widths": [10**6, 10**6]}, "widths.0. is"),
        ("sampled", {"widths": [200, 200]}, "tree.widths makes more than 16384 nodes"),
        ("sampled", {"widths": [0]}, "give 1 or more"),
        ("chain", {"depth": 10**9}, "depth is"),
        ("dynamic", {"depth": 3, "nodes": 9, "top_k": 10**9}, "top_k is"),
        ("dynamic", {"depth": -3, "nodes": 9, "top_k": 2}, "depth is"),
        ("static", {"paths": [[-1]]}, "paths.0..0. is -1"),
        ("static", {"paths": [[]]}, "tree.paths holds .."),
        ("static", {"paths": [[rank] for rank in range(16_385)]}, "tree.paths makes more than 16384 nodes"),
        ("static", {"paths": [[0] * 100_000]}, "tree.paths makes more than .* 1024 levels"),
        ("static", {"paths": [[0] * 1000]}, "tree.paths holds .0, 0, .* without its parent"),
        ("sampled", {"widths": [1] * 100_000}, "tree.widths makes more than"),
    ],
)
def test_a_tree_that_nobody_can_build_is_refused(kind: str, change: dict[str, Any], told: str) -> None:
    whole: dict[str, Any] = {"kind": kind, "depth": 0, "top_k": 0, "nodes": 0, "paths": [], "widths": []}
    before = process_time()
    with pytest.raises(ValueError, match=told) as error:
        typed(TreeConfig, whole | change)
    assert len(str(error.value)) < 500
    assert process_time() - before < 10  # OmegaConf alone would take half a minute


@pytest.mark.parametrize(
    ("following", "count"), [([], 0), ([12, 15], 2), ([12, 15, 16, 0], 3), ([11, 14], 1), ([12, 14, 16], 2), ([13], 0)]
)
def test_a_text_agrees_with_a_path_of_the_tree(following: list[int], count: int) -> None:
    assert trees.agreed(TREE, following) == count


def test_look_ahead_tokens_see_what_they_say_and_no_node_sees_them() -> None:
    """In a batch: behind the widest tree, and behind the padding of the others."""
    own = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 1, 1]]).bool()
    ahead = trees.LookAhead(torch.tensor([6, 7]), torch.tensor([1, 5]), own)
    short = trees.LookAhead(torch.tensor([8]), torch.tensor([1]), torch.tensor([[True, False, True]]))
    batch = HostBatch([make("prompt_lookup", toys.target())] * 2)
    batch.planned([Proposal(TREE, None, ahead), Proposal(trees.chain(torch.tensor([3, 4])), None, short)])
    roots = DraftInputs(torch.tensor([[10], [3]]), GREEDY)
    made = batch.draft_trees(roots, torch.tensor([9, 9]), 0, allow_host_sync=True)
    assert made.tree.token.tolist() == [[*TREE.token.tolist(), 6, 7], [3, 4, *[-1] * 5, 8, -1]]
    assert made.tree.parent[:, 7:].tolist() == [[trees.LOOK_AHEAD] * 2] * 2
    assert made.depth is not None
    assert made.depth[0].tolist() == [*trees.layout(TREE, 0)[0].tolist(), 1, 5]
    assert made.depth[1, [0, 1, 7]].tolist() == [0, 1, 1]
    assert made.ancestor_mask[0, :7, :7].equal(trees.ancestors(TREE))
    assert not made.ancestor_mask[:, :7, 7:].any()
    assert made.ancestor_mask[0, 7:].equal(own)
    assert made.ancestor_mask[1, 7].nonzero()[:, 0].tolist() == [0, 7]
    assert bool(made.ancestor_mask.diagonal(dim1=1, dim2=2).all())
