"""Publishing against a Hub on this machine: what arrives is what was trained, and failures are one line."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from heads.common.resolvers import ROOT
from heads.formats.hub import resolve_head
from heads.formats.store import TargetSpec, load_head, save_head
from tests.heads.stub import TinyEnds, same
from tests.train.hub_server import TOKEN, Hub
from tests.train.publishing import EVERYTHING, PLOTS, REPO, config, medusa
from train.publish import misleading, publish
from train.release.folder import portable
from train.release.hub import files_of


def test_the_command_publishes_what_downloads_bit_for_bit(run: Path, hub: Hub, spec: TargetSpec) -> None:
    env = os.environ | {
        "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(run.parent / "hf"),
        "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    words = [sys.executable, str(ROOT / "train" / "publish.py"), f"run={run}", f"repo={REPO}"]
    done = subprocess.run(words, cwd=run.parent, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(f"published as {REPO} at [0-9a-f]{{8}}, downloaded again and equal", done.stdout)
    assert TOKEN not in done.stdout + done.stderr
    assert "HTTP" not in done.stdout + done.stderr
    repo = hub.repos[REPO]
    assert repo.private
    assert repo.large == {"model.safetensors", *PLOTS}
    files = repo.commits[repo.head]
    assert {*EVERYTHING, ".gitattributes"} == set(files)
    assert files["model.safetensors"] == (run / "head" / "model.safetensors").read_bytes()
    assert not any(TOKEN.encode() in data for data in files.values())
    back = resolve_head(REPO)
    assert str(back).startswith(str(run.parents[1] / "cache"))
    assert same(medusa(0), load_head(back, TinyEnds(), spec))


def test_no_token_is_one_line_before_anything(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match="no token for the Hub"):
        publish(config(run), HfApi())
    assert hub.requests == []


def test_dry_run_writes_the_folder_and_contacts_nobody(run: Path, hub: Hub, spec: TargetSpec) -> None:
    out = publish(config(run, dry_run=True), HfApi())
    assert out == run / "publish"
    assert set(files_of(out)) == EVERYTHING
    assert same(medusa(0), load_head(resolve_head(str(out)), TinyEnds(), spec))
    assert hub.requests == []
    assert (out / "config.yaml").read_text().startswith("name: tiny-medusa\nout: outputs/tiny-medusa\n")
    assert not any(f"{ROOT}/".encode() in path.read_bytes() for path in map(out.joinpath, files_of(out)))
    assert json.loads((out / "tokenizer_reference.json").read_text()) == {
        "base_model": "target",
        "tokenizer_sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }


def test_a_hub_that_is_down_is_one_line(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="cannot be reached") as caught:
        publish(config(run), HfApi())
    assert "\n" not in str(caught.value)


def test_bad_runs_are_one_line(run: Path, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "outputs" / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no such folder; runs with a head there: tiny-medusa$"):
        publish(config(run.parent / "nowhere"), HfApi())
    with pytest.raises(ValueError, match="holds no head/"):
        publish(config(tmp_path / "outputs" / "empty"), HfApi())
    with pytest.raises(ValueError, match="give OWNER/NAME"):
        config(run, repo="tiny-medusa")
    with pytest.raises(ValueError, match=r"Cannot have -- or \.\. in repo_id: 'me/x\.\.y'"):
        config(run, repo="me/x..y")
    with pytest.raises(ValueError, match="that is a head's folder; give the folder of the run that trained it"):
        publish(config(run / "head"), HfApi())
    with pytest.raises(ValueError, match="another out=FOLDER"):
        publish(config(run, out=str(run)), HfApi())
    with pytest.raises(ValueError, match="the run's own head"):
        publish(config(run, out=str(run / "head")), HfApi())
    (run / "config.yaml").write_text(f"key: {TOKEN}\n")
    with pytest.raises(ValueError, match=r"config\.yaml would hold an access token") as caught:
        publish(config(run), HfApi())
    assert TOKEN not in str(caught.value)
    (run / "head" / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match="truncated, damaged"):
        publish(config(run), HfApi())
    assert hub.requests == []


@pytest.mark.parametrize("point", [0, 3, 5])
def test_a_crash_at_any_point_leaves_the_folder_of_before_or_the_new_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    out = publish(config(run, dry_run=True), HfApi(), str)
    before = {name: (out / name).read_bytes() for name in files_of(out)}
    save_head(run / "head", medusa(1), TargetSpec("t", 11, 4, 3, "f00d"), {})
    calls = 0

    def cut(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > point:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((shutil, "copyfile"), (os, "replace"), (os, "fsync")):
            patch.setattr(owner, name, cut(getattr(owner, name)))
        with pytest.raises(OSError, match=r"publish: could not be written .*No space left.*; free space"):
            publish(config(run, dry_run=True), HfApi(), str)
    assert {name: (out / name).read_bytes() for name in files_of(out)} == before
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("name", ["report.html", "config.yaml", "provenance.json", "head", "head/config.json"])
def test_what_a_link_leads_to_is_not_published(run: Path, tmp_path: Path, name: str) -> None:
    (run / "provenance.json").touch()
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{name}: a link, to {tmp_path}/elsewhere, which is not published; put the"):
        publish(config(run, dry_run=True), HfApi(), str)
    assert not (run / "publish").exists()


def test_a_folder_with_something_of_its_own_is_not_replaced(run: Path) -> None:
    out = publish(config(run, dry_run=True), HfApi(), str)
    (out / "plots" / "deep").mkdir()
    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes/mine\.txt, which is no part of a published head"):
        publish(config(run, dry_run=True), HfApi(), str)
    assert (out / "notes" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", "plots/mine.png"])
def test_a_folder_of_the_users_own_whose_names_are_like_ours_is_not_replaced(
    run: Path, tmp_path: Path, name: str
) -> None:
    mine = tmp_path / "mine" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ValueError, match=rf"holds {re.escape(name)}, and is no earlier publication; give another out"):
        publish(config(run, dry_run=True, out=str(tmp_path / "mine")), HfApi(), str)
    assert mine.read_text() == "mine"


def test_a_home_at_the_root_leaves_addresses_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert portable("https://host/x") == "https://host/x"
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert portable(f"{ROOT}/conf /home/me/x") == "conf ~/x"


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("provenance.json", '{"sources": [3]}', "is damaged, not as training writes it"),
        ("provenance.json", '{"data": {"records": {"a": "many"}}}', "is damaged, not as training writes it"),
        ("config.yaml", "trainer: 3\n", "is damaged, not as training writes it"),
        ("metrics.jsonl", "3\n", "is damaged, not as training writes it"),
        ("report.json", '{"schema": 1, "rows', r"report\.json is damaged \(.*evaluate again"),
        ("report.json", '{"accuracy": 0.5}', r"report\.json is no report"),
        ("report.json", '{"schema": 2, "rows": []}', r"report\.json has schema 2, this version reads 1"),
    ],
)
def test_damaged_records_of_a_run_are_not_published(run: Path, hub: Hub, file: str, text: str, told: str) -> None:
    (run / file).write_text(text)
    with pytest.raises(ValueError, match=told) as caught:
        publish(config(run), HfApi())
    assert "\n" not in str(caught.value)
    assert hub.requests == []
    assert not (run / "publish").exists()


@pytest.mark.parametrize(
    ("repo", "head", "said"),
    [
        ("me/tiny-medusa", "medusa", None),
        ("me/llama-eagle", "eagle", None),
        ("me/llama-eagle3", "eagle3", None),
        ("me/eagle-x", "hass", None),
        ("me/x", "hass", None),
        ("me/llama-EAGLE-3", "eagle", "says eagle3 but the head is eagle"),
        ("me/run-eagle", "medusa", "says eagle but the head is medusa"),
        ("me/medusa-eagle3", "eagle3", "says medusa but the head is eagle3"),
        (
            "me/Llama-EAGLE-3-8B",
            "eagle3",
            "EAGLE-1, but the head is eagle3; give it another name, such as …-eagle3",
        ),
        ("eagle-team/llama-eagle3", "eagle3", "such as eagle-team/llama-eagle3, for EAGLE-1, but the head is eagle3;"),
        ("me/eagle-run", "medusa", "note: vLLM takes a path that holds "),
        ("me/llama-eagle3", "eagle", "for EAGLE-3, but the head is eagle; give it another name"),
        ("me/llama-eagle3", "hass", "for EAGLE-3, but the head is hass; give it another name"),
    ],
)
def test_a_name_that_misleads_engines_is_remarked(repo: str, head: str, said: str | None) -> None:
    found = misleading(repo, head)
    assert found is None if said is None else said in str(found)
    assert found is None or head == "eagle3" or "…-eagle3" not in found
