"""The benchmark of heads trains and measures what its words say, and a second time nothing."""

import json
from pathlib import Path

import pytest

from benchmarks import heads

WORDS = (
    "mlp", "head=mlp", "trainer.steps=2", "trainer.warmup=0", "trainer.eval_tokens=4", "data.limit=8",
    "data.held_out=2", "data.length=64", "data.prompts=", "tree=chain", "tree.depth=2",
)  # fmt: skip


def test_a_row_is_trained_measured_and_not_run_again(
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
