"""Finished runs of toy heads, and evaluations of one that take a moment."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from eval.config import EvalConfig, eval_config
from eval.run import main
from heads.common.errors import user_errors
from heads.common.resolvers import ROOT, register_resolvers
from heads.formats.store import save_head
from tests import toys

TUNER = {
    "depths": [1, 3], "top_k": [2], "nodes": [1, 3, 6], "samples": 1,
}  # fmt: skip
SIZE = {"prompts": 2, "max_new_tokens": 8, "repeats": 1, "warmup": 0, "gate_tv": 0.2, "tier": "live", "tuner": TUNER}


def small(runs: Path, out: Path, **values: Any) -> EvalConfig:
    """Return an evaluation of the EAGLE run that takes a moment."""
    given = {"run": str(runs / "eagle"), "out": str(out), "dtype": "float32"}
    return eval_config(**(given | SIZE | values))


def run_main(*words: str) -> int:
    """Run `python eval/run.py` with these words; return its exit status."""
    return run_command(main, "eval", *words)


def run_command(command: Any, name: str, *words: str) -> int:
    """Run a command, which composes conf/NAME.yaml, with these words; return its exit status."""
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose(name, [*words])
    try:
        with user_errors():
            command.__wrapped__(config)
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a toy target, its prompts, and a finished run of each head."""
    folder = tmp_path_factory.mktemp("runs")
    target = toys.target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    prompts = [{"id": f"p{i}", "text": " ".join(f"w{token}" for token in toys.prompt(i, 24))} for i in range(3)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    model = {
        "name": "toy", "path": str(folder / "target"), "dtype": "auto", "device": "cpu",
        "trust_remote_code": False, "prompts": str(folder / "prompts.jsonl"),
    }  # fmt: skip
    for name in ("eagle", "medusa"):
        save_head(folder / name / "head", toys.head(name, target), target.spec, asdict(toys.TREES["dynamic"]))
        (folder / name / "config.yaml").write_text(json.dumps({"model": model}), encoding="utf-8")
    return folder


def words(values: dict[str, Any], of: str = "") -> list[str]:
    """Return values as Hydra's overrides."""
    nested = [
        words(value, f"{of}{key}.") if isinstance(value, dict) else [f"{of}{key}={value}"]
        for key, value in values.items()
    ]
    return [word for each in nested for word in each]
