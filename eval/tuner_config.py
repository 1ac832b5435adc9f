"""The types of conf/eval.yaml's `tuner`: which trees are tried, and how closely they are priced."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TunerConfig:
    """What the tuner tries: depths, children and budgets of trees, contexts, and samples of every cost.

    `prompts` and `batch_sizes` are the report's: the texts along which it simulates them, and where it prices them.
    """

    depths: list[int]
    top_k: list[int]
    nodes: list[int]
    contexts: list[int]
    samples: int
    prompts: int
    batch_sizes: list[int]

    def __post_init__(self) -> None:
        """Check that there is something to try, and nothing below 1.

        Raises:
            ValueError: naming the key.
        """
        for key in ("depths", "top_k", "nodes", "batch_sizes"):
            if not getattr(self, key):
                raise ValueError(f"tuner.{key} is empty: give at least one number")
        for key in ("depths", "top_k", "nodes", "contexts", "samples", "prompts", "batch_sizes"):
            if any(value < 1 for value in listed(getattr(self, key))):
                raise ValueError(f"tuner.{key} is {getattr(self, key)}: give numbers of 1 or more")

    def within(self, context: int) -> "TunerConfig":
        """Return what a target can verify: trees that its context holds with their root."""
        return replace(self, nodes=[nodes for nodes in self.nodes if nodes < context] or [1])


def listed(value: Any) -> list[Any]:
    """Return a list as it is, a single value as a list of one, and None as an empty one."""
    return value if isinstance(value, list) else [] if value is None else [value]
