"""The head and the target of an examination: errors are recorded, not raised, and nothing is checked."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from data.text.files import content_hash
from eval.inputs.runs import own_prompts
from eval.report.reading import read_report
from heads.base import Embeddings
from heads.common.errors import one_line
from heads.common.files import last_good
from heads.common.rope import Rope, positions_of
from heads.common.target_config import context_of, read_target_config
from heads.common.untrusted import parse_yaml, parsed_file
from heads.formats.hub import downloaded, resolve_head, target_path
from heads.formats.published import FORMATS, peagle
from heads.formats.published.files import stored_tensors, without_prefix
from heads.formats.store import CONFIG, WEIGHTS, TargetSpec
from heads.formats.weights import read_weights
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.loading import load_tokenizer
from inference.target.target import Target

log = logging.getLogger(__name__)

OWN = "headstart"  # the form of our own heads; other forms are keys of heads.formats.published.FORMATS
BY_ARCHITECTURE = {"Eagle3": "eagle3", "EAGLE3": "eagle3", "Eagle": "eagle", "Medusa": "medusa", "DFlash": "dflash",
                   "DSpark": "dflash"}  # fmt: skip


_parsed = partial(parsed_file, remedy="download or write it again")
SIDES: dict[str, Callable[[Path], Any]] = {
    "report.json": read_report, "tokenizer_reference.json": _parsed, "provenance.json": _parsed,
    "config.yaml": partial(_parsed, parse=parse_yaml),
}  # fmt: skip


@dataclass(frozen=True)
class Examined:
    """A head's folder with the files beside it; of what is missing the value is empty."""

    name: str  # as the user gave it
    folder: Path  # the head's
    config: dict[str, Any]  # its config.json, empty where that cannot be read
    tensors: dict[str, Tensor]  # by their names in the files
    report: dict[str, Any]  # report.json
    reference: dict[str, Any]  # tokenizer_reference.json
    origin: dict[str, Any]  # provenance.json
    run: dict[str, Any]  # config.yaml
    prompts: str | None  # the file of held-out prompts that its run keeps here, None if there is none
    trouble: dict[str, str]  # the error of each file that cannot be read, by its name

    @cached_property
    def stripped(self) -> dict[str, Tensor]:
        """The tensors by their names without the prefix that all may share."""
        return without_prefix(self.tensors)

    @cached_property
    def form(self) -> str:
        """OWN or a key of FORMATS: by the names of its tensors where they decide, else by its architectures.

        P-EAGLE is EAGLE-3 to engines, which find it by the same class; see `parallel`.
        """
        if "format" in self.config:
            return OWN
        names = self.stripped.keys()
        matching = [name for name, form in FORMATS.items() if form.matches(names)]
        by_name = [form for fragment, form in BY_ARCHITECTURE.items() if fragment in " ".join(self.architectures)]
        form = (matching or by_name or [""])[0]
        return "eagle3" if form == "peagle" else form

    @property
    def parallel(self) -> bool:
        """Whether it drafts all depths in one pass, from mask slots (P-EAGLE)."""
        return peagle.MASK in self.stripped

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
    """Read a head's folder, a run's folder or a repository; refuse one without a head."""
    folder = resolve_head(run_or_repo)
    local = Path(run_or_repo).expanduser().is_dir()
    if not local:
        downloaded(run_or_repo, list(SIDES))
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

    config = taken(CONFIG, _parsed, last_good(folder) / CONFIG)
    is_own = "format" in config
    weights, parent = (read_weights, last_good(folder) / WEIGHTS) if is_own else (stored_tensors, folder)
    tensors = taken(WEIGHTS, weights, parent)
    report, reference, origin, run = (beside(name, parse) for name, parse in SIDES.items())
    prompts = own_prompts(str(folder.parent)) if local and (folder.parent / "head").is_dir() else None
    return Examined(run_or_repo, folder, config, tensors, report, reference, origin, run, prompts, trouble)


@dataclass(frozen=True)
class Against:
    """The target."""

    path: str  # folder or Hub id
    config: dict[str, Any]  # its text model's config.json
    layers: int  # how many decoder layers it has
    width: int  # its hidden size
    context: int  # the most tokens that a text may have, UNBOUNDED where it does not say
    tokenizer: PreTrainedTokenizerBase | None  # None where none loads
    model: Target | EmbeddingsOnly | None  # whole, its embedding and lm_head alone, or None where neither loads
    why: str  # the reason that not all of it loads
    sibling: bool = False  # whether it may be another checkpoint than the one that the head was made for

    @property
    def whole(self) -> Target | None:
        """The target with its layers."""
        return self.model if isinstance(self.model, Target) else None

    @property
    def embeddings(self) -> Embeddings | None:
        """Its embedding and lm_head."""
        return None if self.model is None else self.model.embeddings

    @property
    def spec(self) -> TargetSpec | None:
        """The identity that a head must agree with."""
        return None if self.model is None else self.model.spec

    @property
    def vocabulary(self) -> int:
        """How many tokens it knows, padding included."""
        return self.embeddings.vocab_size if self.embeddings is not None else int(self.config["vocab_size"])

    @property
    def rope(self) -> Rope | None:
        """Its rotary positions, None where it has none."""
        return positions_of(self.config)

    @property
    def tokenizer_sha256(self) -> str | None:
        """The hash of its tokenizer.json."""
        file = cached_file(self.path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
        return None if file is None else content_hash(Path(file))


def load_target(given: str | None, head: Examined, dtype: str, measure: bool) -> Against:
    """Load the target that is given, else the one that the head's files name, as far as it loads; refuse to find none.

    Its layers are needed only to `measure`.
    """
    name = given or head.said_target
    if name is None:
        raise ValueError(f"{head.name}: its files do not say its target; give target=FOLDER or target=OWNER/NAME")
    path = target_path(str(Path(name).expanduser()) if given else name)
    try:
        config: Any = read_target_config(path, trust_remote_code=False).get_text_config()
    except ValueError as error:
        raise ValueError(
            f"target={path}: no model there ({one_line(error).split('. ')[0]}); give target=FOLDER or target=OWNER/NAME"
        ) from None
    values = config.to_dict() | {"vocab_size": getattr(config, "vocab_size", None)}
    layers, width = (int(getattr(config, key, None) or 0) for key in ("num_hidden_layers", "hidden_size"))
    adapter = head.part("target").get("adapter")
    model, why = _weights(path, dtype, adapter if isinstance(adapter, str) else None, measure)
    tokenizer = None if model is None else model.tokenizer
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(path, False)
        except ValueError as error:
            log.warning("%s", error)
    return Against(path, values, layers, width, context_of(config), tokenizer, model, why)


def _weights(path: str, dtype: str, adapter: str | None, measure: bool) -> tuple[Target | EmbeddingsOnly | None, str]:
    why = "checkup.measure is false"
    if measure or adapter is not None:
        try:
            return Target.load(path, dtype, adapter=adapter), ""
        except (ValueError, OSError) as error:
            why = f"the target does not load ({one_line(error)})"
    try:
        return EmbeddingsOnly.load(path, "float32", "cpu", False), why
    except ValueError:
        return None, why
