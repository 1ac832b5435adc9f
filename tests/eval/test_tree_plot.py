"""A tree's plot: parents amid their children, and labels where they fit."""

from itertools import combinations

import pytest
from omegaconf import OmegaConf

from eval.report import tree_plot
from eval.report.tree_plot import GAP, LABEL, Box
from heads.common.resolvers import ROOT
from heads.common.typed import typed
from inference.drafters.policy import TreeConfig

Path = tuple[int, ...]


def large() -> dict[Path, float]:
    """Return the nodes of Medusa's published tree, the likelier ones accepted more often, some never."""
    shape = typed(TreeConfig, OmegaConf.load(ROOT / "conf/tree/medusa63.yaml")).shape()
    return {path: 0.6 ** (len(path) + sum(path)) if sum(path) < 8 else 0.0 for path in shape}


def drawn(share: dict[Path, float]) -> tuple[tree_plot.Spec, dict[str, tree_plot.Record]]:
    """Return the plot of a tree, and its nodes by name."""
    found = {"label": "static", "note": "", "steps": 9, "paths": [*map(list, share)], "accepted": [*share.values()]}
    spec = tree_plot.tree("medusa", found)[0].spec
    return spec, {node["node"]: node for node in spec["data"]["values"]}


def test_a_parent_stands_amid_its_children() -> None:
    share = {(1,): 0.5, (0,): 0.25, (1, 2): 0.1, (1, 0): 0.3, (1, 1): 0.05}  # in the order of how often
    assert tree_plot.heights(share) == {(0,): 0, (1, 0): 1, (1, 1): 2, (1, 2): 3, (1,): 2, (): 1}
    _, nodes = drawn(share)
    assert nodes["root→2→3"]["from"] == nodes["root→2"]["y"] == 2
    assert nodes["root→2→3"]["after"] == pytest.approx(0.2)


def test_labels_of_a_large_tree_stand_where_they_fit_on_a_phone() -> None:
    share = large()
    spec, nodes = drawn(share)
    ends = len(tree_plot.leaves(share))
    assert (spec["height"], ends) == (round(42.5 * tree_plot.CLOSE), 42)
    dot = 0.8 * tree_plot.CLOSE
    middle = {
        path: (len(path) * tree_plot.NARROW / 4, (y + 1) * tree_plot.CLOSE)
        for path, y in tree_plot.heights(share).items()
    }
    sides = tree_plot.labels(middle, share, dot)
    assert [node["side"] for node in nodes.values()] == ["", *(sides.get(path, "") for path in share)]
    assert 20 < len(sides) < len(share)
    assert set(sides.values()) == {"right", "above"}
    assert sides.keys() >= {(0,), (0, 0)}  # the often accepted ones choose first
    assert all(share[path] >= tree_plot.LEAST for path in sides)
    boxes = [label(middle[path], side, dot) for path, side in sides.items()]
    dots = [Box(x - dot / 2, y - dot / 2, x + dot / 2, y + dot / 2) for x, y in middle.values()]
    assert not any(one.meets(other) for one, other in combinations([*boxes, *dots], 2))


def test_every_node_of_a_small_tree_has_its_label() -> None:
    share = {(0,): 0.8, (1,): 0.1, (0, 0): 0.5, (0, 1): 0.2, (0, 0, 0): 0.3, (0, 0, 1): 0.1, (1, 0): 0.001, (2,): 0.0}
    _, nodes = drawn(share)
    assert [name for name, node in nodes.items() if not node["side"]] == ["root", "root→2→1", "root→3"]


def label(middle: tuple[float, float], side: str, dot: float) -> Box:
    """Return where a label stands."""
    (x, y), (wide, high), near = middle, LABEL, dot / 2 + GAP
    if side == "right":
        return Box(x + near, y - high / 2, x + near + wide, y + high / 2)
    return Box(x - wide / 2, y - near - high, x + wide / 2, y - near)


def test_a_long_chain_and_a_wide_tree_keep_their_dots_apart() -> None:
    chain, _ = drawn({(0,) * depth: 0.5 for depth in range(1, 41)})
    assert chain["height"] == 1.5 * tree_plot.ROOMY
    wide, _ = drawn({(rank,): 0.01 for rank in range(400)})
    assert wide["height"] == pytest.approx(tree_plot.TALL, abs=2)
    for spec, apart in ((chain, tree_plot.NARROW / 40), (wide, tree_plot.TALL / 400)):
        (nodes,) = (layer for layer in spec["layer"] if layer.get("name") == "nodes")
        assert nodes["mark"]["size"] ** 0.5 == pytest.approx(0.8 * apart)
