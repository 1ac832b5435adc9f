"""Reading the head to examine: errors are recorded, not raised, and nothing is checked."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from torch import Tensor

from eval.report.reading import read_report
from heads.common.errors import one_line
from heads.common.untrusted import parse_json, parse_yaml, regular
from heads.formats.hub import hub_errors, resolve_head
from heads.formats.published import FORMATS
from heads.formats.published.files import PREFIX, stored_tensors
from heads.formats.store import CONFIG, WEIGHTS, last_good
from heads.formats.weights import read_weights

OWN = "headstart"  # the form of our own heads; other forms are keys of heads.formats.published.FORMATS
PROMPTS = "prompts.jsonl"
BY_ARCHITECTURE = {"Eagle3": "eagle3", "EAGLE3": "eagle3", "Eagle": "eagle", "Medusa": "medusa", "DFlash": "dflash",
                   "DSpark": "dflash"}  # fmt: skip


def _json(path: Path) -> Any:
    return _parsed(path, parse_json)


def _yaml(path: Path) -> Any:
    return _parsed(path, parse_yaml)


def _parsed(path: Path, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(regular(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); download or write it again") from None


SIDES = {
    "report.json": read_report, "tokenizer_reference.json": _json, "provenance.json": _json, "config.yaml": _yaml,
}  # fmt: skip


@dataclass(frozen=True)
class Examined:
    """A head's folder with the files beside it.

    Attributes:
        name: as the user gave it.
        folder: the head's.
        config: its config.json, empty where that cannot be read.
        tensors: by their names in the files.
        report: report.json; reference: tokenizer_reference.json; origin: provenance.json; run: config.yaml; each empty
            where it is missing.
        prompts: the file of held-out prompts that its run keeps here, None if there is none.
        trouble: the error of each file that cannot be read, by its name.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    report: dict[str, Any]
    reference: dict[str, Any]
    origin: dict[str, Any]
    run: dict[str, Any]
    prompts: str | None
    trouble: dict[str, str]

    @cached_property
    def stripped(self) -> dict[str, Tensor]:
        """The tensors by their names without the prefix that all may share."""
        return {PREFIX.sub("", name): tensor for name, tensor in self.tensors.items()}

    @cached_property
    def form(self) -> str:
        """OWN or a key of FORMATS: by the names of its tensors where they decide, else by its architectures."""
        if "format" in self.config:
            return OWN
        names = self.stripped.keys()
        matching = [name for name, form in FORMATS.items() if form.matches(names)]
        by_name = [form for fragment, form in BY_ARCHITECTURE.items() if fragment in " ".join(self.architectures)]
        return (matching or by_name or [""])[0]

    @cached_property
    def architectures(self) -> list[str]:
        """Its architectures; none, where no engine is meant to load it."""
        names = self.config.get("architectures")
        return [str(name) for name in names] if isinstance(names, list) else []

    @cached_property
    def layer(self) -> dict[str, Any]:
        """The keys of its config.json, with the decoder layer's numbers of the speculators format."""
        return {**self.part("transformer_layer_config"), **self.config}

    def part(self, key: str) -> dict[str, Any]:
        """Return a part of its config.json, empty where that is missing."""
        values = self.config.get(key)
        return values if isinstance(values, dict) else {}

    @property
    def trained(self) -> dict[str, Any]:
        """The head in its run's config.yaml, empty where there is none."""
        values = self.run.get("head")
        return values if isinstance(values, dict) else {}

    @property
    def said_target(self) -> str | None:
        """The target that its files name, None where none does."""
        names = (
            self.part("target").get("name"),
            self.part("speculators_config").get("verifier", {}).get("name_or_path"),
            self.config.get("base_model_name_or_path"),
            self.reference.get("base_model"),
        )
        return next((str(name) for name in names if name), None)


def read(run_or_repo: str) -> Examined:
    """Read a head's folder, a run's folder or a repository.

    Raises:
        ValueError: there is no head, or the Hub does not give it.
    """
    folder = resolve_head(run_or_repo)
    local = Path(run_or_repo).expanduser().is_dir()
    if not local:
        with hub_errors(run_or_repo, "downloading"):
            HfApi().snapshot_download(run_or_repo, allow_patterns=list(SIDES))
    folders = [folder, folder.parent] if local and folder.name == "head" else [folder]
    trouble: dict[str, str] = {}

    def taken(name: str, parse: Callable[[Path], Any], path: Path) -> dict[str, Any]:
        try:
            content = parse(path)
        except (OSError, ValueError) as error:
            trouble[name] = one_line(error)
            return {}
        if not isinstance(content, dict):
            trouble[name] = f"{path}: holds no mapping; download or write it again"
            return {}
        return content

    def beside(name: str, parse: Callable[[Path], Any]) -> dict[str, Any]:
        path = next((parent / name for parent in folders if (parent / name).is_file()), None)
        return {} if path is None else taken(name, parse, path)

    config = taken(CONFIG, _json, last_good(folder) / CONFIG)
    is_own = "format" in config
    weights, parent = (read_weights, last_good(folder) / WEIGHTS) if is_own else (stored_tensors, folder)
    tensors = taken(WEIGHTS, weights, parent)
    report, reference, origin, run = (beside(name, parse) for name, parse in SIDES.items())
    in_run = [parent for parent in (folder, folder.parent) if local and (parent / "head").is_dir()]
    prompts = next((str(parent / PROMPTS) for parent in in_run if (parent / PROMPTS).is_file()), None)
    return Examined(run_or_repo, folder, config, tensors, report, reference, origin, run, prompts, trouble)
