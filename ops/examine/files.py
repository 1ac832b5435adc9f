"""The head of an examination with the records next to it, and the target as far as it loads."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from eval.inputs.drafters import own_prompts
from eval.report.write import read_report
from heads.common.errors import one_line
from heads.common.files import last_good
from heads.common.untrusted import parse_yaml, parsed_file
from heads.formats.hub import downloaded, resolve_head, target_path
from heads.formats.published import format_of
from heads.formats.published.files import stored_tensors, without_prefix
from heads.formats.store import CONFIG
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.target import Target

log = logging.getLogger(__name__)

OWN = "headstart"  # the form of our own heads; other forms are keys of heads.formats.published.FORMATS

_parsed = partial(parsed_file, remedy="download or write it again")
RECORDS: dict[str, Callable[[Path], Any]] = {
    "report.json": read_report, "tokenizer_reference.json": _parsed, "provenance.json": _parsed,
    "config.yaml": partial(_parsed, parse=parse_yaml),
}  # fmt: skip


@dataclass(frozen=True)
class Examined:
    """A head's folder and the records next to it; a missing or unreadable one is empty."""

    name: str  # as the user gave it
    folder: Path  # the head's
    config: dict[str, Any]  # its config.json
    report: dict[str, Any]  # report.json
    reference: dict[str, Any]  # tokenizer_reference.json
    origin: dict[str, Any]  # provenance.json
    run: dict[str, Any]  # config.yaml of its training
    prompts: str | None  # the file of held-out prompts that its run keeps here, None if there is none

    @cached_property
    def stored(self) -> dict[str, Tensor]:
        """The tensors by their names in the files."""
        return stored_tensors(self.folder)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their names without the prefix that all may share."""
        return without_prefix(self.stored)

    @cached_property
    def format_name(self) -> str:
        """OWN or a key of FORMATS; P-EAGLE counts as EAGLE-3, since engines use the same class."""
        if "format" in self.config:
            return OWN
        format_name = format_of(self.folder)
        return "eagle3" if format_name == "peagle" else format_name

    def part(self, key: str) -> dict[str, Any]:
        """Return a section of the head's config.json, empty if missing."""
        values = self.config.get(key)
        return values if isinstance(values, dict) else {}

    @property
    def layer(self) -> dict[str, Any]:
        """The keys of its config.json, with the decoder layer's numbers of the speculators format."""
        return {**self.part("transformer_layer_config"), **self.config}

    @property
    def trained(self) -> dict[str, Any]:
        """The head in its training's config.yaml, empty if there is none."""
        values = self.run.get("head")
        return values if isinstance(values, dict) else {}

    @property
    def said_target(self) -> str | None:
        """The target named in the head's files, None without one."""
        verifier = self.part("speculators_config").get("verifier")
        names = (
            self.part("target").get("name"),
            verifier.get("name_or_path") if isinstance(verifier, dict) else None,
            self.config.get("base_model_name_or_path"),
            self.reference.get("base_model"),
        )
        return next((str(name) for name in names if name), None)


def read(run_or_repo: str) -> Examined:
    """Read a head's folder, a run's folder or a repository; refuse one without a head."""
    folder = resolve_head(run_or_repo)
    local = Path(run_or_repo).expanduser().is_dir()
    if not local:
        downloaded(run_or_repo, list(RECORDS))
    folders = [folder, folder.parent] if local and folder.name == "head" else [folder]
    config = _mapping([last_good(folder) / CONFIG], _parsed)
    report, reference, origin, run = (
        _mapping([parent / name for parent in folders], parse) for name, parse in RECORDS.items()
    )
    prompts = own_prompts(str(folder.parent)) if local and (folder.parent / "head").is_dir() else None
    return Examined(run_or_repo, folder, config, report, reference, origin, run, prompts)


def _mapping(paths: list[Path], parse: Callable[[Path], Any]) -> dict[str, Any]:
    """Return the content of the first existing file; empty, with a warning, if it is damaged."""
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return {}
    try:
        content = parse(path)
    except (OSError, ValueError) as error:
        log.warning("%s", one_line(error))
        return {}
    return content if isinstance(content, dict) else {}


def load_target(given: str | None, head: Examined, dtype: str, measure: bool) -> tuple[Target | EmbeddingsOnly, str]:
    """Load the given target, else the one in the head's files; return it, and the reason if its layers are missing.

    Raises:
        ValueError: no target is named, or not even its embedding loads.
    """
    name = given or head.said_target
    if name is None:
        raise ValueError(f"{head.name}: its files do not say its target; give target=FOLDER or target=OWNER/NAME")
    path = target_path(str(Path(name).expanduser()) if given else name)
    adapter, why = head.part("target").get("adapter"), "measure is false"
    if measure or isinstance(adapter, str):
        try:
            return Target.load(path, dtype, adapter=adapter if isinstance(adapter, str) else None), ""
        except (ValueError, OSError) as error:
            why = f"the target does not load ({one_line(error)})"
    try:
        return EmbeddingsOnly.load(path, "float32", "cpu", False), why
    except ValueError as error:
        problem = one_line(error).replace("model.path=", "target=", 1)
        raise ValueError(f"{problem}; give target=FOLDER or target=OWNER/NAME") from None
