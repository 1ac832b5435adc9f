"""examples/smollm2/demo.py, on the bundled target."""

from pathlib import Path

import pytest

from examples.smollm2 import demo
from heads.common.resolvers import ROOT
from heads.formats.store import save_head
from inference.target.target import Target
from tests import toys


def test_the_demo_compares_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "examples" / "tiny")
    target = Target.load(path, "float32", "cpu")
    chain = {"kind": "chain", "depth": 3, "top_k": 0, "nodes": 0, "paths": [], "widths": []}
    save_head(tmp_path, toys.head("mtp", target), target.spec, chain)
    monkeypatch.setattr(demo, "NEW_TOKENS", 8)
    demo.main(path, str(tmp_path), "float32")
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last.startswith("8 questions: ")
    assert last.endswith("8 texts are the same, 0 part at a near tie of two logits, 0 are wrong")
