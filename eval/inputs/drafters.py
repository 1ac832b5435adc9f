"""Build draft sources from the `drafter` part of a configuration: trained heads, and those of inference/drafters.

Each may be wrapped: by one that forgets past requests, and by a limit on draft depth.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.config import SourcesConfig
from eval.inputs.runs import find_heads
from heads.common.typed import build
from inference.drafters.head import HeadDrafter, load_drafter, saved_tree
from inference.drafters.hybrid import Hybrid
from inference.drafters.registry import configured, make
from inference.protocol import COLD, Commit, Context, Drafter, DrafterState, Proposal
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
    return in_states(drafters, config.cold, config.budget)


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


def in_states(drafters: Drafters, cold: bool, depth: int | None) -> Drafters:
    """Return the sources within a budget of depth, each that remembers past requests followed by a cold clone."""
    sources: Drafters = {}
    for name, drafter in drafters.items():
        sources[name] = drafter if depth is None else limited(drafter, depth)
        if cold and drafter.remembers:
            label = f"{name} {COLD}"
            sources[label] = WrappedDrafter(drafter.clone(), label, depth, cold=True)
    return sources


def limited(drafter: Drafter, depth: int) -> Drafter:
    """Return a source that drafts no deeper: a head under smaller trees, so that it drafts for a batch as before."""
    if isinstance(drafter, HeadDrafter):
        return drafter.within(depth)
    return WrappedDrafter(drafter, drafter.name, depth, cold=False)


class WrappedDrafter(Drafter):
    """A draft source that drafts no deeper than `depth`, if one is given; where it is cold, starts without memory."""

    def __init__(self, inner: Drafter, name: str, depth: int | None, cold: bool) -> None:
        self.inner, self.name, self.depth, self.cold = inner, name, depth, cold
        self.tree = inner.tree if depth is None else f"{inner.tree} within {depth}"
        self.feature_layers, self.remembers = inner.feature_layers, inner.remembers
        self.head, self.policy = inner.head, inner.policy

    @property
    def memory(self) -> str:
        """Whether a sequence starts warm or cold."""
        return COLD if self.cold else self.inner.memory

    def start(self, prompt: list[int]) -> DrafterState:
        """Begin a sequence."""
        if self.cold:
            self.inner.reset()
        state = self.inner.start(prompt)
        return state if self.depth is None else DepthLimitedState(state, self.depth)

    def reset(self) -> None:
        """Drop the memory of earlier sequences."""
        self.inner.reset()

    def clone(self) -> "WrappedDrafter":
        """Return a clone of the inner source, wrapped alike."""
        return WrappedDrafter(self.inner.clone(), self.name, self.depth, self.cold)


class DepthLimitedState(DrafterState):
    """State of one sequence drafted under a budget of depth."""

    def __init__(self, inner: DrafterState, depth: int) -> None:
        self.inner, self.depth = inner, depth

    def update(self, commit: Commit) -> None:
        """Take in committed tokens."""
        self.inner.update(commit)

    def propose(self, context: Context) -> Proposal:
        """Draft, to the budget's depth."""
        return self.inner.propose(context._replace(room=min(context.room, self.depth), reach=context.ahead))
