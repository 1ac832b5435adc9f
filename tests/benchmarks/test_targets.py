"""The table of targets: each cell is a run's, and a reason stands for what is refused."""

from pathlib import Path

import pytest

from benchmarks.targets import COLUMNS, Toy, measured, table
from heads.common.resolvers import register_resolvers

pytestmark = pytest.mark.slow


def test_a_familys_cells_are_those_of_runs() -> None:
    register_resolvers()
    cells = dict(zip(COLUMNS, measured("lfm2", ["eagle3"], 2), strict=True))
    assert cells["chain"] == "exact"
    assert cells["heads trained"] == "eagle3"
    assert "vLLM" in cells["EAGLE-3 for"]
    assert cells["packed"].startswith("own rows, ")
    why = "last layer cannot run by itself (it keeps a recurrent state); choose another drafter"
    assert cells["MTP module"].endswith(why)
    for refused, remedy in (("tree", "tree=chain"), ("batch", "batch_size=1"), ("compiled", "engine.compile=false")):
        assert cells[refused].startswith("refused: ")
        assert cells[refused].endswith(remedy)


def test_no_engine_is_named_where_publishing_refuses_the_target(tmp_path: Path) -> None:
    toy = Toy("granite", tmp_path, 0)
    with pytest.raises(ValueError, match="its logits have a bias, a cap or a scale, which engines do not know"):
        toy.exports()


def test_a_reason_stands_once_below_the_table() -> None:
    lines = table(
        [["one", "exact", "refused: why"], ["two", "refused: how", "refused: why"], ["three", "refused: all"]]
    )
    assert "| `one` | exact | no (1) |" in lines
    assert "| `two` | no (2) | no (1) |" in lines
    assert lines.endswith("1. why\n2. how\n3. all")
