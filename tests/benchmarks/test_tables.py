"""The tables of smaller benchmarks: bars of commands, heads, targets, and the comparison of two engines' texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import heads, step_equality
from benchmarks.targets import COLUMNS, measured, table
from heads.common.resolvers import register_resolvers
from inference.decode import RequestParams
from inference.verification.sample import GREEDY
from tests import toys
from tests.eval.stubs import generation

WORDS = (
    "mlp", "head=mlp", "trainer.steps=2", "trainer.warmup=0", "trainer.eval_tokens=4", "data.limit=8",
    "data.held_out=2", "data.length=64", "data.prompts=", "tree=chain", "tree.depth=2",
)  # fmt: skip


def test_a_heads_row_is_trained_measured_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.jsonl"
    monkeypatch.setattr("sys.argv", ["heads.py", "--out", str(out), "--prompts", "1", *WORDS])
    heads.main()
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["name"], row["seed"], row["tokens"]) == ("mlp", 0, 128)
    assert 1 <= row["tau_T0"] <= 3
    assert (tmp_path / "runs" / "mlp-2-0" / "head" / "config.json").exists()
    monkeypatch.setattr(heads, "train", None)
    capsys.readouterr()
    heads.main()
    assert "mlp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "changes", "kind"),
    [
        ([5, 6, 7], {}, "identical"),
        ([5, 6, 8], {}, "near_tie"),
        ([5, 7, 7], {}, "failed"),
        ([5, 6], {}, "failed"),
        ([5, 6, 7], {"finish": "eos"}, "failed"),
    ],
)
def test_texts_are_counted_by_where_they_part(tokens: list[int], changes: dict[str, Any], kind: str) -> None:
    ours, theirs = generation([5, 6, 7], gaps=[2.0, 3.0, 1e-6]), generation(tokens)
    for name, value in changes.items():
        setattr(theirs, name, value)
    found = step_equality.compare(toys.target(), [([1], RequestParams(3, GREEDY))], [ours], [theirs])
    assert found.counts == {"tokens": len(tokens), kind: 1}
    assert [line.split(":")[0] for line in found.first] == [kind] * (kind != "identical")


@pytest.mark.slow
def test_a_target_familys_cells_are_those_of_runs() -> None:
    register_resolvers()
    cells = dict(zip(COLUMNS, measured("lfm2", ["eagle3"], 2), strict=True))
    assert (cells["chain"], cells["heads trained"]) == ("exact", "eagle3")
    assert "vLLM" in cells["EAGLE-3 for"]
    assert cells["packed"].startswith("own rows, ")
    assert cells["MTP module"].endswith("it keeps a recurrent state); choose another drafter")
    for refused, remedy in (("tree", "tree=chain"), ("batch", "batch_size=1"), ("compiled", "engine.compile=false")):
        assert cells[refused].startswith("refused: ")
        assert cells[refused].endswith(remedy)


def test_a_reason_stands_once_below_the_table_of_targets() -> None:
    lines = table(
        [["one", "exact", "refused: why"], ["two", "refused: how", "refused: why"], ["three", "refused: all"]]
    )
    assert "| `one` | exact | no (1) |" in lines
    assert "| `two` | no (2) | no (1) |" in lines
    assert lines.endswith("1. why\n2. how\n3. all")
