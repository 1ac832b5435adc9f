"""Assistants with another tokenizer in the engine: by shared tokens (TLI)."""

import functools
from typing import Any

import pytest
import torch

from inference.decode import Settings, autoregress, speculate
from inference.drafters.assistant import AssistantState
from inference.drafters.vocabulary import SharedVocabulary
from inference.protocol import Context, Drafter, Proposal
from inference.verification.sample import GREEDY, Sampling
from tests import assistants, toys

TOKENS = 24
T1 = Sampling(1.0, 0, 1.0)
SHUFFLED = torch.randperm(toys.VOCAB, generator=torch.Generator().manual_seed(0)).tolist()


def words(order: list[int]) -> Any:
    """Return a tokenizer whose token i is the toy target's token order[i]."""
    return assistants.words([f"w{i}" for i in order])


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target itself with its words in another order."""
    model = assistants.reordered(toys.target().model, SHUFFLED)
    return assistants.save(model, words(SHUFFLED), tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that often agrees and lacks a fifth of the words."""
    model = assistants.reordered(assistants.noisy(toys.target().model, 0.02), SHUFFLED[:32])
    return assistants.save(model, words(SHUFFLED[:32]), tmp_path_factory.mktemp("near"))


def source(kind: str, path: str) -> Drafter:
    return assistants.assistant(path, toys.target(), match="tli", tree=toys.TREES[kind])


@functools.cache
def text(seed: int) -> list[int]:
    return autoregress(toys.target(), toys.prompt(seed), Settings(TOKENS, GREEDY)).tokens


@pytest.mark.parametrize("kind", toys.TREES)
def test_speculation_equals_plain_decoding(near: str, kind: str) -> None:
    drafter, accepted = source(kind, near), 0
    for seed in range(2):
        made = speculate(toys.target(), drafter, toys.prompt(seed), Settings(TOKENS, GREEDY))
        assert toys.lively(text(seed))
        assert made.tokens == text(seed)
        accepted += sum(step.accepted for step in made.steps)
    assert accepted > 0


@pytest.mark.parametrize("sampling", [GREEDY, T1])
def test_the_target_in_another_order_is_always_accepted(clone: str, sampling: Sampling) -> None:
    drafter = source("chain", clone)
    for seed in range(2):
        made = speculate(toys.target(), drafter, toys.prompt(seed), Settings(26, sampling, seed=seed))
        assert [step.accepted for step in made.steps] == [4] * 5


def test_every_draft_is_that_of_a_model_without_a_cache(near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words map one to one, so that the naive reference needs no text."""
    drafter, target = source("chain", near), toys.target()
    model = drafter.model.model  # type is known by kind
    number = {word: i for i, word in enumerate(SHUFFLED[:32])}
    checked, propose = [], AssistantState.propose

    def compared(state: Any, context: Context) -> Proposal:
        made = propose(state, context)
        read = [number.get(t, -1) for t in context.token]
        # Words that the assistant lacks: the first word replaces unknown ones in the prompt, TLI leaves later ones out.
        prompt, new = read[: len(toys.prompt(1))], read[len(toys.prompt(1)) :]
        read = [max(t, 0) for t in prompt] + [t for t in new if t >= 0]
        expected = []
        for _ in range(min(4, context.room)):
            logits = model(input_ids=torch.tensor([read + expected]), use_cache=False).logits[0, -1]
            expected.append(int(logits.argmax()))
        assert made.tree.token.tolist() == [context.token[-1], *(SHUFFLED[t] for t in expected)]
        checked.append(len(expected))
        return made

    monkeypatch.setattr(AssistantState, "propose", compared)
    made = speculate(target, drafter, toys.prompt(1), Settings(TOKENS, GREEDY))
    assert [step.drafted for step in made.steps] == checked
    assert len({step.accepted for step in made.steps}) > 1


def test_what_the_assistant_lacks_is_spelled_with_its_longest_tokens() -> None:
    shared = SharedVocabulary.__new__(SharedVocabulary)
    shared.one, shared.bytes = {7: 9}, {5: b"abc", 6: b"abd"}
    shared.numbers = {b"a": 1, b"ab": 2, b"c": 3, b"b": 4, b"bc": 8}
    assert shared.follow([5, 7, 5]) == [2, 3, 9, 2, 3]
    assert shared.follow([6, 7, 8]) == [9], "what it cannot read it goes on without"
