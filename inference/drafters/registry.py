"""Every draft source that needs no trained head, by the name of its file in conf/drafter/."""

from collections.abc import Mapping
from typing import Any

from heads.common.typed import build
from inference.drafters.assistant import Assistant
from inference.drafters.contrib.early_exit import EarlyExit
from inference.drafters.contrib.layer_skip import LayerSkip
from inference.drafters.contrib.mirror import Mirror
from inference.drafters.contrib.streams import StreamsDrafter
from inference.drafters.lookahead import Lookahead
from inference.drafters.mtp import MtpDrafter
from inference.drafters.policy import check_tree
from inference.drafters.prompt_lookup import PromptLookup
from inference.drafters.recycling import Recycling
from inference.drafters.suffix import Suffix
from inference.protocol import Drafter
from inference.target.target import Target
from inference.target.tokenizer import Reads

# Each has a `Config` and is made of one, the target (a `Reads` is enough for `text_alone`) and a name.
SOURCES: dict[str, Any] = {
    "assistant": Assistant,
    "early_exit": EarlyExit,
    "layer_skip": LayerSkip,
    "lookahead": Lookahead,
    "mirror": Mirror,
    "mtp": MtpDrafter,
    "prompt_lookup": PromptLookup,
    "recycling": Recycling,
    "streams": StreamsDrafter,
    "suffix": Suffix,
}


def make(name: str, options: Mapping[str, Any], target: Target | Reads) -> Drafter:
    """Return a draft source with its options.

    Args:
        name: what reports call it.
        options: its configuration; `source`, where it differs from the name, is a key of SOURCES.
        target: the target that it drafts for; a `Reads` will do for one that drafts from the text alone.

    Raises:
        ValueError: an unknown source, or an option that it does not have or cannot take.
    """
    source, config = configured(name, options)
    if hasattr(config, "tree"):
        assert isinstance(target, Target)
        check_tree(target, config.tree, f"drafter.{name}")
    drafter: Drafter = source(config, target, name)
    return drafter


def reads_text_alone(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a source of a configuration needs no target; false for `head` and others that are none of SOURCES."""
    source = SOURCES.get(options.get("source", name))
    return source is not None and source.text_alone


def configured(name: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a source's class and configuration; refuse an unknown source, and options that it cannot take."""
    values = dict(options)
    source = values.pop("source", name)
    if source not in SOURCES:
        raise ValueError(f"drafter.{name}: no source is called {source!r}; choose one of {', '.join(SOURCES)}")
    return SOURCES[source], build(SOURCES[source].Config, values, f"drafter.{name}")
