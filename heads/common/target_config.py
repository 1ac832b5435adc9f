"""A target's configuration, which comes from outside: it makes a model of possible size, and names no code.

transformers makes a module for every layer that a config.json claims, and runs what is on the Hub under the name of an
attention. So the file is looked at before it is believed.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig

from heads.common.errors import one_line
from heads.common.ranges import LARGEST
from heads.common.untrusted import parse_json, regular, shown

MOST_PARTS = 2_000  # layers and other modules that are made one by one: beyond any target that there is
PARTS = re.compile(r"layers?$|blocks?$|^depths?$|_depth$|^num_labels$")
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "max_position_embeddings")
# Of attention and experts: those that torch and transformers bring. The others may be fetched from the Hub and run.
OURS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
# What transformers and its modeling code raise at values that they did not expect.
UNFIT = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError, ArithmeticError,
    AssertionError, MemoryError, StrictDataclassError, SafetensorError,
)  # fmt: skip


def read_target_config(path: str, trust_remote_code: bool, cached_alone: bool = False) -> PreTrainedConfig:
    """Return the configuration of a folder or Hub name.

    Args:
        path: where.
        trust_remote_code: whether it may name code.
        cached_alone: whether nothing is downloaded.

    Raises:
        ValueError: none is there, or one of which no target can be made; in one line, without the path.
    """
    where: dict[str, Any] = {"local_files_only": True} if cached_alone else {}
    try:
        regular(Path(path))
        own = Path(path) / "config.json"
        told = parse_json(own.read_bytes()) if own.is_file() else PreTrainedConfig.get_config_dict(path, **where)[0]
        _check(told, trust_remote_code)
        found: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **where)
        text = found.get_text_config()
    except UNFIT as error:
        raise ValueError(reason(error)) from error
    for name in SIZES:
        size = getattr(text, name, None)
        if size is not None and not (isinstance(size, int) and 1 <= size <= LARGEST):
            raise ValueError(f"{name} is {shown(size)} in its config.json, of which no model can be made")
    return found


def reason(error: BaseException) -> str:
    """Return the first line of an error, which of transformers' says it all, but for shapes, which it has logged."""
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its config.json says"
    return one_line(ValueError(str(error).strip().split("\n")[0] or type(error).__name__))


def _check(told: Any, trust_remote_code: bool) -> None:
    """Check what a config.json says before transformers reads it.

    Raises:
        ValueError: naming the key.
    """
    if not isinstance(told, dict):
        raise ValueError(f"its config.json is {shown(told)}, expected a mapping")
    for key, value in _held("", told):
        if PARTS.search(key) and isinstance(value, int | float) and not value <= MOST_PARTS:
            raise ValueError(f"{key} is {shown(value)} in its config.json, at most {MOST_PARTS} are made")
        if "_implementation" in key and isinstance(value, str) and value not in OURS and not trust_remote_code:
            raise ValueError(
                f"its config.json names code to run by the key {key}, {shown(value)}: remove the key, or trust it with "
                "model.trust_remote_code=true"
            )


def _held(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value but mappings and lists, with the nearest keys that it stands under."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _held(f"{key}.{name}" if "_implementation" in key else name, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _held(key, inner)
    else:
        yield key, value
