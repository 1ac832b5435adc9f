"""Draft sources that remember past requests: warm as they are, and cold beside it; and a budget that all share."""

from eval.inputs.drafters import Drafters
from inference.protocol import COLD, Commit, Context, Drafter, DrafterState, Proposal


class Around(Drafter):
    """A draft source that is another one but for what a subclass changes."""

    def __init__(self, inner: Drafter, name: str) -> None:
        self.inner, self.name = inner, name
        self.tree, self.feature_layers, self.remembers = inner.tree, inner.feature_layers, inner.remembers
        self.head, self.policy = inner.head, inner.policy

    @property
    def memory(self) -> str:
        """How the inner source meets a sequence."""
        return self.inner.memory

    def start(self, prompt: list[int]) -> DrafterState:
        """Begin a sequence."""
        return self.inner.start(prompt)

    def reset(self) -> None:
        """Forget earlier sequences."""
        self.inner.reset()


class Cold(Around):
    """A draft source that forgets earlier sequences before every one."""

    memory = COLD

    def start(self, prompt: list[int]) -> DrafterState:
        """Begin a sequence with nothing."""
        self.inner.reset()
        return self.inner.start(prompt)

    def clone(self) -> "Cold":
        """Return a cold clone of the inner source."""
        return Cold(self.inner.clone(), self.name)


class Within(Around):
    """A draft source that drafts no deeper than a budget."""

    def __init__(self, inner: Drafter, depth: int) -> None:
        super().__init__(inner, inner.name)
        self.depth, self.tree = depth, f"{inner.tree} within {depth}"

    def start(self, prompt: list[int]) -> DrafterState:
        """Begin a sequence under the budget."""
        return WithinState(self.inner.start(prompt), self.depth)

    def clone(self) -> "Within":
        """Return a clone of the inner source under the same budget."""
        return Within(self.inner.clone(), self.depth)


class WithinState(DrafterState):
    """The drafting of one sequence under a budget of depth."""

    def __init__(self, inner: DrafterState, depth: int) -> None:
        self.inner, self.depth = inner, depth

    def update(self, commit: Commit) -> None:
        """Take in committed rows."""
        self.inner.update(commit)

    def propose(self, context: Context) -> Proposal:
        """Draft, to the budget's depth."""
        return self.inner.propose(context._replace(room=min(context.room, self.depth)))


def in_states(drafters: Drafters, cold: bool, depth: int | None) -> Drafters:
    """Return the sources within a budget of depth, and each that remembers a second time, cold, right behind itself."""
    sources: Drafters = {}
    for name, drafter in drafters.items():
        sources[name] = drafter if depth is None else Within(drafter, depth)
        if cold and drafter.remembers:
            sources[f"{name} {COLD}"] = Cold(sources[name].clone(), f"{name} {COLD}")
    return sources
