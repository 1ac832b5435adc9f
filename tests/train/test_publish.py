"""Publishing against a Hub on this machine: what arrives is what was trained, and failures are one line."""

import json
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
from huggingface_hub import HfApi

from heads.common.resolvers import ROOT
from heads.formats.hub import resolve_head
from heads.formats.store import TargetSpec, load_head, save_head
from tests.eval.small import run_command
from tests.heads.stub import TinyEnds, same
from tests.train.hub_server import TOKEN, Hub
from tests.train.publishing import EVERYTHING, REPO, config, medusa
from train.publish import main, publish
from train.release.hub import files_of


def test_the_command_publishes_what_downloads_bit_for_bit(
    run: Path, hub: Hub, spec: TargetSpec, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(main, "publish", f"run={run}", f"repo={REPO}") == 0
    printed, warned = capfd.readouterr()
    assert re.search(f"published as {REPO} at [0-9a-f]{{8}}, downloaded again and equal", printed)
    assert TOKEN not in printed + warned
    assert "HTTP" not in printed + warned
    repo = hub.repos[REPO]
    assert repo.private
    assert repo.large == {"model.safetensors"}
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


def test_bad_runs_are_one_line(run: Path, hub: Hub, tmp_path: Path) -> None:
    for other in (run.parent / "nowhere", run / "head"):
        with pytest.raises(ValueError, match="holds no head/; give the folder of a run"):
            publish(config(other), HfApi())
    with pytest.raises(ValueError, match="give OWNER/NAME"):
        config(run, repo="tiny-medusa")
    for out in (run, run / "head"):
        with pytest.raises(ValueError, match="another out=FOLDER"):
            publish(config(run, out=str(out)), HfApi())
    for name in ("provenance.json", "report.json"):
        before = (run / name).read_text()
        (run / name).write_text(before[:20])
        with pytest.raises(ValueError, match=rf"{name}:? .*damaged \(|{name}: damaged \("):
            publish(config(run), HfApi())
        (run / name).write_text(before)
    (run / "config.yaml").write_text(f"key: {TOKEN}\n")
    with pytest.raises(ValueError, match=r"config\.yaml would hold an access token") as caught:
        publish(config(run), HfApi())
    assert TOKEN not in str(caught.value)
    (run / "head" / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match="truncated, damaged"):
        publish(config(run), HfApi())
    assert hub.requests == []


def test_a_crash_leaves_the_folder_of_before(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = publish(config(run, dry_run=True), HfApi(), str)
    before = {name: (out / name).read_bytes() for name in files_of(out)}
    save_head(run / "head", medusa(1), TargetSpec("t", 11, 4, 3, "f00d"), {})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            publish(config(run, dry_run=True), HfApi(), str)
    assert {name: (out / name).read_bytes() for name in files_of(out)} == before


@pytest.mark.parametrize("name", ["report.html", "provenance.json", "head", "head/config.json"])
def test_what_a_link_leads_to_is_not_published(run: Path, tmp_path: Path, name: str) -> None:
    (run / "provenance.json").touch()
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{name}: a link, to {tmp_path}/elsewhere, which is not published; put the"):
        publish(config(run, dry_run=True), HfApi(), str)
    assert not (run / "publish").exists()


def test_a_folder_with_something_of_its_own_is_not_replaced(run: Path, tmp_path: Path) -> None:
    """An earlier publication with another file, or files of the user's that are called as ours."""
    out = publish(config(run, dry_run=True), HfApi(), str)
    for mine in (out / "notes" / "mine.txt", tmp_path / "mine" / "README.md"):
        mine.parent.mkdir(parents=True)
        mine.write_text("mine")
        folder = mine.parents[1] if mine.suffix == ".txt" else mine.parent
        told = rf"holds {mine.relative_to(folder)}, and is no earlier publication; give another out"
        with pytest.raises(ValueError, match=told):
            publish(config(run, dry_run=True, out=str(folder)), HfApi(), str)
        assert mine.read_text() == "mine"
