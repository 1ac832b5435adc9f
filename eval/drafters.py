"""From the `drafter` part of a configuration to draft sources: trained heads, and those of inference/drafters."""

from typing import Any

from eval.config import EvalConfig
from eval.sources import find_heads, overlay
from heads.store import load_head, read_config
from heads.typed import typed
from inference.drafters import Drafter
from inference.drafters.head import HeadDrafter
from inference.drafters.registry import make
from inference.policy import TreeConfig
from inference.target import Target

Drafters = dict[str, Drafter]


def load_drafters(config: EvalConfig, target: Target) -> Drafters:
    """Return every draft source that the configuration names, on the target's device and in its dtype.

    Raises:
        ValueError: an unknown source or option, no run for `head`, or a head of another target.
    """
    drafters: Drafters = {}
    for name, options in config.drafter.items():
        if name == "head":
            drafters.update(_heads(config, target))
        elif name != "plain":  # plain decoding is in every report
            drafters[name] = make(name, options, target)
    return drafters


def _heads(config: EvalConfig, target: Target) -> Drafters:
    """Return the heads of all runs, each under its own tree."""
    runs = [*config.runs(), *config.compare]
    if not runs:
        raise ValueError("run is missing: give run=outputs/NAME, or drafter=plain to measure the target alone")
    drafters: Drafters = {}
    for name, folder in find_heads(runs).items():
        head: Any = load_head(folder, target.ends, target.spec).to(device=target.device, dtype=target.dtype).eval()
        tree = typed(TreeConfig, overlay(read_config(folder)["tree"], config.tree))
        drafters[name] = HeadDrafter(head, tree, name)
    return drafters
