"""A head costs one file, one entry in HEADS and one YAML: it trains, decodes and is saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from heads import HEADS
from heads.formats.store import read_config
from tests.heads.newcomer import Newcomer
from tests.train import jobs

YAML = """\
name: newcomer
depths: 3
training:
  objective: {losses: {soft_ce: 1.0}, depth_decay: 0.8, depths: 3, anchors: null, noise: 0.0}
  trainer: {optimizer: adamw, lr: 3.0e-3}
"""
SCRIPT = """
import sys
sys.path[0] = sys.argv.pop(1)
from heads import HEADS
from tests.heads.newcomer import Newcomer
HEADS["newcomer"] = Newcomer
from train.run import main
main()
"""


def trained(folder: Path) -> Path:
    """Return the output of a run of the command with this head."""
    (folder / "conf" / "head").mkdir(parents=True)
    (folder / "conf" / "head" / "newcomer.yaml").write_text(YAML)
    out, script = folder / "out", folder / "script.py"
    script.write_text(SCRIPT)
    words = [*jobs.make(folder), f"hydra.searchpath=[file://{folder}/conf]", "head=newcomer", f"out={out}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(script), str(jobs.ROOT), *words, "trainer.steps=8", "name=new"],
        env=env, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_a_head_is_added_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = trained(tmp_path)
    assert set(jobs.losses(out)) == set(range(1, 9))
    rows = json.loads((out / "report.json").read_text())["rows"]
    drafted = [row for row in rows if row["drafter"] == "newcomer"]
    assert drafted
    assert all(row["tau"] >= 1 and row["lossless"]["failed"] == 0 < row["lossless"]["checked"] for row in drafted)
    with pytest.raises(ValueError, match=r"head.name is 'newcomer' .*known heads: eagle, "):
        read_config(out / "head")
    monkeypatch.setitem(HEADS, "newcomer", Newcomer)
    assert read_config(out / "head")["head"] == {"name": "newcomer", "depths": 3}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text((out / "head" / "config.json").read_text().replace("newc", "c"))
    with pytest.raises(ValueError, match=r"head.name is 'comer' .*known heads: eagle, .*, newcomer$"):
        read_config(tmp_path / "other")
