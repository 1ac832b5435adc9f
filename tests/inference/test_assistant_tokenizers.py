"""Assistants with another tokenizer in the engine: by shared tokens (TLI) and through text (SLEM)."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inference.decode import Settings, autoregress, speculate
from inference.drafters.assistant import AssistantState
from inference.drafters.contrib.assistant_slem import AssistantSlem, SlemState
from inference.drafters.vocabulary import SharedVocabulary, encode
from inference.protocol import Commit, Context, Drafter, Proposal, Verified
from inference.target.model import TargetOutput
from inference.text_stream import decode
from inference.verification.rng import Generator
from inference.verification.sample import GREEDY, Sampling
from inference.verification.tree import DraftTree
from tests import assistants, toys
from tests.tokenizers import TEXT, trained

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
    if kind == "slem":
        return assistants.slem(path, toys.target())
    return assistants.assistant(path, toys.target(), match="tli", tree=toys.TREES[kind])


@functools.cache
def text(seed: int) -> list[int]:
    return autoregress(toys.target(), toys.prompt(seed), Settings(TOKENS, GREEDY)).tokens


@pytest.mark.parametrize("kind", [*toys.TREES, "slem"])
def test_speculation_equals_plain_decoding(near: str, kind: str) -> None:
    drafter, accepted = source(kind, near), 0
    for seed in range(2):
        made = speculate(toys.target(), drafter, toys.prompt(seed), Settings(TOKENS, GREEDY))
        assert toys.lively(text(seed))
        assert made.tokens == text(seed)
        accepted += sum(step.accepted for step in made.steps)
    assert accepted > 0


@pytest.mark.parametrize(("kind", "sampling"), [("chain", GREEDY), ("chain", T1), ("slem", GREEDY)])
def test_the_target_in_another_order_is_always_accepted(clone: str, kind: str, sampling: Sampling) -> None:
    drafter = source(kind, clone)
    for seed in range(2):
        made = speculate(toys.target(), drafter, toys.prompt(seed), Settings(26, sampling, seed=seed))
        assert [step.accepted for step in made.steps] == [4] * 5


@pytest.mark.parametrize("kind", ["chain", "slem"])
def test_every_draft_is_that_of_a_model_without_a_cache(near: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words map one to one, so that the naive reference needs no text."""
    drafter, target = source(kind, near), toys.target()
    model = drafter.model.model  # type is known by kind
    number = {word: i for i, word in enumerate(SHUFFLED[:32])}
    kind_of_state, checked = (SlemState if kind == "slem" else AssistantState), []
    propose = kind_of_state.propose

    def compared(state: Any, context: Context) -> Proposal:
        made = propose(state, context)
        read = [number.get(t, -1) for t in context.token]
        # Words that the assistant lacks: the first word stands for unknown ones in a text, TLI leaves them out.
        prompt, new = read[: len(toys.prompt(1))], read[len(toys.prompt(1)) :]
        read = [max(t, 0) for t in read] if kind == "slem" else [max(t, 0) for t in prompt] + [t for t in new if t >= 0]
        expected = []
        for _ in range(min(4, context.room)):
            logits = model(input_ids=torch.tensor([read + expected]), use_cache=False).logits[0, -1]
            expected.append(int(logits.argmax()))
        assert made.tree.token.tolist() == [context.token[-1], *(SHUFFLED[t] for t in expected)]
        checked.append(len(expected))
        return made

    monkeypatch.setattr(kind_of_state, "propose", compared)
    made = speculate(target, drafter, toys.prompt(1), Settings(TOKENS, GREEDY))
    assert [step.drafted for step in made.steps] == checked
    assert len({step.accepted for step in made.steps}) > 1


def test_sampling_through_text_is_reproducible_and_varied(near: str) -> None:
    settings = Settings(TOKENS, Sampling(1.0, 10, 0.95), seed=5)
    runs = [speculate(toys.target(), source("slem", near), toys.prompt(0), settings) for _ in range(2)]
    assert runs[0].tokens == runs[1].tokens
    assert toys.lively(runs[0].tokens)


def test_a_doubted_word_ends_the_text(near: str) -> None:
    drafter = assistants.slem(near, toys.target(), confidence=0.5, depth=6)
    made = speculate(toys.target(), drafter, toys.prompt(0), Settings(TOKENS, GREEDY))
    assert made.tokens == text(0)
    assert len({step.drafted for step in made.steps[:-3]}) > 1


class Script:
    """A follower that continues any prefix of one text, in its own tokens, as if it knew the text by heart."""

    def __init__(self, inner: Any, kind: str, whole: str) -> None:
        self.model, self.whole, self.tokenizer = inner.model, whole, trained(kind)
        self.clear()

    def clear(self) -> None:
        self.ahead: list[int] = []

    def read(self, token: list[int]) -> Tensor:
        known = decode(self.tokenizer, token)
        assert self.whole.startswith(known)
        own = encode(self.tokenizer, self.whole)[0]
        same = next((i for i in range(len(own)) if decode(self.tokenizer, own[:i]) == known), None)
        self.ahead = [] if same is None else own[same:]
        return self.next()

    def expand(self, token: Tensor, parent: Tensor) -> Tensor:
        return self.next()

    def next(self) -> Tensor:
        token = self.ahead.pop(0) if self.ahead else 1
        return torch.nn.functional.one_hot(torch.tensor([token]), len(self.tokenizer)).float() * 9


@pytest.mark.parametrize("theirs", ["sentencepiece", "metaspace", "bytes"])
@pytest.mark.parametrize("ours", ["bytes", "sentencepiece"])
def test_text_of_split_characters_comes_through(ours: str, theirs: str, tmp_path: Path) -> None:
    """The target writes a text whose characters are several tokens; an assistant that knows it drafts it."""
    tokenizer, whole = trained(ours), " ".join(TEXT[1:])
    target = assistants.Target(assistants.tiny(len(tokenizer), 0).eval(), tokenizer, ours)
    path = assistants.save(assistants.tiny(len(trained(theirs)), 1), trained(theirs), tmp_path)
    drafter = assistants.slem(path, target, depth=6)
    token, rng = encode(tokenizer, whole)[0], Generator(0, torch.device("cpu"))
    state: Any = drafter.start(token[:5])
    state.runner = Script(state.runner, theirs, whole)
    at, accepted, idle = 6, [], 0
    state.update(commit(token[1:6], None))
    while at < len(token):
        tree, q, *_ = state.propose(Context(token[:at], GREEDY, rng, len(token) - at - 1))
        drafted = tree.token[1:].tolist()
        if "\ufffd" in decode(tokenizer, token[:at]):
            assert drafted == []
        assert q is None
        assert tree.token[0] == token[at - 1]
        assert len(drafted) <= max(0, len(token) - at - 1)
        right = next((i for i, t in enumerate(drafted) if t != token[at + i]), len(drafted))
        accepted.append(right)
        idle += not drafted
        verified = Verified(tree, list(range(right + 1)), torch.zeros(len(tree.token), 2), None)
        state.update(commit(token[at : at + right + 1], verified))
        at += right + 1
    assert sum(accepted) > 0.5 * (len(token) - 5)
    assert idle < len(accepted)


def commit(following: list[int], verified: Verified | None) -> Commit:
    empty = torch.zeros(1, len(following), 0)
    return Commit(torch.tensor(following), TargetOutput(empty[..., None, :], empty, None), verified)


def test_inside_a_character_nothing_is_drafted(tmp_path: Path) -> None:
    tokenizer = trained("sentencepiece")
    target = assistants.Target(assistants.tiny(len(tokenizer), 0).eval(), tokenizer, "bytes")
    path = assistants.save(assistants.tiny(len(trained("bytes")), 1), trained("bytes"), tmp_path)
    drafter: AssistantSlem = assistants.slem(path, target)
    token = encode(tokenizer, "日本")[0]
    state = drafter.start(token[:1])
    state.update(commit(token[1:2], None))
    tree, *_ = state.propose(Context(token[:2], GREEDY, Generator(0, torch.device("cpu")), 8))
    assert tree.token.tolist() == token[1:2]
    assert isinstance(tree, DraftTree)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"depth": 0}, "drafter.assistant_slem.depth is 0"),
        ({"lookbehind": 0}, "drafter.assistant_slem.lookbehind is 0"),
        ({"confidence": -0.1}, "drafter.assistant_slem.confidence is -0.1"),
        ({"schedule": "x"}, "drafter.assistant_slem.schedule is 'x'"),
        ({"device": "cuda:77"}, "drafter.assistant_slem.device is 'cuda:77'"),
    ],
)
def test_a_bad_value_is_named_in_one_line(near: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        assistants.slem(near, toys.target(), **changes)
    assert "\n" not in str(error.value)


def test_what_the_assistant_lacks_is_spelled_with_its_longest_tokens() -> None:
    shared = SharedVocabulary.__new__(SharedVocabulary)
    shared.one, shared.bytes = {7: 9}, {5: b"abc", 6: b"abd"}
    shared.numbers = {b"a": 1, b"ab": 2, b"c": 3, b"b": 4, b"bc": 8}
    assert shared.follow([5, 7, 5]) == [2, 3, 9, 2, 3]
    assert shared.follow([6, 7, 8]) == [9], "what it cannot read it goes on without"
