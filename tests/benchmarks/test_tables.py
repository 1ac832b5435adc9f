"""The tables of smaller benchmarks: bars of commands, heads, targets, and the comparison of two engines' texts."""

import json
from pathlib import Path

import pytest

from benchmarks import heads
from benchmarks.engine import eagle_head
from benchmarks.targets import COLUMNS, measured
from heads.common.resolvers import register_resolvers
from tests import toys

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


def test_the_engines_head_has_every_option() -> None:
    assert eagle_head(toys.target().embeddings, num_kv_heads=4).config.num_kv_heads == 4


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
