"""The drafters that conf/drafter/ configures, by name."""

from typing import Any

from heads.common.typed import Json, build
from inference.drafters.assistant import Assistant
from inference.drafters.contrib.layer_skip import EarlyExit, LayerSkip
from inference.drafters.contrib.mirror import Mirror
from inference.drafters.contrib.streams import StreamsDrafter
from inference.drafters.head import MtpDrafter
from inference.drafters.lookahead import Lookahead
from inference.drafters.policy import check_tree
from inference.drafters.prompt_lookup import PromptLookup
from inference.drafters.recycling import Recycling
from inference.drafters.suffix import Suffix
from inference.protocol import Drafter
from inference.target.target import Target

# Each class has a `Config`, and takes one, the target and a name.
DRAFTERS: dict[str, Any] = {
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


def make(name: str, options: Json, target: Target) -> Drafter:
    """Return a drafter with its options.

    Args:
        name: its name in reports.
        options: its configuration; `source`, where it differs from the name, is a key of DRAFTERS.
        target: the target that it drafts for.

    Raises:
        ValueError: an unknown drafter, or an option that it does not have or cannot take.
    """
    kind, config = configured(name, options)
    if hasattr(config, "tree"):
        check_tree(target, config.tree, f"drafter.{name}")
    return kind(config, target, name)


def configured(name: str, options: Json) -> tuple[Any, Any]:
    """Return a drafter's class and configuration; refuse an unknown one, and options that it cannot take."""
    values = dict(options)
    kind = values.pop("source", name)
    if kind not in DRAFTERS:
        raise ValueError(f"drafter.{name}: no drafter is called {kind!r}; choose one of {', '.join(DRAFTERS)}")
    return DRAFTERS[kind], build(DRAFTERS[kind].Config, values, f"drafter.{name}")
