"""The published folder: a run's head, exported if a format is given, with its card, report and plots.

Some export formats hold copies of the target's embedding and lm_head. The folder is replaced atomically.
"""

import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils._paths import filter_repo_objects

from data.text.files import content_hash
from eval.extras import METRICS
from eval.report.write import SERVING as SCHEDULE
from eval.report.write import read_report
from heads.common.files import last_good, replacing
from heads.common.gguf import gguf_file
from heads.common.resolvers import ROOT
from heads.common.target_config import read_target_values
from heads.common.typed import Json
from heads.common.untrusted import parse_json, parse_yaml, parsed_file
from heads.formats import custom_generate, lora
from heads.formats.checkpoint import write_copy
from heads.formats.hub import base_head, load_found, on_hub, target_path
from heads.formats.mtp_layouts import FAMILIES, text_section
from heads.formats.published import gguf
from heads.formats.published.export import TargetFacts, check, engine_mismatch, export, refusals
from heads.formats.store import CONFIG, WEIGHTS, load_head, read_config, read_tensors
from heads.mtp import Mtp
from inference.target.config import DTYPES
from inference.target.embeddings_only import AnyTarget, EmbeddingsOnly
from inference.target.target import Target
from train.release.card import card, view
from train.release.config import TEMPLATE, PublishConfig
from train.release.hub import files_of

ORIGIN = "provenance.json"
log = logging.getLogger(__name__)

TOKENIZER = "tokenizer_reference.json"
COPIED = ("config.yaml", "report.json", "report.md", "report.html", SCHEDULE)
GGUF = "gguf"
TENSORS = (WEIGHTS, gguf.FILE, *lora.FILES)
# Patterns; plots are from cards of earlier versions.
FILES = (CONFIG, *TENSORS, TOKENIZER, "README.md", *COPIED, "plots/*", f"{custom_generate.FOLDER}/*")
TOKEN = re.compile(r"\bhf_(?:(?:jwt|oauth)_[\w.-]{20,}|[A-Za-z0-9]{20,})")


def write_folder(run: Path, out: Path, config: PublishConfig) -> Json:
    """Write the folder, whose files lie at the top so that it loads as a head; return its card's values (`card.view`).

    Raises:
        ValueError: the head or a file next to it is a link or damaged, cannot be written in the format, or holds a
            token of the Hub; or `out` holds something else. The folder is then unchanged.
    """
    head = last_good(run / "head")
    for path in (head, head / CONFIG, head / WEIGHTS, *(run / name for name in (*COPIED, ORIGIN, METRICS))):
        if path.is_symlink():  # a run from outside could otherwise publish any file of this machine
            raise ValueError(f"{path}: a link, to {path.resolve()}, which is not published; put the file itself there")
    content = read_config(head)
    read_tensors(head)
    there = files_of(out)
    others = list(filter_repo_objects(there, ignore_patterns=list(FILES)))
    if others or (there and TOKENIZER not in there):
        raise ValueError(f"{out}: holds {(others or there)[0]}, and is no earlier publication; give another out=FOLDER")
    name, report = content["target"]["name"], run / "report.json"
    provenance = _read(run / ORIGIN, parse_json)
    reference = {"base_model": name if on_hub(name) else Path(name).name, "tokenizer_sha256": tokenizer_sha256(name)}
    if TEMPLATE in provenance:
        reference[TEMPLATE] = provenance[TEMPLATE]
    with tempfile.TemporaryDirectory() as temporary:
        source, refused = Path(temporary) / "head", {}
        if config.format:
            refused = write_format(head, config, name, content["target"].get("adapter"), source)
        elif config.base:
            peft = provenance.get("peft")
            rank = peft.get("rank") if isinstance(peft, dict) else None
            if not isinstance(rank, int) or rank < 1:
                raise ValueError(
                    f"base={config.base}: {run} has not adapted a head by peft=lora; publish it without base"
                )
            target = _load(config.target or target_path(name), content["target"].get("adapter"))
            trained: Any = load_head(head, target.embeddings, target.spec)
            before = base_head(config.base, trained.config, target.embeddings, target.spec)
            factors = lora.adapter_files(config.base, before.state_dict(), trained.state_dict(), rank)
            source.mkdir()
            for file, data in {**factors, CONFIG: (head / CONFIG).read_bytes()}.items():
                (source / file).write_bytes(data)
        else:
            source = head
        files = {TOKENIZER: json.dumps(reference, indent=2) + "\n"}
        files |= {name: (run / name).read_text(encoding="utf-8") for name in COPIED if (run / name).is_file()}
        files[CONFIG] = (source / CONFIG).read_text(encoding="utf-8")
        shown = view(
            config, content, json.loads(files[CONFIG]), refused, read_report(report) if report.is_file() else {},
            provenance, _read(run / "config.yaml", parse_yaml),
        )  # fmt: skip
        files |= {"README.md": card(shown)} | (custom_generate.files(content["head"]) if shown["decodes"] else {})
        with replacing(out.resolve()) as new:
            for name, text in files.items():
                (new / name).parent.mkdir(exist_ok=True)
                if TOKEN.search(text):
                    raise ValueError(f"{run}: {name} would hold an access token; remove it from the run's files")
                (new / name).write_text(portable(text), encoding="utf-8")
            for weights in (source / name for name in TENSORS if (source / name).is_file()):
                shutil.copyfile(weights, new / weights.name)
    return shown


def tokenizer_sha256(model: str) -> str | None:
    """Return the hash of the target's tokenizer.json if it is on this machine; uses no network."""
    local = Path(target_path(model)) / "tokenizer.json"
    file = local if local.is_file() or not on_hub(model) else try_to_load_from_cache(model, local.name)
    return content_hash(Path(file)) if isinstance(file, str | Path) and Path(file).is_file() else None


def assert_tokenizer(trained: str | None, path: str, of: str) -> None:
    """Refuse a target whose tokenizer.json has another hash than in the head's training, if both are known."""
    if trained is not None and tokenizer_sha256(path) not in (None, trained):
        raise ValueError(f"target={path}: its tokenizer.json is not that of {of}, which the head is for")


def portable(text: str) -> str:
    """Return the text without this machine's paths: the checkout's become relative, the home folder ~."""
    home = Path.home()
    relative = text.replace(f"{ROOT}/", "")
    return relative if home == Path(home.anchor) else relative.replace(f"{home}/", "~/")


def _read(path: Path, parse: Callable[[bytes], Any]) -> Json:
    """Return the mapping in a file of the run; empty if the file is missing."""
    content = parsed_file(path, "restore it, or remove it", parse) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def write_format(head: Path, config: PublishConfig, model: str, adapter: str | None, folder: Path) -> dict[str, str]:
    """Write a head, ours or another project's, in a format; return the `refusals` of the formats.

    Refuse another target, and a format that cannot hold this head.
    """
    path, tokenizer = config.target or target_path(model), None
    published = head / TOKENIZER
    assert_tokenizer(_read(published, parse_json).get("tokenizer_sha256"), path, f"the target in {published}")
    target = _load(path, adapter)
    name = next(filter(on_hub, (model, path)), Path(path).name)
    served = TargetFacts(name, target.config.to_dict(), DTYPES[config.dtype], config.draft_tokens)
    trained = load_found(head, target.embeddings, target.spec)
    assert_served(trained, path)
    if config.format == GGUF:
        if isinstance(trained, Mtp):
            raise ValueError(
                "format=gguf: llama.cpp reads an MTP module in its target's own file: give format=checkpoint, and "
                "convert that folder by its convert_hf_to_gguf.py"
            )
        file = gguf_file(path) if config.gguf is None else Path(config.gguf).expanduser()
        if file is None:
            check(trained, "llamacpp", served, target.embeddings.extra_ops())
            raise ValueError("format=gguf takes the tokenizer of the target's own GGUF file: give gguf=FILE")
        tokenizer = gguf.tokenizer_of(file, target.embeddings.vocab_size, target.tokenizer.get_vocab())
    export(trained, str(config.format), served, folder)
    if tokenizer is not None:
        gguf.write(folder, tokenizer)
    return refusals(trained, served)


def copy_with_head(folder: Path, out: Path, config: PublishConfig) -> str | None:
    """Write format=checkpoint and return the target's adapter, if any, which is not in it; refuse what does not fit."""
    content = read_config(folder)
    spec, kind = content["target"], content["head"]["name"]
    if kind != "mtp":
        raise ValueError(f"format=checkpoint is no form of {kind} heads; give a run of head=mtp")
    path = config.target or target_path(spec["name"])
    try:
        values = read_target_values(path, False, cached_alone=False)
    except ValueError as error:
        raise ValueError(f"target={path}: {error}") from error
    name = (values.get("architectures") or ["?"])[0]  # the checks below come before the download of the weights
    if name not in FAMILIES:
        raise ValueError(
            f"format=checkpoint: {path} is a {name}, in which engines look for no module that could be written "
            f"(known: {', '.join(FAMILIES)}); format=vllm serves a Llama or Qwen with head.layer=llama"
        )
    if values.get("quantization_config"):
        raise ValueError(
            f"format=checkpoint: {path} is quantised, and engines would take its module so too; give its "
            "unquantised checkpoint as target"
        )
    if (count := text_section(values).get(FAMILIES[name].count_key) or 1) != 1:
        raise ValueError(
            f"format=checkpoint: {path} has {count} modules, which draft one after another, and the head is one for "
            "all depths"
        )
    adapter: str | None = spec.get("adapter")
    target = _load(path, adapter)
    assert_tokenizer(tokenizer_sha256(spec["name"]), path, spec["name"])
    head = load_found(folder, target.embeddings, target.spec)
    assert isinstance(head, Mtp)
    assert_served(head, path)
    write_copy(head, path, FAMILIES[name], out)
    return adapter


def _load(path: str, adapter: str | None) -> AnyTarget:
    """Load the target on the CPU in its files' dtype, without its layers if possible."""
    if adapter is None:
        try:
            return EmbeddingsOnly.load(path, "float32", "cpu", False)
        except ValueError as error:
            log.warning("%s; the whole target is loaded", error)
    return Target.load(path, "float32", "cpu", adapter=adapter)


def assert_served(head: Any, path: str) -> None:
    """Refuse a head whose target engines would draft for differently (`engine_mismatch`)."""
    if (why := engine_mismatch(head.config, head.embeddings.extra_ops())) is not None:
        raise ValueError(f"{path}: {why}; publish without format")
