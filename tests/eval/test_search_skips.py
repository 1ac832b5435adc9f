"""The command that searches: a file that the drafter reads, and errors in one line."""

import json
from pathlib import Path

import pytest

from eval.search_skips import JobConfig, find
from inference.drafters.contrib.layer_skip import LayerSkip, SearchSettings
from inference.target.config import model_config
from inference.target.target import Target
from tests import toys


@pytest.fixture
def model(tmp_path: Path) -> dict[str, object]:
    target = toys.target()
    target.model.save_pretrained(tmp_path / "model")
    target.tokenizer.save_pretrained(tmp_path / "model")
    lines = [json.dumps({"id": str(seed), "prompt": " ".join(f"w{i}" for i in toys.prompt(seed))}) for seed in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    path = {"name": "toy", "path": str(tmp_path / "model"), "prompts": str(tmp_path / "prompts.jsonl")}
    return {**path, "dtype": "float32", "device": "cpu", "trust_remote_code": False}


def job(model: dict[str, object], out: Path, evaluations: int = 100, workload: str | None = None) -> JobConfig:
    search = SearchSettings(depth=3, evaluations=evaluations, seed=0)
    return JobConfig(model_config(**model), str(out), workload, 2, 24, search)


def test_the_file_is_what_the_drafter_reads(tmp_path: Path, model: dict[str, object]) -> None:
    own = model | {"prompts": "nowhere"}
    path = find(job(own, tmp_path / "found" / "skips.json", workload=str(model["prompts"])))
    content = json.loads(path.read_text())
    assert content["attention"] or content["mlp"]
    assert set(content["found"]) == {"predicted_tau", "predicted_speedup", "draft_cost"}
    assert content["found"]["predicted_tau"] >= 1
    source = LayerSkip(
        LayerSkip.Config(str(path), None, None), Target.load(str(model["path"]), "float32", "cpu"), "skips"
    )
    assert source.config.depth == content["depth"]


def test_a_target_that_gains_nothing_is_told_so(tmp_path: Path, model: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="rates above the baseline"):
        find(job(model, tmp_path / "skips.json", evaluations=2))
    assert not (tmp_path / "skips.json").exists()


def test_a_missing_workload_is_named(tmp_path: Path, model: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="workload is missing"):
        find(job(model | {"prompts": None}, tmp_path / "skips.json"))
