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
from tests.train.hub_server import Hub
from tests.train.hub_state import TOKEN
from tests.train.publishing import EVERYTHING, PLOTS, REPO, config, medusa
from train.publish import misleading, publish
from train.release.folder import portable
from train.release.hub import files_of


def command(run: Path, hub: Hub, token: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, from another folder."""
    env = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(run.parent / "hf"),
        "NO_PROXY": "127.0.0.1",
    }
    words = [sys.executable, str(ROOT / "train" / "publish.py"), f"run={run}", f"repo={REPO}", *overrides]
    return subprocess.run(words, cwd=run.parent, env=env, capture_output=True, text=True, check=False)


def test_the_command_publishes_what_downloads_bit_for_bit(run: Path, hub: Hub, spec: TargetSpec) -> None:
    done = command(run, hub, TOKEN)
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


def test_a_refused_token_is_one_line_and_publishes_nothing(run: Path, hub: Hub) -> None:
    done = command(run, hub, "hf_" + "wrong" * 7)
    assert done.returncode == 2
    warned, _ = done.stderr.strip().splitlines()
    assert warned.startswith("warning: me/tiny-medusa: It is not lossless")
    assert "me/tiny-medusa: the Hub refused checking the token (401)" in done.stderr
    assert "wrongwrong" not in done.stdout + done.stderr
    assert hub.repos == {}
    assert not hub.blobs


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


def test_the_folder_names_no_path_of_this_machine(run: Path, hub: Hub) -> None:
    out = publish(config(run, dry_run=True), HfApi())
    assert (out / "config.yaml").read_text().startswith("name: tiny-medusa\nout: outputs/tiny-medusa\n")
    assert not any(f"{ROOT}/".encode() in path.read_bytes() for path in map(out.joinpath, files_of(out)))
    assert json.loads((out / "tokenizer_reference.json").read_text()) == {
        "base_model": "target",
        "tokenizer_sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }


def test_publishing_again_removes_what_no_longer_holds(run: Path, hub: Hub) -> None:
    publish(config(run), HfApi())
    hub.repos[REPO].commit({**hub.repos[REPO].commits[hub.repos[REPO].head], "mine.txt": b"kept"})
    (run / "report.json").unlink()
    (run / "metrics.jsonl").unlink()
    save_head(run / "head", medusa(1), TargetSpec("t", 11, 4, 3, "f00d"), {})
    publish(config(run), HfApi())
    files = hub.repos[REPO].commits[hub.repos[REPO].head]
    assert EVERYTHING - set(files) == {"report.json", *PLOTS}
    assert "mine.txt" in files
    assert files["model.safetensors"] == (run / "head" / "model.safetensors").read_bytes()


def test_a_hub_that_is_down_is_one_line(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="cannot be reached") as caught:
        publish(config(run), HfApi())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["model.safetensors", "README.md"])
def test_a_download_that_differs_is_noticed(run: Path, hub: Hub, file: str) -> None:
    hub.damage = file
    with pytest.raises(ValueError, match=re.escape(f"{file} came back different")):
        publish(config(run), HfApi())
    publish(config(run, reverify=False), HfApi())


def test_a_public_repository_is_not_taken_for_a_private_one(run: Path, hub: Hub) -> None:
    publish(config(run, private=False), HfApi())
    with pytest.raises(ValueError, match="the repository is public"):
        publish(config(run), HfApi())


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


@pytest.mark.parametrize("point", range(6))
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


def test_what_is_refused_leaves_the_folder_as_it_was(run: Path) -> None:
    out = publish(config(run, dry_run=True), HfApi(), str)
    before = {name: (out / name).read_bytes() for name in files_of(out)}
    (run / "config.yaml").write_text(f"key: {TOKEN}\n")
    with pytest.raises(ValueError, match="would hold an access token"):
        publish(config(run, dry_run=True), HfApi(), str)
    assert {name: (out / name).read_bytes() for name in files_of(out)} == before


@pytest.mark.parametrize(
    "name",
    ["report.html", "report.md", "config.yaml", "provenance.json", "metrics.jsonl", "head", "head/config.json"],
)
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


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors", "plots/mine.png"])
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
    ("file", "text"),
    [
        ("provenance.json", '{"sources": [3]}'),
        ("provenance.json", '{"data": {"records": {"a": "many"}}}'),
        ("config.yaml", "trainer: 3\n"),
        ("metrics.jsonl", "3\n"),
    ],
)
def test_damaged_records_of_a_run_are_one_line(run: Path, file: str, text: str) -> None:
    (run / file).write_text(text)
    with pytest.raises(ValueError, match="is damaged, not as training writes it") as caught:
        publish(config(run, dry_run=True), HfApi(), str)
    assert "\n" not in str(caught.value)
    assert not (run / "publish").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"schema": 1, "rows', r"report\.json is damaged \(.*evaluate again"),
        ('{"accuracy": 0.5}', r"report\.json is no report"),
        ('{"schema": 2, "rows": []}', r"report\.json has schema 2, this version reads 1"),
    ],
)
def test_a_report_that_cannot_be_read_is_not_published(run: Path, hub: Hub, text: str, told: str) -> None:
    (run / "report.json").write_text(text)
    with pytest.raises(ValueError, match=told) as caught:
        publish(config(run), HfApi())
    assert "\n" not in str(caught.value)
    assert hub.requests == []
    assert not (run / "publish").exists()


def test_a_name_that_misleads_engines_is_remarked() -> None:
    assert misleading("me/tiny-medusa", "medusa") is None
    assert misleading("me/llama-eagle", "eagle") is None
    assert "says eagle3 but the head is eagle" in str(misleading("me/llama-EAGLE-3", "eagle"))
    assert "says eagle but the head is medusa" in str(misleading("me/run-eagle", "medusa"))
    assert "says medusa but the head is eagle3" in str(misleading("me/medusa-eagle3", "eagle3"))


@pytest.mark.parametrize(
    ("repo", "head", "taken"),
    [
        ("me/Llama-EAGLE-3-8B", "eagle3", "EAGLE-1"),
        ("eagle-team/llama-eagle3", "eagle3", "EAGLE-1"),
        ("me/eagle-run", "medusa", "EAGLE-1"),
        ("me/llama-eagle3", "eagle", "EAGLE-3"),
        ("me/llama-eagle3", "hass", "EAGLE-3"),
    ],
)
def test_a_name_that_vllm_takes_for_another_method_is_remarked(repo: str, head: str, taken: str) -> None:
    said = str(misleading(repo, head))
    assert said.startswith("note: vLLM takes a path that holds ")
    assert f"such as {repo}, for {taken}, but the head is {head}; give it another name" in said
    assert ("such as …-eagle3" in said) == (head == "eagle3")


@pytest.mark.parametrize("named", ["me/llama-eagle3 eagle3", "me/eagle-llama eagle", "me/eagle-x hass", "me/x hass"])
def test_a_name_that_vllm_takes_rightly_is_not(named: str) -> None:
    assert misleading(*named.split()) is None
