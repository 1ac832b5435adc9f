"""Drafting ahead: what was prepared is what would have been drafted, and it is found prepared."""

from pathlib import Path
from typing import Any

import pytest
import torch

from heads.common.typed import build
from inference.decode import RequestParams, speculate
from inference.drafters.assistant import Assistant
from inference.drafters.contrib.mirror import Mirror, MirrorState
from inference.protocol import DraftContext, Proposal
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling
from tests import assistants, toys

TOKENS = 24
WARM = Sampling(0.8, 12, 0.9, 0.0, 1.3)


def mirror(path: str, of: Target, outcomes: int, **changes: Any) -> Mirror:
    """Return the draft source; `changes` are the assistant's values."""
    values: dict[str, Any] = {
        "model": path, "match": "same", "dtype": "float64", "device": None, "trust_remote_code": False,
        "tree": assistants.CHAIN, "confidence": 0.0,
    }  # fmt: skip
    assistant = Assistant.Config(**{**values, **changes})
    config = build(Mirror.Config, {"outcomes": outcomes, "assistant": {}}, "drafter.mirror", {"assistant": assistant})
    return Mirror(config, of, "mirror")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that fills up with whether each step's draft was prepared."""
    found, propose = list[bool](), MirrorState.propose

    def watched(state: MirrorState, context: DraftContext) -> Proposal:
        found.append(state.ready is not None)
        return propose(state, context)

    monkeypatch.setattr(MirrorState, "propose", watched)
    return found


@pytest.mark.parametrize("rule", ["auto", "coupled"])
def test_preparing_changes_no_draft(near: str, rule: str, prepared: list[bool]) -> None:
    alone, ahead = (mirror(near, toys.target(), outcomes) for outcomes in (0, 6))
    for seed in range(2):
        settings = RequestParams(TOKENS, WARM, seed=seed, rule=rule)
        prepared.clear()
        plain, made = (speculate(toys.target(), each, toys.prompt(seed), settings) for each in (alone, ahead))
        assert made.tokens == plain.tokens
        assert [step[:3] for step in made.steps] == [step[:3] for step in plain.steps]
        assert not any(prepared[: len(plain.steps)])
        assert {*prepared[len(plain.steps) :]} == {False, True}


def test_a_twin_is_always_prepared(tmp_path: Path, prepared: list[bool]) -> None:
    """Every draft is accepted whole and the assistant's own next token is the bonus, so one outcome suffices."""
    target = toys.target("llama", torch.float64)
    source = mirror(assistants.save(target.model, toys.tokenizer(), tmp_path), target, 1)
    passes = []
    run = Target.run

    def counted(self: Target, *values: Any, **named: Any) -> Any:
        passes.append(self)
        return run(self, *values, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "run", counted)
        made = speculate(target, source, toys.prompt(1), RequestParams(32, GREEDY))
    assert [step.committed for step in made.steps[:-2]] == [assistants.CHAIN.depth + 1] * (len(made.steps) - 2)
    assert prepared == [False, *[True] * (len(made.steps) - 2), False]  # at the end there is no room for another draft
    assert all(step.accepted == step.drafted for step in made.steps)
    # The prompt, the first chain but for its last token, and then only what is prepared, no more than a pass a level:
    # the text, the chain, the outcome, and the next chain but for its last token.
    depth = assistants.CHAIN.depth
    assert passes.count(source.assistant.model) <= depth + len(made.steps) * (depth + 2)


def test_the_likeliest_outcomes_are_prepared(near: str) -> None:
    state = mirror(near, toys.target(), 4).start(toys.prompt(0))
    laws = torch.full((3, toys.VOCAB), 1e-4)
    for row, (token, share) in enumerate([(3, 0.6), (5, 0.9), (7, 0.7)]):
        laws[row, token] = share
    laws[0, 11], laws[2, 9] = 0.35, 0.25
    # All accepted: 0.81 of the guesses 7 and 9; rejected at once: 0.1 of guess 11; after one: 0.09 spread thinly.
    state.accepted, state.tried = 9, 10
    assert state.outcomes([3, 5], laws.log())[:3] == [(3, 5, 7), (3, 5, 9), (11,)]


@pytest.mark.parametrize(
    ("outcomes", "changes", "named"),
    [
        (-1, {}, "drafter.mirror.outcomes is -1: give 0 or more"),
        (2, {"tree": toys.TREES["dynamic"]}, r"drafter.mirror.assistant.*tree.kind=chain"),
    ],
)
def test_bad_values(near: str, outcomes: int, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        mirror(near, toys.target(), outcomes, **changes)
