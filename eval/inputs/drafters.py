"""Build draft sources from the `drafter` part of a configuration: trained heads, and those of inference/drafters.

One that remembers past requests is also measured cold.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.config import SourcesConfig
from eval.inputs.runs import find_heads
from heads.common.typed import build
from inference.drafters.head import load_drafter, saved_tree
from inference.drafters.hybrid import Hybrid
from inference.drafters.registry import configured, make
from inference.protocol import COLD, Drafter, DrafterState
from inference.target.target import Target

Drafters = dict[str, Drafter]


def check_drafters(config: SourcesConfig) -> None:
    """Refuse unknown draft sources and options, runs without a head, and invalid trees, before the target is loaded."""
    for name, options in config.drafter.items():
        if name in ("head", "hybrid"):
            for folder in _folders(config).values():
                saved_tree(folder, config.tree)
        if name == "hybrid":
            configured("hybrid.lookup", build(Hybrid.Config, dict(options), "drafter.hybrid").lookup)
        elif name not in ("head", "plain"):
            configured(name, options)


def load_drafters(config: SourcesConfig, target: Target) -> Drafters:
    """Return the configured draft sources `in_states`; refuse what `check_drafters` does, and another target's head."""
    drafters: Drafters = {}
    for name, options in config.drafter.items():
        if name == "head":
            drafters.update(_heads(config, target))
        elif name == "hybrid":
            drafters[name] = _hybrid(config, options, target)
        elif name != "plain":  # autoregressive decoding is in every report
            drafters[name] = make(name, options, target)
    return in_states(drafters, config.cold)


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


def in_states(drafters: Drafters, cold: bool) -> Drafters:
    """Return the sources, each that remembers past requests followed by a cold clone if `cold`."""
    sources: Drafters = {}
    for name, drafter in drafters.items():
        sources[name] = drafter
        if cold and drafter.remembers:
            label = f"{name} {COLD}"
            sources[label] = ColdDrafter(drafter.clone(), label)
    return sources


class ColdDrafter(Drafter):
    """A draft source that starts every sequence without memory."""

    memory = COLD

    def __init__(self, inner: Drafter, name: str) -> None:
        self.inner, self.name, self.tree = inner, name, inner.tree
        self.feature_layers, self.remembers = inner.feature_layers, inner.remembers
        self.head, self.policy = inner.head, inner.policy

    def start(self, prompt: list[int]) -> DrafterState:
        """Begin a sequence."""
        self.inner.reset()
        return self.inner.start(prompt)

    def reset(self) -> None:
        """Drop the memory of earlier sequences."""
        self.inner.reset()

    def clone(self) -> "ColdDrafter":
        """Return a clone of the inner source, cold as well."""
        return ColdDrafter(self.inner.clone(), self.name)
