"""Draft sources that remember past requests: warm as they are, and cold beside it; and a budget that all share."""

from typing import Any

from eval.inputs.drafters import Drafters
from inference.batch import clone
from inference.drafters.contrib.mirror import Mirror
from inference.protocol import Commit, Context, Drafter, Proposal

COLD, WARM, NONE = "cold", "warm", "none"


class Around:
    """A draft source that is another one but for what a subclass changes."""

    def __init__(self, inner: Drafter, name: str) -> None:
        self.inner, self.name = inner, name
        self.tree, self.feature_layers = inner.tree, inner.feature_layers

    def reset(self, prompt: list[int]) -> None:
        """Begin a new sequence."""
        self.inner.reset(prompt)

    def forget(self) -> None:
        """Forget what earlier sequences have taught."""
        self.inner.forget()

    def observe(self, commit: Commit) -> None:
        """Take in committed rows."""
        self.inner.observe(commit)

    def propose(self, context: Context) -> Proposal:
        """Draft what may follow the last token."""
        return self.inner.propose(context)


class Cold(Around):
    """A draft source that forgets before every sequence what earlier ones have taught."""

    def reset(self, prompt: list[int]) -> None:
        """Begin a new sequence with nothing."""
        self.inner.reset(prompt)  # what it takes over from the last one goes first
        self.inner.forget()
        self.inner.reset(prompt)


class Within(Around):
    """A draft source that drafts no deeper than a budget."""

    def __init__(self, inner: Drafter, depth: int) -> None:
        super().__init__(inner, inner.name)
        self.depth, self.tree = depth, f"{inner.tree} within {depth}"

    def propose(self, context: Context) -> Proposal:
        """Draft, to the budget's depth."""
        return self.inner.propose(context._replace(room=min(context.room, self.depth)))


def remembers(drafter: Any) -> bool:
    """Whether a source drafts from the requests before."""
    if isinstance(drafter, Around):
        return remembers(drafter.inner)
    parts = [drafter, getattr(drafter, "lookup", None)]
    return any(getattr(getattr(each, "config", None), "memory", False) for each in parts)


def state_of(drafter: Drafter) -> str:
    """Return how a source meets a request: cold, warm from those before it, or with no memory at all.

    A mirror has no texts in memory, but counts how often it was right.
    """
    inner = drafter.inner if isinstance(drafter, Within) else drafter
    return COLD if isinstance(drafter, Cold) else WARM if remembers(inner) or isinstance(inner, Mirror) else NONE


def in_states(drafters: Drafters, cold: bool, depth: int | None) -> Drafters:
    """Return the sources within a budget of depth, and each that remembers a second time, cold, right behind itself."""
    made: Drafters = {}
    for name, drafter in drafters.items():
        made[name] = drafter if depth is None else Within(drafter, depth)
        if cold and remembers(drafter):
            made[f"{name} {COLD}"] = Cold(clone(made[name]), f"{name} {COLD}")
    return made
