"""Training from a store: the losses of live training, without the target where nothing asks for it."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from data.features.extraction import Layers, extract_features
from data.features.source import FeaturesConfig
from data.features.store import SHARDS
from heads.formats.hub import load_found
from heads.medusa import Medusa
from inference.target.target import Target
from tests.data.chat_server import honest, reset
from tests.data.states_server import StatesServer
from tests.train import jobs
from tests.train.jobs import configured, resolved
from train.run import train

Train = Callable[..., dict[int, float]]
Live = Callable[[str], dict[int, float]]
HEADS = {
    # By AdamW: Muon's matrix steps, in bf16, enlarge what differs by a rounding.
    "eagle3": ["head=eagle3", "head.feature_layers=[0,1,2]", "init=null", "trainer.optimizer=adamw", "trainer.lr=3e-3"],
    "medusa": ["head=medusa"],
}
SMALL = ["trainer.eval_prompts=0", "eval.prompts=0", "trainer.batch_tokens=128"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*jobs.make(tmp_path_factory.mktemp("job")), "trainer.steps=3", "trainer.save_every=3", *SMALL]


@pytest.fixture(scope="module")
def live(base: list[str], tmp_path_factory: pytest.TempPathFactory) -> Live:
    """Return a function that trains a head live, once, and returns the losses of every step."""

    @cache
    def run(head: str) -> dict[int, float]:
        out = tmp_path_factory.mktemp("live") / "out"
        train(resolved([*base, f"out={out}", *HEADS[head]]))
        assert "features" not in json.loads((out / "provenance.json").read_text())
        return jobs.losses(out)

    return run


@pytest.fixture
def trained(base: list[str], tmp_path: Path) -> Train:
    """Return a function that trains with overrides, and returns the losses of every step."""

    def run(name: str, *overrides: str) -> dict[int, float]:
        train(resolved([*base, f"out={tmp_path / name}", *overrides]))
        return jobs.losses(tmp_path / name)

    return run


def extracted(base: list[str], folder: Path, head: str, *overrides: str) -> list[str]:
    """Extract the features that a head reads, and return the overrides to train from them."""
    words = ["features=stored", f"features.path={folder}"]
    run = configured([*base, *HEADS[head], *words, *overrides])
    config: FeaturesConfig = run.features
    extract_features(run.model, run.data, config, Layers(run.head, None), run.workload, lambda _: None)
    return words


def close(ours: dict[int, float], theirs: dict[int, float], share: float) -> bool:
    assert ours.keys() == theirs.keys()
    return all(abs(ours[step] - theirs[step]) <= share * abs(theirs[step]) for step in theirs)


def test_the_loss_is_that_of_live_training(base: list[str], trained: Train, live: Live, tmp_path: Path) -> None:
    exact = extracted(base, tmp_path / "exact", "eagle3", "features.dtype=fp32")
    assert close(trained("exact", *HEADS["eagle3"], *exact), live("eagle3"), 1e-5)
    rounded = extracted(base, tmp_path / "rounded", "medusa")
    found = trained("rounded", *HEADS["medusa"], *rounded)
    assert close(found, live("medusa"), 0.02)
    assert found != live("medusa")


def test_the_layers_are_not_loaded_and_the_head_is_kept(
    base: list[str], trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = extracted(base, tmp_path / "store", "medusa", "features.dtype=fp8")
    target = Target.load(base[0].partition("=")[2], "float32", "cpu")
    monkeypatch.setattr(Target, "load", None)
    losses = trained("run", *HEADS["medusa"], *words, "trainer.log_every=3")
    assert sorted(losses) == [3]
    head: Any = load_found(tmp_path / "run" / "head", target.embeddings, target.spec)
    assert isinstance(head, Medusa)
    origin = json.loads((tmp_path / "run" / "provenance.json").read_text())["features"]
    assert (origin["path"], origin["dtype"]) == (str(tmp_path / "store"), "fp8")
    cost = json.loads((tmp_path / "run" / "training.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (waited,) = (line["stall_seconds"] for line in lines)  # of all three steps
    assert cost["stall_seconds"] == pytest.approx(waited)
    assert 0 <= cost["stall_seconds"] < cost["seconds"]
    rows = 3 * 128 // 32
    assert f"features: {rows} sequences read; waited" in capsys.readouterr().err


def test_a_store_that_lacks_rows_fails_at_once(base: list[str], trained: Train, tmp_path: Path) -> None:
    words = extracted(base, tmp_path / "store", "medusa", "features.dtype=fp32", "features.shard_mb=1")
    shard = tmp_path / "store" / SHARDS / "000000.safetensors"
    shard.unlink()
    with pytest.raises(ValueError, match=r"sequences are in no shard \(.*000000\.safetensors: is not there"):
        trained("fails", *HEADS["medusa"], *words)
    assert not (tmp_path / "fails").exists()


def test_a_store_of_something_else_is_refused(base: list[str], trained: Train, tmp_path: Path) -> None:
    words = extracted(base, tmp_path / "store", "medusa")
    with pytest.raises(ValueError, match=r"data\.length"):
        trained("run", *HEADS["medusa"], *words, "data.length=64")
    with pytest.raises(ValueError, match="feature layers"):
        trained("run", *HEADS["eagle3"], *words)


@pytest.fixture
def server(base: list[str], tmp_path: Path) -> Iterator[StatesServer]:
    target = Target.load(base[0].partition("=")[2], "float32", "cpu")
    with StatesServer(target, tmp_path / "states", [1, 2, 3]) as running:
        yield running


def engine(server: StatesServer, *overrides: str) -> list[str]:
    """Return the overrides to train from a server."""
    where = [f"features.url=[{server.url}]", f"features.vllm={server.folder}", "features.vllm_layers=[1,2,3]"]
    return ["features=engine", *where, "features.endpoint.retries=1", "features.endpoint.backoff=0.001", *overrides]


def test_the_loss_from_a_server_is_that_of_live_training_without_the_targets_layers(
    trained: Train, live: Live, tmp_path: Path, server: StatesServer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    expected = live("eagle3")
    monkeypatch.setattr(Target, "load", None)
    capsys.readouterr()
    assert close(trained("served", *HEADS["eagle3"], *engine(server)), expected, 1e-5)
    assert f"features: {3 * 128 // 32} sequences served; waited" in capsys.readouterr().err
    assert json.loads((tmp_path / "served" / "provenance.json").read_text())["features"] == {server.url: "served"}
    assert server.leftovers() == []


def test_a_run_whose_server_dies_goes_on_bit_for_bit(
    base: list[str], trained: Train, tmp_path: Path, server: StatesServer
) -> None:
    words = [*HEADS["eagle3"], *engine(server, "features.prefetch=2"), "trainer.steps=5", "trainer.save_every=1"]
    whole = trained("whole", *words)
    server.script = [honest] * (len(server.bodies) // 2)
    server.always = reset
    with pytest.raises(
        ValueError, match=f"{server.url}: unreachable .*start the server again, and resume=true continues"
    ):
        trained("cut", *words)
    assert 0 < len(jobs.losses(tmp_path / "cut")) < 5
    server.always = honest
    assert trained("cut", *words, "resume=true") == whole


def test_the_layer_ids_that_a_server_lacks_are_named(trained: Train, server: StatesServer) -> None:
    with pytest.raises(ValueError, match=r"without \[1, 2, 3\].*eagle_aux_hidden_state_layer_ids=\[1, 2, 3\]"):
        trained("run", *HEADS["eagle3"], *engine(server, "features.vllm_layers=[]"))
