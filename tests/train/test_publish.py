"""Publishing against a Hub on this machine: what arrives is what was trained, and failures are one line."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi
from torch import nn

from heads import HEADS, plain
from heads.hub import resolve_head
from heads.store import TargetSpec, load_head, save_head
from tests.eval.stubs import ROW
from tests.heads.stub import TinyEnds, same
from tests.train.hub_server import TOKEN, Hub, become
from train.publish import PublishConfig, misleading, publish

ROOT = Path(__file__).parents[2]
REPO = "me/tiny-medusa"
EVERYTHING = {
    "README.md",
    "config.json",
    "config.yaml",
    "model.safetensors",
    "report.html",
    "report.json",
    "report.md",
    "tokenizer_reference.json",
}


def medusa(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    kind: Any = HEADS["medusa"]
    head: nn.Module = kind(kind.Config("medusa", 2, 1, "shared", None, None), TinyEnds()).to(torch.bfloat16)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    return head


@pytest.fixture
def spec(tmp_path: Path) -> TargetSpec:
    target = tmp_path / "secret" / "target"
    target.mkdir(parents=True)
    (target / "tokenizer.json").write_text("{}")
    return TargetSpec(str(target), 11, 4, 3, "f00d")


@pytest.fixture
def run(tmp_path: Path, spec: TargetSpec) -> Path:
    run = tmp_path / "outputs" / "tiny-medusa"
    save_head(run / "head", medusa(0), spec, {"kind": "chain", "depth": 2})
    (run / "config.yaml").write_text(f"name: tiny-medusa\nout: {ROOT}/outputs/tiny-medusa\n")
    gate = {"checked": 16, "identical": 16, "near_tie": 0, "failed": 0}
    row = asdict(
        replace(
            ROW, drafter="medusa", tau=2.345, tau_ci=(2.2, 2.5), accepted_by_depth=[0.8, 0.55], speedup=1.678,
            speedup_ci=(1.5, 1.8), lossless=gate,
        )
    )  # fmt: skip
    red = {"checked": 1, "identical": 0, "near_tie": 0, "failed": 1}
    rows = [row, {**row, "lossless": red}, {**row, "batch_size": 4, "request_rate": 2.0}]
    rows.append({**row, "tier": "teacher_forced", "tau": 9.87, "speedup": None, "workload": "my|log"})
    report = {"schema": 1, "target": {}, "device": {"name": "a CPU"}, "settings": {}, "rows": rows}
    (run / "report.json").write_text(json.dumps(report))
    (run / "report.md").write_text("# Report\n")
    (run / "report.html").write_text("<p>Report</p>")
    (run / "provenance.json").write_text(
        json.dumps({"git_revision": "c0ffee", "command": f"{ROOT}/train/run.py", "versions": {"torch": "9"}})
    )
    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as hub:
        become(hub, monkeypatch, tmp_path / "cache")
        yield hub


def config(run: Path, **changes: Any) -> PublishConfig:
    values = {"private": True, "license": "mit", "dry_run": False, "out": None, "reverify": True}
    values |= {"format": None, "target": None, "dtype": "bfloat16", "draft_tokens": 3}
    return PublishConfig(**({"run": str(run), "repo": REPO} | values | changes))


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
    assert f"published as {REPO}, downloaded again and equal" in done.stdout
    assert TOKEN not in done.stdout + done.stderr
    repo = hub.repos[REPO]
    assert repo.private
    assert repo.large == {"model.safetensors"}
    files = repo.commits[repo.head]
    assert {*EVERYTHING, *plain.files(), ".gitattributes"} == set(files)
    assert files["model.safetensors"] == (run / "head" / "model.safetensors").read_bytes()
    assert not any(TOKEN.encode() in data for data in files.values())
    back = resolve_head(REPO)
    assert str(back).startswith(str(run.parents[1] / "cache"))
    assert same(medusa(0), load_head(back, TinyEnds(), spec))


def test_a_refused_token_is_one_line_and_publishes_nothing(run: Path, hub: Hub) -> None:
    done = command(run, hub, "hf_" + "wrong" * 7)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "me/tiny-medusa: the Hub refused creating the repository (401)" in done.stderr
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
    assert {path.name for path in out.iterdir()} == {*EVERYTHING, plain.FOLDER}
    assert same(medusa(0), load_head(resolve_head(str(out)), TinyEnds(), spec))
    assert hub.requests == []


def test_the_folder_names_no_path_of_this_machine(run: Path, hub: Hub) -> None:
    out = publish(config(run, dry_run=True), HfApi())
    assert (out / "config.yaml").read_text() == "name: tiny-medusa\nout: outputs/tiny-medusa\n"
    assert not any(f"{ROOT}/".encode() in path.read_bytes() for path in out.rglob("*.*"))
    assert json.loads((out / "tokenizer_reference.json").read_text()) == {
        "base_model": "target",
        "tokenizer_sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }


def test_the_card_says_what_was_measured(run: Path, hub: Hub) -> None:
    text = (publish(config(run, dry_run=True), HfApi()) / "README.md").read_text()
    meta = huggingface_hub.ModelCard(text).data.to_dict()
    assert meta == {
        "license": "mit",
        "library_name": "headstart",
        "tags": ["speculative-decoding", "draft-head", "medusa"],
    }
    assert "| medusa | tiny | 0 | 1 | 2.35 [2.20, 2.50] | 0.80 0.55 | 123.4 | 1.68 [1.50, 1.80] | 16/16 id" in text
    assert "| medusa | tiny | 0 | 4 at 2 req/s | 2.35" in text
    assert "| withheld | 0/1 identical, 1 FAILED |" in text
    assert "9.87" not in text, "no clock measured that"
    assert "`c0ffee`" in text
    assert f"python eval/run.py run={REPO}" in text
    assert "`train/run.py`" in text


def test_a_target_on_the_hub_is_the_base_model(run: Path, hub: Hub, spec: TargetSpec) -> None:
    save_head(run / "head", medusa(0), TargetSpec("Someone/Target-8B", 11, 4, 3, "f00d"), {})
    for name in ("report.json", "report.md", "report.html", "provenance.json"):
        (run / name).unlink()
    out = publish(config(run, dry_run=True), HfApi())
    text = (out / "README.md").read_text()
    assert huggingface_hub.ModelCard(text).data.to_dict()["base_model"] == "Someone/Target-8B"
    assert f"run={REPO} model.path=Someone/Target-8B prompt" in text
    assert "Not measured" in text
    assert not (out / "report.json").exists()


def test_a_targets_adapter_stands_in_the_card(run: Path, hub: Hub) -> None:
    save_head(run / "head", medusa(0), TargetSpec("Someone/Target-8B", 11, 4, 3, "f00d", "me/adapter"), {})
    text = (publish(config(run, dry_run=True), HfApi()) / "README.md").read_text()
    assert "model.path=Someone/Target-8B model.adapter=me/adapter" in text
    assert 'Target.load("Someone/Target-8B", adapter="me/adapter")' in text


def test_publishing_again_removes_what_no_longer_holds(run: Path, hub: Hub) -> None:
    publish(config(run), HfApi())
    hub.repos[REPO].commit({**hub.repos[REPO].commits[hub.repos[REPO].head], "mine.txt": b"kept"})
    (run / "report.json").unlink()
    save_head(run / "head", medusa(1), TargetSpec("t", 11, 4, 3, "f00d"), {})
    publish(config(run), HfApi())
    files = hub.repos[REPO].commits[hub.repos[REPO].head]
    assert EVERYTHING - set(files) == {"report.json"}
    assert "mine.txt" in files
    assert files["model.safetensors"] == (run / "head" / "model.safetensors").read_bytes()


def test_a_lost_connection_is_one_line(run: Path, hub: Hub) -> None:
    hub.drop = "PUT"
    with pytest.raises(ValueError, match=r"me/tiny-medusa: uploading broke off .* check the connection") as caught:
        publish(config(run), HfApi())
    assert "\n" not in str(caught.value)
    assert set(hub.repos[REPO].commits[hub.repos[REPO].head]) == {".gitattributes"}
    hub.drop = None
    publish(config(run), HfApi())
    assert set(hub.repos[REPO].commits[hub.repos[REPO].head]) == {*EVERYTHING, *plain.files(), ".gitattributes"}


def test_a_hub_that_is_down_is_one_line(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="creating the repository broke off") as caught:
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
    assert "says eagle but the head is medusa" in str(misleading("me/eagle-run", "medusa"))
