"""An assistant's draws: the law of the emitted tokens is the target's, by running the real code on every outcome."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import Level
from inference.drafters.assistant import Assistant, AssistantState
from inference.drafters.runner import ROOT, DraftModelRunner
from inference.protocol import Commit, Context, Proposal
from inference.target.model import TargetOutput
from inference.target.target import Target
from inference.verification.rng import Rng
from inference.verification.sample import GREEDY, Sampling, distribution
from inference.verification.tree import DraftTree
from tests import assistants, toys
from tests.enumeration import EXACT, distance, law, verify

T1 = Sampling(1.0, 0, 1.0)


class Remembering:
    """A follower that runs its model once for every path, however many forks of an enumeration ask for it."""

    def __init__(self, inner: DraftModelRunner) -> None:
        self.model, self.inner = inner.model, inner
        self.known: dict[tuple[int, ...], Tensor] = {}

    def read(self, token: list[int]) -> Tensor:
        self.text, self.nodes, self.level = tuple(token), list[tuple[int, ...]](), [ROOT]
        return self.logits([self.text])

    def expand(self, token: Tensor, parent: Tensor) -> Tensor:
        return self.branch(token, [self.level[p] for p in parent.tolist()])

    def branch(self, token: Tensor, above: list[int]) -> Tensor:
        paths = [(*(self.text if a == ROOT else self.nodes[a]), t) for a, t in zip(above, token.tolist(), strict=True)]
        self.level = list(range(len(self.nodes), len(self.nodes) + len(paths)))
        self.nodes += paths
        return self.logits(paths)

    def logits(self, paths: list[tuple[int, ...]]) -> Tensor:
        for path in paths:
            if path not in self.known:
                self.known[path] = self.inner.read(list(path))
        return torch.cat([self.known[path] for path in paths])


class Laws:
    """A target and an assistant that are tiny models."""

    def __init__(self, target: Target, source: Assistant, prompt: list[int], horizon: int) -> None:
        self.target, self.source, self.prompt, self.horizon = target, source, prompt, horizon
        self.runner: Any = Remembering(source.start([]).runner)
        self.known: dict[tuple[int, ...], Tensor] = {}

    def p(self, path: tuple[int, ...], sampling: Sampling) -> Tensor:
        if path not in self.known:
            out = self.target.prefill(torch.tensor([*self.prompt, *path]), self.target.cache())
            assert out.logits is not None
            self.known[path] = out.logits[0, -1]
        return distribution(self.known[path], sampling)

    def program(self, rng: Rng, sampling: Sampling) -> tuple[int, ...]:
        """One drafted and verified pass after the prompt, then plain sampling."""
        state: Any = self.source.start(self.prompt[:-1])
        state.runner = self.runner
        following = torch.tensor(self.prompt[1:])
        empty = torch.zeros(1, len(following), 0)
        state.update(Commit(following, TargetOutput(empty[..., None, :], empty, None), None))
        tree, q, *_ = state.propose(Context(self.prompt, sampling, rng, self.horizon - 1))
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.token.tolist(), tree.parent.tolist(), strict=True):
            paths.append(() if parent < 0 else (*paths[parent], token))
        path, bonus = verify(tree, torch.stack([self.p(made, sampling) for made in paths]), q, rng)
        emitted = [int(tree.token[node]) for node in path[1:]] + [bonus]
        while len(emitted) < self.horizon:
            emitted.append(rng.sample(self.p(tuple(emitted), sampling)[None])[0])
        return tuple(emitted[: self.horizon])

    def expected(self, sampling: Sampling) -> dict[tuple[int, ...], float]:
        law: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(self.horizon):
            law = {
                (*path, t): weight * float(p)
                for path, weight in law.items()
                for t, p in enumerate(self.p(path, sampling))
            }
        return law


def laws(tmp_path: Path, match: str, **changes: Any) -> Laws:
    """Return a target of three tokens with an assistant: of the same tokens and a padded head, or of other tokens."""
    names = ["a", "b", "c"]
    other = [*names, "b2"] if match == "same" else ["x", "c", "a", "y"]
    target = Target(assistants.tiny(3, 0).eval(), assistants.words(names), "tiny")
    own = assistants.words(names if match == "same" else other)
    path = assistants.save(assistants.tiny(4, 1), own, tmp_path)
    source = assistants.assistant(path, target, match=match, **changes)
    return Laws(target, source, [0, 2, 1, 1], 3)


CASES: dict[str, dict[str, Any]] = {
    "chain": {"tree": assistants.chain(2)},
    "doubting chain": {"tree": assistants.chain(2), "confidence": 0.5},
    "sampled": {"tree": toys.TreeConfig("sampled", 0, 0, 0, [], [2, 1])},
    "static": {"tree": toys.TreeConfig("static", 0, 0, 0, [[0], [1], [0, 0]], [])},
    "dynamic": {"tree": toys.TreeConfig("dynamic", 2, 2, 3, [], [])},
}


FILTERED = Sampling(0.8, 2, 0.9)


@pytest.mark.parametrize(
    ("match", "case", "sampling"),
    [*(("same", case, FILTERED) for case in CASES), *(("tli", case, FILTERED) for case in ("chain", "sampled")),
     ("same", "chain", GREEDY), ("same", "doubting chain", T1), ("tli", "dynamic", T1)],
)  # fmt: skip
def test_the_emitted_law_is_the_targets(match: str, case: str, sampling: Sampling, tmp_path: Path) -> None:
    both = laws(tmp_path, match, **CASES[case])
    found = law(lambda rng: both.program(rng, sampling))
    assert distance(found, both.expected(sampling)) < EXACT


def test_dropping_a_doubted_token_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect that stopping after a token, never before it, avoids: a law cut by the token's own value."""
    both = laws(tmp_path, "same", **CASES["doubting chain"])
    chain = AssistantState.chain

    def cut(self: AssistantState, level: Level, context: Context, depth: int) -> Proposal:
        tree, q, *_ = chain(self, level, context, depth)
        assert q is not None
        end = next((i for i in range(1, len(tree.token)) if q[i - 1, tree.token[i]] < 0.5), len(tree.token))
        return Proposal(DraftTree(tree.token[:end], tree.parent[:end]), q[:end])

    monkeypatch.setattr(AssistantState, "chain", cut)
    found = law(lambda rng: both.program(rng, T1))
    assert distance(found, both.expected(T1)) > 0.01
