"""Build draft sources from the `drafter` part of a configuration: trained heads, and those of inference/drafters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.config import SourcesConfig
from eval.inputs.runs import find_heads
from heads.common.typed import build
from inference.drafters.head import load_drafter, saved_tree
from inference.drafters.hybrid import Hybrid
from inference.drafters.registry import configured, make
from inference.protocol import Drafter
from inference.target.target import Target

Drafters = dict[str, Drafter]


def check_drafters(config: SourcesConfig) -> None:
    """Check every draft source as far as is possible without the target.

    Raises:
        ValueError: an unknown source or option, no run for `head`, no head in a run, or an invalid tree.
    """
    for name, options in config.drafter.items():
        if name in ("head", "hybrid"):
            for folder in _folders(config).values():
                saved_tree(folder, config.tree)
        if name == "hybrid":
            configured("hybrid.lookup", build(Hybrid.Config, dict(options), "drafter.hybrid").lookup)
        elif name not in ("head", "plain"):
            configured(name, options)


def load_drafters(config: SourcesConfig, target: Target) -> Drafters:
    """Return every draft source that the configuration names, on the target's device and in its dtype.

    Raises:
        ValueError: an unknown source or option, no run for `head`, or a head of another target.
    """
    drafters: Drafters = {}
    for name, options in config.drafter.items():
        if name == "head":
            drafters.update(_heads(config, target))
        elif name == "hybrid":
            drafters[name] = _hybrid(config, options, target)
        elif name != "plain":  # autoregressive decoding is in every report
            drafters[name] = make(name, options, target)
    return drafters


def _hybrid(config: SourcesConfig, options: Mapping[str, Any], target: Target) -> Drafter:
    """Return the first run's head beside a model-free source."""
    settings = build(Hybrid.Config, dict(options), "drafter.hybrid")
    lookup = make("hybrid.lookup", settings.lookup, target)
    if not lookup.scores:
        raise ValueError("drafter.hybrid.lookup.source: only a source that scores its drafts will do, such as suffix")
    return Hybrid(settings, next(iter(_heads(config, target).values())), lookup, "hybrid")


def _folders(config: SourcesConfig) -> dict[str, Path]:
    """Return the heads' folders under the names that the report gives them."""
    runs = [*config.runs(), *config.compare]
    if not runs:
        raise ValueError("run is missing: give run=outputs/NAME, or drafter=plain to measure the target alone")
    return find_heads(runs)


def _heads(config: SourcesConfig, target: Target) -> Drafters:
    """Return the heads of all runs, each under its own tree."""
    return {name: load_drafter(folder, config.tree, target, name) for name, folder in _folders(config).items()}
