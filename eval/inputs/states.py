"""Wrappers of draft sources: a cold one that forgets past requests, and one with a limit on draft depth."""

from eval.inputs.drafters import Drafters
from inference.protocol import COLD, Commit, Context, Drafter, DrafterState, Proposal


class WrappedDrafter(Drafter):
    """A draft source that delegates to another one; subclasses override single methods."""

    def __init__(self, inner: Drafter, name: str) -> None:
        self.inner, self.name = inner, name
        self.tree, self.feature_layers, self.remembers = inner.tree, inner.feature_layers, inner.remembers
        self.head, self.policy = inner.head, inner.policy

    @property
    def memory(self) -> str:
        """Whether the inner source starts a sequence warm or cold."""
        return self.inner.memory

    def start(self, prompt: list[int]) -> DrafterState:
        """Begin a sequence."""
        return self.inner.start(prompt)

    def reset(self) -> None:
        """Drop the memory of earlier sequences."""
        self.inner.reset()


class Cold(WrappedDrafter):
    """A draft source that forgets earlier sequences before every one."""

    memory = COLD

    def start(self, prompt: list[int]) -> DrafterState:
        """Begin a sequence without memory of earlier ones."""
        self.inner.reset()
        return self.inner.start(prompt)

    def clone(self) -> "Cold":
        """Return a cold clone of the inner source."""
        return Cold(self.inner.clone(), self.name)


class DepthLimited(WrappedDrafter):
    """A draft source that drafts no deeper than a budget of depth."""

    def __init__(self, inner: Drafter, depth: int) -> None:
        super().__init__(inner, inner.name)
        self.depth, self.tree = depth, f"{inner.tree} within {depth}"

    def start(self, prompt: list[int]) -> DrafterState:
        """Begin a sequence under the budget."""
        return DepthLimitedState(self.inner.start(prompt), self.depth)

    def clone(self) -> "DepthLimited":
        """Return a clone of the inner source under the same budget."""
        return DepthLimited(self.inner.clone(), self.depth)


class DepthLimitedState(DrafterState):
    """State of one sequence drafted under a budget of depth."""

    def __init__(self, inner: DrafterState, depth: int) -> None:
        self.inner, self.depth = inner, depth

    def update(self, commit: Commit) -> None:
        """Take in committed tokens."""
        self.inner.update(commit)

    def propose(self, context: Context) -> Proposal:
        """Draft, to the budget's depth."""
        return self.inner.propose(context._replace(room=min(context.room, self.depth)))


def in_states(drafters: Drafters, cold: bool, depth: int | None) -> Drafters:
    """Return the sources within a budget of depth, each that remembers past requests followed by a cold clone."""
    sources: Drafters = {}
    for name, drafter in drafters.items():
        sources[name] = drafter if depth is None else DepthLimited(drafter, depth)
        if cold and drafter.remembers:
            sources[f"{name} {COLD}"] = Cold(sources[name].clone(), f"{name} {COLD}")
    return sources
