"""The engine: ends of answers inside an accepted path, bookkeeping, the context's edge, bad prompts."""

from typing import Any

import pytest
import torch

from inference.batch import Batch
from inference.decode import Settings, autoregress, speculate
from inference.drafters.plain import Plain
from inference.protocol import Commit, Context, Drafter, DrafterState, Proposal
from inference.session import Session
from inference.verification.sample import GREEDY, Sampling
from inference.verification.tree import DraftTree
from tests import toys
from tests.tokenizers import trained


class Oracle(Drafter, DrafterState):
    """Drafts exactly what the target will write, `depth` tokens at a time, beside one wrong sibling, or behind it."""

    name, tree = "oracle", "oracle"

    def __init__(self, text: list[int], depth: int, wrong_first: bool = False) -> None:
        self.text, self.depth, self.wrong_first = text, depth, wrong_first

    def start(self, prompt: list[int]) -> "Oracle":
        self.prompt = len(prompt)
        return self

    def propose(self, context: Context) -> Proposal:
        made = len(context.token) - self.prompt
        ahead = self.text[made : made + min(self.depth, context.room)]
        token = [context.token[-1], *ahead]
        parent = list(range(-1, len(ahead)))
        if ahead:
            wrong = (ahead[0] + 1) % toys.VOCAB
            token, parent = [*token, wrong], [*parent, 0]
            if self.wrong_first:
                token, parent = [token[0], wrong, *ahead], [-1, 0, 0, *range(2, len(ahead) + 1)]
        return Proposal(DraftTree(torch.tensor(token), torch.tensor(parent)))


def plain(count: int = 24) -> list[int]:
    return autoregress(toys.target(), toys.prompt(0), Settings(count, GREEDY)).tokens


def test_oracle_commits_depth_plus_one_a_pass() -> None:
    text = plain()
    made = speculate(toys.target(), Oracle(text, 3), toys.prompt(0), Settings(24, GREEDY))
    assert made.tokens == text
    assert [step.accepted for step in made.steps] == [3, 3, 3, 3, 3, 2]
    assert sum(step.committed for step in made.steps) == 23
    assert made.tau == 23 / 6
    assert made.sources[:6] == ["prefill", "draft", "draft", "draft", "bonus", "draft"]
    assert made.finish == "length"
    assert autoregress(toys.target(), toys.prompt(0), Settings(24, GREEDY)).tau == 1.0


def test_a_step_says_which_of_their_siblings_were_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    text, target = plain(), toys.target()
    end = next(i for i in range(6, 20) if text.index(text[i]) == i and i % 4 != 0)
    monkeypatch.setattr(target, "eos", frozenset({text[end]}))
    made = speculate(target, Oracle(text, 3, wrong_first=True), toys.prompt(0), Settings(24, GREEDY))
    assert [len(step.ranks) for step in made.steps] == [step.accepted for step in made.steps]
    assert made.steps[0].ranks == (1, 0, 0)
    assert made.steps[-1].ranks == (1, 0, 0)[: (end - 1) % 4 + 1]  # no further than what was committed


def test_eos_inside_an_accepted_path_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    text, target = plain(), toys.target()
    end = next(i for i in range(6, 20) if text.index(text[i]) == i and i % 4 != 0)
    monkeypatch.setattr(target, "eos", frozenset({text[end]}))
    made = speculate(target, Oracle(text, 3), toys.prompt(0), Settings(24, GREEDY))
    alone = autoregress(target, toys.prompt(0), Settings(24, GREEDY))
    assert made.tokens == alone.tokens == text[: end + 1]
    assert made.finish == alone.finish == "eos"
    assert sum(step.committed for step in made.steps) == end


@pytest.mark.parametrize("lacking", [0, 1])
def test_no_answer_ends_before_min_new_tokens_as_in_transformers(lacking: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that comes after k tokens ends the answer at a minimum of k, and has no probability at one of k + 1."""
    text, target, prompt = plain(), toys.target(), toys.prompt(0)
    end = next(i for i in range(6, 20) if text.index(text[i]) == i and i % 4 != 0)
    generate: Any = target.model.generate
    least = {"min_new_tokens": end + lacking, "eos_token_id": text[end], "pad_token_id": text[end]}
    token = torch.tensor([prompt])
    made = generate(token, attention_mask=torch.ones_like(token), max_new_tokens=24, do_sample=False, **least)
    expected = made[0, len(prompt) :].tolist()
    assert (expected == text[: end + 1]) is (lacking == 0)
    settings = Settings(24, GREEDY, min_new_tokens=end + lacking)
    monkeypatch.setattr(target, "eos", frozenset({text[end]}))
    assert autoregress(target, prompt, settings).tokens == expected
    assert speculate(target, Oracle(expected, 3), prompt, settings).tokens == expected


class Recorder(Oracle):
    """Keeps what every pass has committed."""

    feature_layers = (0, 2)

    def start(self, prompt: list[int]) -> "Recorder":
        super().start(prompt)
        self.commits: list[Commit] = []
        return self

    def update(self, commit: Commit) -> None:
        self.commits.append(commit)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_committed_rows_are_those_of_one_pass_over_the_text(batch_size: int) -> None:
    """What a head reads of a token, also of one whose wrong sibling was drafted before it, is what the target gives."""
    target, text = toys.target(), plain()
    sources = [Recorder(text, 3, wrong_first=True) for _ in range(batch_size)]
    batch = Batch(target, sources)
    with torch.inference_mode():
        for number in range(batch_size):
            batch.admit(number, toys.prompt(0), Settings(24, GREEDY))
        while not batch.running[0].session.generation.finish:
            batch.step()
    for source in sources:
        token = torch.cat([torch.tensor(toys.prompt(0)[:1]), *(commit.token for commit in source.commits)])
        assert token.tolist() == (toys.prompt(0) + text)[: len(token)]
        assert len(token) > len(toys.prompt(0)) + 12
        alone = target.features(token[None, :-1], torch.zeros_like(token)[None, :-1], Recorder.feature_layers)
        for part in ("hidden", "last_hidden"):
            rows = torch.cat([getattr(commit.features, part) for commit in source.commits], 1)
            torch.testing.assert_close(rows, getattr(alone, part), rtol=1e-4, atol=1e-4)


def test_the_penalised_greedy_text_is_transformers() -> None:
    target, prompt = toys.target(), toys.prompt(0)
    settings = Settings(24, Sampling(0.0, 0, 1.0, 0.0, 1.5))
    made = autoregress(target, prompt, settings)
    generate: Any = target.model.generate
    token = torch.tensor([prompt])
    expected = generate(
        token, attention_mask=torch.ones_like(token), max_new_tokens=24, do_sample=False, repetition_penalty=1.5
    )
    assert made.tokens == expected[0, len(prompt) :].tolist()
    assert made.tokens != plain()
    drafted = speculate(target, Oracle(made.tokens, 3), prompt, settings)
    assert drafted.tokens == made.tokens
    assert sum(step.accepted for step in drafted.steps) == 17  # the penalty of each node is that of its own prefix


def test_stop_string_over_several_tokens() -> None:
    text = plain()
    stop = f"w{text[9]} w{text[10]}"
    settings = Settings(24, GREEDY, stop=(stop,))
    made = speculate(toys.target(), Oracle(text, 4), toys.prompt(0), settings)
    assert made.finish == "stop"
    assert made.tokens == autoregress(toys.target(), toys.prompt(0), settings).tokens
    assert toys.target().tokenizer.decode(made.tokens).endswith(stop)


def test_a_stop_string_whose_characters_take_several_tokens_each(monkeypatch: pytest.MonkeyPatch) -> None:
    target, stop = toys.target(), "ぁ人間終😀ぁ"
    monkeypatch.setattr(target, "tokenizer", trained("bytes"))
    session = Session(target, Plain(target.device), [1, 2], Settings(90, GREEDY, stop=("z", stop)))
    tokens = target.tokenizer(stop, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(stop) + 8
    session.emit([*tokens, 3], ["bonus"] * (len(tokens) + 1), [])
    assert session.generation.finish == "stop"
    assert session.generation.tokens == tokens


def test_the_context_is_filled_and_not_passed() -> None:
    target = toys.target()
    prompt = toys.prompt(0, target.context - 9)
    text = autoregress(target, prompt, Settings(100, GREEDY)).tokens
    made = speculate(target, Oracle(text, 5), prompt, Settings(100, GREEDY))
    assert len(prompt) + len(text) == target.context
    assert made.tokens == text


@pytest.mark.parametrize("wrong_first", [False, True])
def test_gaps_are_the_targets_own(wrong_first: bool) -> None:
    settings = Settings(24, GREEDY, gaps=True)
    made = speculate(toys.target(), Oracle(plain(), 3, wrong_first), toys.prompt(0), settings)
    alone = autoregress(toys.target(), toys.prompt(0), settings)
    assert len(made.gaps) == len(made.tokens)
    assert made.gaps == pytest.approx(alone.gaps, abs=1e-3)


@pytest.mark.parametrize("stop", ["END", ("END", "")])
def test_stop_strings_that_end_an_answer_at_once_are_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match="give a tuple of strings, none of them empty"):
        Settings(4, GREEDY, stop=stop)


@pytest.mark.parametrize("prompts", [torch.tensor([[1, 2]]), [(1, 2)], "w1 w2", ["w1"], [[1], 2], [1.5]])
def test_prompts_that_are_no_lists_of_tokens_are_named(prompts: Any) -> None:
    target = toys.target()
    with pytest.raises(ValueError, match=r"^prompts is a \w+: give a list of token ids, or a list of such lists"):
        speculate(target, Plain(target.device), prompts, Settings(4, GREEDY))
