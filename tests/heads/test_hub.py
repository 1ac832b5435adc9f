"""Where a head is found, and what is said where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from heads.common.resolvers import ROOT
from heads.formats.hub import on_hub, resolve_head, target_path
from tests.refusals import refuses
from tests.train.hub_server import Fault, Hub, Repo, become
from train.release.folder import portable

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "config.yaml": b"name: x\n", "README.md": b"# x\n"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as hub:
        become(hub, monkeypatch, tmp_path / "cache")
        repo = hub.repos["me/head"] = Repo(private=False)
        repo.commit(FILES)
        yield hub


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_runs_head_before_the_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "run")
    assert resolve_head(str(run)) == run
    monkeypatch.chdir(run)
    assert resolve_head(".") == Path()
    head = make(run / "head")
    assert resolve_head(str(run)) == head
    head.rename(run / ".head.old")
    assert resolve_head(str(run)) == head  # load_head finds the one set aside


def test_a_repository_is_downloaded_and_then_cached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_head("me/head")
    here = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert here == {name: data for name, data in FILES.items() if name != "README.md"}
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_head("me/head") == folder


def test_a_published_head_is_downloaded_with_its_weights_and_no_more(hub: Hub) -> None:
    foreign = {"config.json": b"{}", "README.md": b"# x\n"}
    index = b'{"weight_map": {"fc.weight": "a.safetensors", "layers.0.self_attn.q_proj.weight": "b.safetensors"}}'
    shards = {"model.safetensors.index.json": index, "a.safetensors": b"a", "b.safetensors": b"b"}
    for name, files in {
        "pickle": {"medusa_lm_head.pt": b"p"},
        "shards": {**shards, "pytorch_model.bin": b"p"},
        "both": {"model.safetensors": b"s", "pytorch_model.bin": b"p"},
    }.items():
        repo = hub.repos[f"me/{name}"] = Repo(private=False)
        repo.commit({**foreign, **files})
    found = {
        name: {path.name for path in resolve_head(f"me/{name}").iterdir()} for name in ("pickle", "shards", "both")
    }
    assert found == {
        "pickle": {"config.json", "medusa_lm_head.pt"},
        "shards": {"config.json", *shards},
        "both": {"config.json", "model.safetensors"},
    }


def test_a_whole_model_is_refused_before_its_weights_are_downloaded(hub: Hub) -> None:
    repo = hub.repos["me/model"] = Repo(private=False)
    index = b'{"weight_map": {"model.layers.0.mlp.up_proj.weight": "model-1.safetensors"}}'
    repo.commit({"config.json": b"{}", "model.safetensors.index.json": index, "model-1.safetensors": b"large"})
    with pytest.raises(ValueError, match="of no published head known here"):
        resolve_head("me/model")
    assert not any("model-1" in str(request) for request in hub.requests)


@pytest.mark.parametrize("drop", [None, "GET"])
def test_what_the_hub_does_not_give_is_one_line(hub: Hub, drop: str | None) -> None:
    hub.faults = [Fault(drop, "cut")] if drop else []
    expected = r"downloading broke off" if drop else r"the Hub refused downloading \(404\)"
    refuses(r"^me/nothing: " + expected, resolve_head, "me/nothing")


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "./nothing", "me/head name", "{here}/nothing"])
def test_no_folder_and_no_repository(hub: Hub, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no such folder; give a run's or published folder, or a Hub id"):
        resolve_head(name.format(here=tmp_path))
    assert hub.requests == []


def test_which_names_are_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    assert on_hub("meta-llama/Llama-3.3-70B-Instruct")
    assert not any(map(on_hub, ["mine/model", "/models/x", "./x", "x", "a/b/c"]))


def test_a_target_in_the_home_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert target_path("~/models/mine") == str(tmp_path / "models" / "mine")
    assert target_path("~/models/mine") == target_path(portable(f"{tmp_path}/models/mine"))
    monkeypatch.chdir(tmp_path)
    assert target_path("examples/tiny") == str(ROOT / "examples" / "tiny")
    make(tmp_path / "examples" / "tiny")
    assert target_path("examples/tiny") == "examples/tiny"
