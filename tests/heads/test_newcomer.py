"""A head costs one file, one entry in HEADS and one YAML: it trains, decodes and is saved."""

import json
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from heads import HEADS
from heads.formats.store import read_config
from tests.heads.newcomer import Newcomer
from tests.train import jobs
from train.run import main

YAML = """\
name: newcomer
depths: 3
training:
  objective: {losses: {soft_ce: 1.0}, depth_decay: 0.8, depths: 3, anchors: null, noise: 0.0}
  trainer: {optimizer: adamw, lr: 3.0e-3}
"""


def test_a_head_is_added_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "head").mkdir(parents=True)
    (tmp_path / "conf" / "head" / "newcomer.yaml").write_text(YAML)
    out, asked = tmp_path / "out", ["head=newcomer", "trainer.steps=8", "name=new"]
    words = [*jobs.make(tmp_path), f"hydra.searchpath=[file://{tmp_path}/conf]", f"out={tmp_path / 'out'}", *asked]
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    with monkeypatch.context() as patch:
        patch.setitem(HEADS, "newcomer", Newcomer)
        main()
    assert set(jobs.losses(out)) == set(range(1, 9))
    rows = json.loads((out / "report.json").read_text())["rows"]
    drafted = [row for row in rows if row["drafter"] == "newcomer"]
    assert drafted
    assert all(row["tau"] >= 1 and row["lossless"]["failed"] == 0 < row["lossless"]["checked"] for row in drafted)
    with pytest.raises(ValueError, match=r"head.name is 'newcomer': choose one of eagle, "):
        read_config(out / "head")
    monkeypatch.setitem(HEADS, "newcomer", Newcomer)
    assert read_config(out / "head")["head"] == {"name": "newcomer", "depths": 3}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text((out / "head" / "config.json").read_text().replace("newc", "c"))
    with pytest.raises(ValueError, match=r"head.name is 'comer': choose one of eagle, .*, newcomer$"):
        read_config(tmp_path / "other")
