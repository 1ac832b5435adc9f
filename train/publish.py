"""Publish a run's head: one folder with head, card and report, pushed to the Hub and verified by downloading it again.

python train/publish.py run=outputs/NAME repo=OWNER/NAME
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root in place of train/, so that its files shadow no module
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hashlib
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

import hydra
import torch
from huggingface_hub import HfApi, get_token, try_to_load_from_cache
from omegaconf import DictConfig

from eval.reading import read_report
from heads import HEADS
from heads.errors import user_errors
from heads.export import assert_known
from heads.hub import REPO, hub_errors, on_hub
from heads.resolvers import ROOT
from heads.store import CONFIG, WEIGHTS, last_good, read_config, read_tensors
from heads.typed import typed
from inference.target import DTYPES
from train import doctor
from train.card import Facts, card
from train.exporting import exported

TOKENIZER = "tokenizer_reference.json"
COPIED = ("config.yaml", "report.json", "report.md", "report.html")
FILES = (CONFIG, WEIGHTS, TOKENIZER, "README.md", *COPIED)
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")


@dataclass(frozen=True)
class PublishConfig:
    """conf/publish.yaml."""

    run: str
    repo: str
    private: bool
    license: str
    dry_run: bool
    out: str | None
    reverify: bool
    format: str | None
    target: str | None
    dtype: str
    draft_tokens: int

    def __post_init__(self) -> None:
        if not REPO.fullmatch(self.repo):
            raise ValueError(f"repo is {self.repo!r}: give OWNER/NAME")
        if self.format is not None:
            assert_known(self.format)
        if self.dtype not in DTYPES or self.draft_tokens < 1:
            known = ", ".join(DTYPES)
            raise ValueError(f"dtype is {self.dtype}, draft_tokens {self.draft_tokens}: give one of {known}; 1 or more")


def publish(config: PublishConfig, api: HfApi) -> Path:
    """Write the folder and, unless `dry_run`, push and verify it; return the folder.

    Raises:
        ValueError: there is no run or no head, the Hub refuses or cannot be reached, or what came back is different.
    """
    run = Path(config.run).expanduser()
    out = Path(config.out).expanduser() if config.out else run / "publish"
    _assert_has_head(run)
    if not config.dry_run and not (api.token or get_token()):
        raise ValueError(f"{config.repo}: no token for the Hub; run `hf auth login`, set HF_TOKEN or dry_run=true")
    write_folder(run, out, config)
    if config.dry_run:
        return out
    revision = push(out, config, api)
    if config.reverify:
        verify(out, config.repo, revision, api)
    return out


def write_folder(run: Path, out: Path, config: PublishConfig) -> None:
    """Write what is published. The head lies at the top, so that the folder, and so the repository, loads as a head."""
    head = last_good(run / "head")
    content = read_config(head)
    read_tensors(head)
    others = sorted(path.name for path in out.glob("*") if path.name not in FILES)
    if others:
        raise ValueError(f"{out}: holds {others[0]}, which is no part of a published head; give another out=FOLDER")
    if out.resolve() == head.resolve():
        raise ValueError(f"{out}: that is the run's own head; give another out=FOLDER")
    name = content["target"]["name"]
    facts = Facts(
        repo=config.repo,
        license=config.license,
        config=content,
        tokenizer_sha256=tokenizer_sha256(name),
        form=config.format,
        report=read_report(run / "report.json") if (run / "report.json").is_file() else {},
        provenance=_read_json(run / "provenance.json"),
    )
    reference = {"base_model": name if on_hub(name) else Path(name).name, "tokenizer_sha256": facts.tokenizer_sha256}
    reference |= {key: facts.provenance[key] for key in (doctor.TEMPLATE,) if key in facts.provenance}
    texts = {"README.md": card(facts)}
    texts[TOKENIZER] = json.dumps(reference, indent=2) + "\n"
    texts |= {name: (run / name).read_text(encoding="utf-8") for name in COPIED if (run / name).is_file()}
    with exported(head, config.format, config.target, config.dtype, config.draft_tokens) as source:
        texts[CONFIG] = (source / CONFIG).read_text(encoding="utf-8")
        texts = {name: portable(text) for name, text in texts.items()}
        for name, text in texts.items():
            if TOKEN.search(text):
                raise ValueError(f"{run}: {name} would hold an access token; remove it from the run's files")
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (out / name).unlink(missing_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
        shutil.copyfile(source / WEIGHTS, out / WEIGHTS)


def push(folder: Path, config: PublishConfig, api: HfApi) -> str:
    """Create the repository if need be and upload the folder in one commit; return the commit."""
    with hub_errors(config.repo, "creating the repository"):
        api.create_repo(config.repo, private=config.private, exist_ok=True)
        public = not api.repo_info(config.repo).private
    if public and config.private:
        raise ValueError(f"{config.repo}: the repository is public; make it private on the Hub, or say private=false")
    with hub_errors(config.repo, "uploading"):
        # Files of an earlier head that this one lacks, such as its report, go in the same commit.
        message = "Publish the head with headstart"
        done = api.upload_folder(
            repo_id=config.repo, folder_path=folder, commit_message=message, delete_patterns=list(FILES)
        )
    return str(done.oid)


def verify(folder: Path, repo: str, revision: str, api: HfApi) -> None:
    """Download a revision and compare every file and every tensor with the folder.

    Raises:
        ValueError: the download fails, or something came back different.
    """
    with tempfile.TemporaryDirectory() as temporary:
        with hub_errors(repo, "downloading for verification"):
            api.snapshot_download(repo, revision=revision, local_dir=temporary)
        back = Path(temporary)
        for path in sorted(folder.iterdir()):
            if not (back / path.name).is_file() or sha256(back / path.name) != sha256(path):
                raise ValueError(f"{repo}: {path.name} came back different from what was uploaded; publish again")
        ours, theirs = read_tensors(folder), read_tensors(back)
        equal = ours.keys() == theirs.keys() and all(
            ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
        )
        if not equal:
            raise ValueError(f"{repo}: the head came back different from what was uploaded; publish again")


def tokenizer_sha256(model: str) -> str | None:
    """Return the hash of the target's tokenizer.json where this machine has it, without asking the Hub."""
    local = Path(model) / "tokenizer.json"
    if not local.is_file() and on_hub(model):
        cached = try_to_load_from_cache(model, "tokenizer.json")
        local = Path(cached) if isinstance(cached, str) else local
    return sha256(local) if local.is_file() else None


def sha256(path: Path) -> str:
    """Return a file's hash."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def portable(text: str) -> str:
    """Return the text without this machine's paths: the checkout's are relative, the home is ~."""
    return text.replace(f"{ROOT}/", "").replace(str(Path.home()) + "/", "~/")


def misleading(repo: str, head: str) -> str | None:
    """Return a remark where the repository's name says another head: engines guess the method from the name."""
    words = set(re.split(r"[^a-z0-9]+", repo.split("/")[1].lower().replace("eagle-3", "eagle3")))
    others = sorted(words & {*HEADS, "eagle3"} - {head})
    if not others:
        return None
    return f"note: {repo} says {others[0]} but the head is {head}; serving engines guess the method from the name"


def _assert_has_head(run: Path) -> None:
    if not run.is_dir():
        others = sorted(path.parent.parent.name for path in run.parent.glob("*/head/config.json"))
        there = f"; runs with a head there: {', '.join(others)}" if others else ""
        raise ValueError(f"run={run}: no such folder{there}")
    if not last_good(run / "head").is_dir():
        raise ValueError(f"run={run}: it holds no head/; train it to its first evaluation, or name another run")


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's object, empty where the run has none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); write it again by evaluating the run, or remove it") from None
    return content if isinstance(content, dict) else {}


@hydra.main(version_base="1.3", config_path="../conf", config_name="publish")
@user_errors()
def main(cfg: DictConfig) -> None:
    """Run the command."""
    if cfg.doctor is not None:
        text, status = doctor.report(typed(doctor.DoctorConfig, doctor.part(cfg)))
        print(text)
        raise SystemExit(status)
    config = typed(PublishConfig, doctor.other_part(cfg))
    out = publish(config, HfApi(library_name="headstart"))
    print(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    head = read_config(last_good(Path(config.run).expanduser() / "head"))["head"]
    if remark := misleading(config.repo, head["name"]):
        print(remark)
    if config.dry_run:
        print("dry_run: nothing was uploaded")
    else:
        checked = ", downloaded again and equal in every file and tensor" if config.reverify else ""
        print(f"published as {config.repo}{checked}")


if __name__ == "__main__":
    main()
