import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.answers import AnswerSettings, Written, write_answers
from data.config import DataConfig
from data.prompts import Prompt, load_prompts, load_samples

Write = Callable[..., str]
LENGTH = 12


@pytest.fixture
def target(chat: PreTrainedTokenizerFast) -> Any:
    """Return a random toy target that ends some answers early and others late."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(chat),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.6,  # so lively that its answers differ
        )
    ).eval()
    ends = frozenset({chat.eos_token_id, *range(100, 130)})
    return SimpleNamespace(model=model, tokenizer=chat, eos=ends, context=64, device=torch.device("cpu"))


@pytest.fixture
def prompts(chat: PreTrainedTokenizerFast, write: Write) -> list[Prompt]:
    questions = ["why", "how is it", "when", "who was it", "where to", "is it", "so", "and now"]
    return load_prompts(write(*({"id": q, "prompt": q} for q in questions), name="prompts.jsonl"), chat, None)


def settings(temperature: float = 0.0, keep_unfinished: bool = True, seed: int = 0) -> AnswerSettings:
    return AnswerSettings(temperature, 0.9, LENGTH, keep_unfinished, seed)


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def greedy(target: Any, prompt: Prompt) -> tuple[str, bool]:
    """Decode one prompt step by step without a cache; return the answer and whether it ended."""
    token = list(prompt.token)
    for _ in range(LENGTH):
        token.append(int(target.model(torch.tensor([token])).logits[0, -1].argmax()))
        if token[-1] in target.eos:
            return str(target.tokenizer.decode(token[len(prompt.token) : -1], skip_special_tokens=True)), True
    return str(target.tokenizer.decode(token[len(prompt.token) :], skip_special_tokens=True)), False


def test_batched_greedy_answers_are_the_single_ones(target: Any, prompts: list[Prompt], tmp_path: Path) -> None:
    expected = [greedy(target, prompt) for prompt in prompts]
    assert len({answer for answer, _ in expected}) > 4
    assert {ended for _, ended in expected} == {True, False}
    written = write_answers(target, prompts, settings(), tmp_path / "all.jsonl", 3)
    assert written == Written(len(prompts), 0, 0)
    assert [line["answer"] for line in lines(tmp_path / "all.jsonl")] == [answer for answer, _ in expected]
    assert [(line["id"], line["prompt"]) for line in lines(tmp_path / "all.jsonl")] == [(p.id, p.text) for p in prompts]
    finished = [answer for answer, ended in expected if ended]
    written = write_answers(target, prompts, settings(keep_unfinished=False), tmp_path / "some.jsonl", 3)
    assert [line["answer"] for line in lines(tmp_path / "some.jsonl")] == finished
    assert written == Written(len(finished), len(prompts) - len(finished), 0)


def test_the_models_own_generation_settings_do_not_leak_in(target: Any, prompts: list[Prompt], tmp_path: Path) -> None:
    write_answers(target, prompts, settings(), tmp_path / "plain.jsonl", 4)
    own = GenerationConfig(repetition_penalty=50.0, top_k=1, max_length=3, no_repeat_ngram_size=1)
    target.model.generation_config = own
    write_answers(target, prompts, settings(), tmp_path / "own.jsonl", 4)
    assert lines(tmp_path / "own.jsonl") == lines(tmp_path / "plain.jsonl")
    assert target.model.generation_config is own


def test_a_second_call_goes_on_after_a_truncated_line(target: Any, prompts: list[Prompt], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    write_answers(target, prompts, settings(temperature=1.0), whole, 2)
    data = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    cut.write_bytes(data[: ends[3] + 9])
    assert write_answers(target, prompts, settings(temperature=1.0), cut, 2).answers == len(prompts) - 4
    assert cut.read_bytes() == data
    assert write_answers(target, prompts, settings(temperature=1.0), cut, 2).answers == 0
    assert cut.read_bytes() == data


def test_sampling_follows_its_seed_and_leaves_the_callers_alone(
    target: Any, prompts: list[Prompt], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_answers(target, prompts, settings(temperature=1.5, seed=seed), tmp_path / name, 4)
    assert torch.equal(torch.get_rng_state(), before)
    a, b, c = ((tmp_path / name).read_text() for name in "abc")
    assert a == b
    assert a != c


def test_what_was_written_is_trained_on_after_the_same_prompt(
    target: Any, write: Write, tmp_path: Path, config: Callable[..., DataConfig]
) -> None:
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why"}]
    prompts = load_prompts(write({"id": "a", "messages": told}), target.tokenizer, None)
    write_answers(target, prompts, settings(), tmp_path / "a.jsonl", 1)
    (sample,) = load_samples(config(str(tmp_path / "a.jsonl")), target.tokenizer)
    assert sample.token[: sample.mask.index(1)] == prompts[0].token


def test_a_target_without_template_writes_plain_text(
    target: Any, bare: PreTrainedTokenizerFast, write: Write, tmp_path: Path, config: Callable[..., DataConfig]
) -> None:
    target.tokenizer = bare
    (prompt,) = load_prompts(write({"text": "a tale of old"}), bare, None)
    write_answers(target, [prompt], settings(), tmp_path / "a.jsonl", 1)
    (line,) = lines(tmp_path / "a.jsonl")
    assert line["text"] == "a tale" + line["answer"]
    (sample,) = load_samples(config(str(tmp_path / "a.jsonl")), bare)
    assert all(sample.mask)


def test_prompts_that_leave_no_room_are_left_out(target: Any, prompts: list[Prompt], tmp_path: Path) -> None:
    long = Prompt("long", [5] * (target.context - LENGTH + 1), "", "…")
    assert write_answers(target, [long, *prompts], settings(), tmp_path / "a", 4) == Written(len(prompts), 0, 1)
    with pytest.raises(ValueError, match=r"no prompt leaves max_new_tokens=12 free .* 64 tokens; lower max_new_tokens"):
        write_answers(target, [long], settings(), tmp_path / "b", 4)


def test_no_end_token_and_foreign_files_are_refused(target: Any, prompts: list[Prompt], tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a story\n")
    with pytest.raises(ValueError, match="holds lines that are no answers"):
        write_answers(target, prompts, settings(), tmp_path / "a", 4)
    assert (tmp_path / "a").read_text() == "a story\n"
    target.eos = frozenset()
    with pytest.raises(ValueError, match="set keep_unfinished=true"):
        write_answers(target, prompts, settings(keep_unfinished=False), tmp_path / "b", 4)
    assert write_answers(target, prompts, settings(), tmp_path / "b", 4).answers == len(prompts)


@pytest.mark.parametrize(
    ("temperature", "top_p", "tokens"), [(-1.0, 1.0, 1), (1.0, 0.0, 1), (1.0, 1.1, 1), (1.0, 1.0, 0)]
)
def test_impossible_settings_are_refused(temperature: float, top_p: float, tokens: int) -> None:
    with pytest.raises(ValueError, match="must be at least 0"):
        AnswerSettings(temperature, top_p, tokens, False, 0)
