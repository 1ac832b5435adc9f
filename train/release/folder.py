"""The folder that is published: a run's head with its card, report and plots, replaced atomically."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from data.text.files import content_hash
from eval.live.extras import METRICS
from eval.report.reading import read_report
from heads.common.errors import one_line
from heads.common.resolvers import ROOT
from heads.common.untrusted import parse_json, parse_yaml
from heads.formats.custom_generate import bundle
from heads.formats.hub import on_hub, target_path
from heads.formats.store import CONFIG, WEIGHTS, last_good, read_config, read_tensors, replacing
from train.release.card import Facts, card
from train.release.config import PublishConfig
from train.release.doctor import TEMPLATE
from train.release.exporting import exported
from train.release.hub import files_of, one_of

TOKENIZER = "tokenizer_reference.json"
COPIED = ("config.yaml", "report.json", "report.md", "report.html")
READ = (*COPIED, "provenance.json", METRICS, "prompts.jsonl")  # all of a run, besides its head
FILES = (CONFIG, WEIGHTS, TOKENIZER, "README.md", *COPIED, "plots/*", f"{bundle.FOLDER}/*")  # patterns
TOKEN = re.compile(r"\bhf_(?:(?:jwt|oauth)_[\w.-]{20,}|[A-Za-z0-9]{20,})")


def write_folder(run: Path, out: Path, config: PublishConfig) -> None:
    """Write the folder. The head's files lie at its top, so that the folder, and so the repository, loads as a head.

    Raises:
        ValueError: the head or a file beside it is a link or damaged, cannot take the format, or holds a token of the
            Hub; or `out` holds something else. The folder is then as it was.
        OSError: the disk is full or the folder cannot be written.
    """
    head = last_good(run / "head")
    _refuse_links([head, head / CONFIG, head / WEIGHTS, *(run / name for name in READ)])
    content = read_config(head)
    read_tensors(head)
    _assert_free(out, head)
    name = content["target"]["name"]
    provenance = _read(run / "provenance.json", parse_json)
    reference = {"base_model": name if on_hub(name) else Path(name).name, "tokenizer_sha256": tokenizer_sha256(name)}
    reference |= {key: provenance[key] for key in (TEMPLATE,) if key in provenance}
    with exported(head, config.format, config.target, config.dtype, config.draft_tokens) as source:
        files: dict[str, str | bytes] = {TOKENIZER: json.dumps(reference, indent=2) + "\n"}
        files |= {name: (run / name).read_text(encoding="utf-8") for name in COPIED if (run / name).is_file()}
        files |= bundle.files(content["head"]["name"])
        files[CONFIG] = (source / CONFIG).read_text(encoding="utf-8")
        facts = _facts(run, config, content, json.loads(files[CONFIG]), reference["tokenizer_sha256"], provenance)
        try:
            files |= card(facts)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{run}: provenance.json, config.yaml or metrics.jsonl is damaged, not as training writes it "
                f"({type(error).__name__}: {one_line(error)}); restore it, or remove it"
            ) from error
        try:
            with replacing(out.resolve()) as new:
                for name, data in files.items():
                    (new / name).parent.mkdir(exist_ok=True)
                    (new / name).write_bytes(data if isinstance(data, bytes) else _safe(run, name, data).encode())
                shutil.copyfile(source / WEIGHTS, new / WEIGHTS)
        except OSError as error:
            raise OSError(
                f"{out}: could not be written ({one_line(error)}); free space, or give another out"
            ) from error


def _facts(
    run: Path,
    config: PublishConfig,
    content: dict[str, Any],
    served: dict[str, Any],
    tokenizer: str | None,
    provenance: dict[str, Any],
) -> Facts:
    report = run / "report.json"
    return Facts(
        repo=config.repo,
        license=config.license,
        run=run,
        config=content,
        served=served,
        tokenizer_sha256=tokenizer,
        form=config.format,
        draft_tokens=config.draft_tokens,
        report=read_report(report) if report.is_file() else {},
        provenance=provenance,
        settings=_read(run / "config.yaml", parse_yaml),
    )


def _refuse_links(paths: Iterable[Path]) -> None:
    """Refuse links: a run from an untrusted source could publish any file of this machine by one."""
    for path in paths:
        if path.is_symlink():
            raise ValueError(f"{path}: a link, to {path.resolve()}, which is not published; put the file itself there")


def _assert_free(out: Path, head: Path) -> None:
    """Refuse to replace a folder that holds more than an earlier publication."""
    if out.resolve() == head.resolve():
        raise ValueError(f"{out}: that is the run's own head; give another out=FOLDER")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: that is a file; give another out=FOLDER")
    ours = one_of(FILES)
    others = [name for name in files_of(out) if not ours(name)] if out.is_dir() else []
    if files_of(out) and not (out / TOKENIZER).is_file():  # a README.md or a head of the user's own
        raise ValueError(f"{out}: holds {files_of(out)[0]}, and is no earlier publication; give another out=FOLDER")
    if others:
        raise ValueError(f"{out}: holds {others[0]}, which is no part of a published head; give another out=FOLDER")


def tokenizer_sha256(model: str) -> str | None:
    """Return the hash of the target's tokenizer.json where this machine has it, without asking the Hub."""
    local = Path(target_path(model)) / "tokenizer.json"
    if not local.is_file() and on_hub(model):
        cached = try_to_load_from_cache(model, "tokenizer.json")
        local = Path(cached) if isinstance(cached, str) else local
    return content_hash(local) if local.is_file() else None


def portable(text: str) -> str:
    """Return the text without this machine's paths: the checkout's are relative, the home is ~."""
    home = Path.home()
    relative = text.replace(f"{ROOT}/", "")
    return relative if home == Path(home.anchor) else relative.replace(f"{home}/", "~/")


def _safe(run: Path, name: str, text: str) -> str:
    """Return a file's text as it may be published.

    Raises:
        ValueError: it holds a token of the Hub.
    """
    if TOKEN.search(text):
        raise ValueError(f"{run}: {name} would hold an access token; remove it from the run's files")
    return portable(text)


def _read(path: Path, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    """Return a file's mapping, empty where the run has none."""
    if not path.is_file():
        return {}
    try:
        content = parse(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); write it again by evaluating the run, or remove it") from None
    return content if isinstance(content, dict) else {}
