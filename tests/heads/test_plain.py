"""A published head in plain transformers: model.generate writes what it writes without the head."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from heads.formats.custom_generate.generate import generate
from inference.target.target import Target
from tests import toys
from tests.heads.shipped import Known, drafting, published

NEW = 40
KINDS = [*toys.HEAD_CONFIGS, *toys.OPTIONS]
QUICK = {"eagle3.1", "mtp", "hydra", "llama", "gemma3"}  # one of each path through the code; the others are slow


def slow_beside(names: Iterable[str]) -> list[Any]:
    """Return the names, all that are not QUICK as slow ones."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def plainly(of: Target, ids: Tensor, **options: Any) -> Any:
    """Return what generate writes without a head."""
    model: Any = of.model
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **options})


def drafted(of: Target, ids: Tensor, **options: Any) -> Any:
    """Return what it writes with one, and how."""
    asked = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **options}
    return generate(of.model, inputs=ids, **{"head": "a head", **asked})


def prompt(seed: int = 1, length: int = 7) -> Tensor:
    return torch.tensor([toys.prompt(seed, length)])


@pytest.fixture
def text() -> list[int]:
    found: list[int] = plainly(toys.target(), prompt())[0].tolist()
    assert toys.lively(found[7:])
    return found


class Streamed(BaseStreamer):
    """Takes note of what is put."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("name", slow_beside(KINDS))
def test_every_kind_of_head_writes_the_same(name: str, tmp_path: Path, text: list[int]) -> None:
    target = toys.target()
    folder = published(tmp_path / "head", toys.head(name, target), target)
    found = drafted(target, prompt(), head=str(folder))
    assert found.sequences.tolist() == [text]
    assert 0 < found.passes < NEW
    again = drafted(target, prompt(), head=str(folder), draft_tokens=1, max_new_tokens=9)  # the head begins anew
    assert again.sequences.tolist() == [text[:16]]


@pytest.mark.parametrize("name", slow_beside(toys.ARCHITECTURES))
def test_every_architecture_writes_the_same(name: str, tmp_path: Path) -> None:
    target = toys.target(name)
    folder = published(tmp_path / "head", toys.head("eagle3", target), target)
    ids = plainly(target, prompt(2))
    assert torch.equal(drafted(target, prompt(2), head=str(folder)).sequences, ids)
    tokens = ids[0].tolist()
    known = Known(tokens, {12, 15, 16, 30})
    with pytest.MonkeyPatch.context() as patch:
        drafting(patch, target, known)
        found = drafted(target, prompt(2))
    assert torch.equal(found.sequences, ids)
    assert found.tokens_per_pass > 2


def test_the_drafts_that_stand_are_counted(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, toys.target(), Known(text, set()))
    found = drafted(toys.target(), prompt())
    assert found.sequences.tolist() == [text]
    assert (found.passes, found.tokens_per_pass) == (8, 39 / 8)  # 5 a pass, 4 in the last
    assert drafted(toys.target(), prompt(), draft_tokens=2).passes == 13
    drafting(monkeypatch, toys.target(), Known(text, set(range(len(text)))))
    found = drafted(toys.target(), prompt())
    assert (found.sequences.tolist(), found.tokens_per_pass) == ([text], 1.0)
    assert torch.equal(drafted(toys.target(), prompt(), return_dict_in_generate=False), torch.tensor([text]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_dtype_is_drafted_for(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = published(tmp_path / "head", toys.head("hydra", toys.target()), toys.target())
    other = toys.target("llama", dtype)
    found = drafted(other, prompt(), head=str(folder))
    assert torch.equal(found.sequences, plainly(other, prompt()))


def test_an_end_within_a_draft_ends_the_text(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, toys.target(), Known(text, {9}))
    for place in (7, 8, 12, 13, 14, 15):  # the first token, a replaced one, anywhere in a draft, the one behind
        ids = plainly(toys.target(), prompt(), eos_token_id=text[place], pad_token_id=0)
        found = drafted(toys.target(), prompt(), eos_token_id=text[place], pad_token_id=0)
        assert torch.equal(found.sequences, ids)
        assert ids.shape[1] <= place + 1


class After(StoppingCriteria):
    """Stops at a length; takes note of what it is asked about."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, list[list[int]]()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.asked.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_stopping_criteria_are_asked_at_every_token(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, toys.target(), Known(text, {20}))
    mine, theirs = After(26), After(26)
    found = drafted(toys.target(), prompt(), stopping_criteria=StoppingCriteriaList([mine]))
    ids = plainly(toys.target(), prompt(), stopping_criteria=StoppingCriteriaList([theirs]))
    assert torch.equal(found.sequences, ids)
    assert mine.asked == theirs.asked
    assert ids.shape[1] == 26


def test_a_stop_string_ends_the_text(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, toys.target(), Known(text, set()))
    letters = "abcdefghijklmnopqrstuvwxyz0123456789+-*/"  # a tokenizer that can spell what the criteria try
    spelling = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    spelling.decoder = decoders.Fuse()
    stop = "".join(letters[i] for i in text[19:21])
    asked = {"stop_strings": [stop], "tokenizer": PreTrainedTokenizerFast(tokenizer_object=spelling)}
    ids = plainly(toys.target(), prompt(), **asked)
    assert ids.shape[1] < len(text)
    assert torch.equal(drafted(toys.target(), prompt(), **asked).sequences, ids)
    config = GenerationConfig(stop_strings=asked.pop("stop_strings"), max_new_tokens=NEW)
    assert torch.equal(drafted(toys.target(), prompt(), **asked, generation_config=config).sequences, ids)
    assert config.stop_strings == [stop]


def test_a_streamer_gets_what_it_gets_without_a_head(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, toys.target(), Known(text, {11, 19}))
    mine, theirs = Streamed(), Streamed()
    drafted(toys.target(), prompt(), streamer=mine)
    plainly(toys.target(), prompt(), streamer=theirs)
    assert mine.parts == theirs.parts
    assert mine.ended == theirs.ended == 1


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_no_more_tokens_are_written_than_wanted(count: int, text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, toys.target(), Known(text, set()))
    found = drafted(toys.target(), prompt(), max_new_tokens=count)
    assert found.sequences.tolist() == [text[: 7 + count]]
    assert found.passes == {1: 0, 2: 1, 5: 1, 6: 1}[count]
    assert (found.tokens_per_pass is None) == (count == 1)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_drafts_end_where_the_context_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, length = toys.target(name), 150
    ids = plainly(target, prompt(3, length), max_new_tokens=160 - length)
    drafting(monkeypatch, target, Known(ids[0].tolist(), {155}), 6)
    found = drafted(target, prompt(3, length), max_new_tokens=160 - length)
    assert torch.equal(found.sequences, ids)
    if name == "gpt2":  # with a position for each of 160 tokens: one more would end in an error
        known = Known([*ids[0].tolist(), *range(20)], set())
        drafting(monkeypatch, target, known, 20)
        stop = StoppingCriteriaList([After(160)])
        assert torch.equal(drafted(target, prompt(3, length), max_new_tokens=30, stopping_criteria=stop).sequences, ids)


def test_a_batch_is_written_row_by_row(tmp_path: Path) -> None:
    target = toys.target()
    folder = published(tmp_path / "head", toys.head("eagle", target), target)
    ids = torch.tensor([[0, 0, *toys.prompt(4, 5)], toys.prompt(5, 7)])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    plain = plainly(target, ids, attention_mask=mask)
    asked = {"attention_mask": mask, "eos_token_id": int(plain[0, 20]), "pad_token_id": 1}
    plain = plainly(target, ids, **asked)
    assert (plain == 1).any()
    found = drafted(target, ids, head=str(folder), **asked)
    assert torch.equal(found.sequences, plain)
    penalised = {"attention_mask": mask, "repetition_penalty": 1.5}  # of the tokens behind each row's padding
    assert torch.equal(drafted(target, ids, head=str(folder), **penalised).sequences, plainly(target, ids, **penalised))
    torch.manual_seed(0)
    sampled = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 6}
    assert drafted(target, ids[1:], head=str(folder), **sampled).sequences.shape == (3, 13)


def test_scores_and_logits_are_those_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"output_scores": True, "output_logits": True, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2}
    one = plainly(toys.target(), prompt(), return_dict_in_generate=True, **asked)
    drafting(monkeypatch, toys.target(), Known(one.sequences[0].tolist(), {14, 22}))
    other = drafted(toys.target(), prompt(), **asked)
    assert torch.equal(one.sequences, other.sequences)
    for name in ("scores", "logits"):
        assert len(one[name]) == len(other[name]) == NEW
        torch.testing.assert_close(torch.cat(one[name]), torch.cat(other[name]), rtol=1e-4, atol=1e-4)


def test_a_seed_gives_the_same_draws(tmp_path: Path) -> None:
    target = toys.target()
    folder = published(tmp_path / "head", toys.head("mlp", target), target)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        asked = {"do_sample": True, "temperature": 0.8, "top_k": 10, "top_p": 0.9}
        found.append(drafted(target, prompt(), head=str(folder), **asked).sequences.tolist())
    assert found[0] == found[1] != found[2]
