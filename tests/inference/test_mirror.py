"""Drafting ahead: what was prepared is what would have been drafted, and it is found prepared."""

from pathlib import Path
from typing import Any

import pytest
import torch

from heads.common.typed import build
from inference.decode import RequestParams, speculate
from inference.drafters.assistant import Assistant
from inference.drafters.contrib.mirror import Mirror
from inference.protocol import Context
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling
from tests import assistants, enumeration, toys

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


@pytest.mark.parametrize("rule", ["auto", "coupled"])
def test_preparing_changes_no_draft(near: str, rule: str) -> None:
    alone, ahead = (mirror(near, toys.target(), outcomes) for outcomes in (0, 6))
    for seed in range(2):
        settings = RequestParams(TOKENS, WARM, seed=seed, rule=rule)
        plain, made = (speculate(toys.target(), each, toys.prompt(seed), settings) for each in (alone, ahead))
        assert made.tokens == plain.tokens
        assert [step[:3] for step in made.steps] == [step[:3] for step in plain.steps]
    assert alone.prepared == 0
    assert 0 < ahead.prepared < ahead.verified


def test_a_twin_is_always_prepared(tmp_path: Path) -> None:
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
    assert source.verified == len(made.steps) - 1
    assert source.prepared == source.verified - 1  # near the end there is no room for another draft
    assert all(step.accepted == step.drafted for step in made.steps)
    # The prompt, the first chain but for its last token, and then only what is prepared: a chain and its outcome.
    depth = assistants.CHAIN.depth
    assert passes.count(source.assistant.model) <= depth + len(made.steps) * (depth + 1)


def test_the_likeliest_outcomes_are_prepared(near: str) -> None:
    source = mirror(near, toys.target(), 4)
    source.accepted, source.tried = 9, 10
    state = source.start(toys.prompt(0))
    state.assistant.level = None
    rng = enumeration.Replay([])
    context = Context(toys.prompt(0), GREEDY, rng, 8)
    laws = torch.full((3, toys.VOCAB), 1e-4)
    for row, (token, share) in enumerate([(3, 0.6), (5, 0.9), (7, 0.7)]):
        laws[row, token] = share
    laws[0, 11], laws[2, 9] = 0.35, 0.25
    chain = state._chain(laws[:1].log(), -1, 2, context, ())
    chain.token, chain.answers = [3, 5], list(laws.log().split(1))
    # All accepted: 0.81 of the guesses 7 and 9; rejected at once: 0.1 of guess 11; after one: 0.09 spread thinly.
    assert state._outcomes(chain)[:3] == [(3, 5, 7), (3, 5, 9), (11,)]
    for end, first in ((7, (3, 5, 9)), (5, (11,))):  # what ends the answer, at the end of an outcome or within it
        state.assistant.eos = frozenset({end})
        assert state._outcomes(chain)[0] == first


@pytest.mark.parametrize(
    ("outcomes", "changes", "named"),
    [
        (-1, {}, "drafter.mirror.outcomes is -1: give 0 or more"),
        (2, {"tree": toys.TREES["dynamic"]}, r"drafter.mirror.assistant.*tree.kind=chain"),
        (2, {"confidence": 0.4}, "confidence=0"),
    ],
)
def test_bad_values(near: str, outcomes: int, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        mirror(near, toys.target(), outcomes, **changes)
