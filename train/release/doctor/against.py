"""The target that a head is examined against: its configuration, its tokenizer and, where they load, its weights."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from data.text.files import content_hash
from heads.base import Embeddings
from heads.common.errors import one_line
from heads.common.target_config import read_target_config
from heads.formats.hub import target_path
from heads.formats.store import TargetSpec
from heads.modules.rope import Rope, scaling_of
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.loading import load_tokenizer
from inference.target.target import Target
from train.release.doctor.examined import Examined

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Against:
    """The target.

    Attributes:
        path: folder or Hub id.
        config: its text model's config.json.
        tokenizer: None where none loads.
        model: the whole of it, its embedding and lm_head alone, or None where neither loads.
        why: the reason that not all of it loads.
    """

    path: str
    config: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase | None
    model: Target | EmbeddingsOnly | None
    why: str

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
    def layers(self) -> int:
        """How many decoder layers it has."""
        return int(self.config["num_hidden_layers"])

    @property
    def width(self) -> int:
        """Its hidden size."""
        return int(self.config["hidden_size"])

    @property
    def vocabulary(self) -> int:
        """How many tokens it knows, padding included."""
        return self.embeddings.vocab_size if self.embeddings is not None else int(self.config["vocab_size"])

    @property
    def context(self) -> int | None:
        """The most tokens that a text may have, None where it does not say."""
        length = self.config.get("max_position_embeddings")
        return length if isinstance(length, int) else None

    @property
    def rope(self) -> Rope | None:
        """Its rotary positions, None where it has none."""
        parameters = self.config.get("rope_parameters") or {}
        theta = self.config.get("rope_theta") or parameters.get("rope_theta")
        return None if theta is None else Rope(float(theta), scaling_of(self.config.get("rope_scaling") or parameters))

    @property
    def tokenizer_sha256(self) -> str | None:
        """The hash of its tokenizer.json."""
        file = cached_file(self.path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
        return None if file is None else content_hash(Path(file))


def load(given: str | None, head: Examined, dtype: str, measure: bool) -> Against:
    """Load the target, as far as it loads.

    Args:
        given: its folder or Hub id, None for the one that the head's files name.
        head: the head.
        dtype: of its weights.
        measure: whether its layers are needed.

    Raises:
        ValueError: no target is named, or there is none.
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
    values = config.to_dict()
    values |= {key: getattr(config, key, None) for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
    values["max_position_embeddings"] = getattr(config, "max_position_embeddings", None)
    adapter = head.part("target").get("adapter")
    model, why = _weights(path, dtype, adapter if isinstance(adapter, str) else None, measure)
    tokenizer = None if model is None else model.tokenizer
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(path, False)
        except ValueError as error:
            log.warning("%s", error)
    return Against(path, values, tokenizer, model, why)


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
