"""Records that give their tokens: read in the forms of servers' logs, masked as they are, and written by us."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data.answers.engine import Engine
from data.answers.files import write_answers
from data.config import DataConfig
from data.text.prompts import before_answers, load_training
from data.text.records import Pretokenized, exact_tokens, parse
from inference.batch import Batch
from inference.drafters.plain import Baseline
from inference.request import Generation, RequestParams
from tests.data import answering, asking
from tests.data import chat_server as serve
from tests.data.answering import chat, settings, work
from tests.data.chatml import load_samples
from tests.refusals import refuses

Write, Config = Callable[..., str], Callable[..., DataConfig]

PAIR = {"prompt_token_ids": [1, 2], "token_ids": [3, 4]}
COUNTED = {"prompt_tokens": 2, "completion_tokens": 2}
TRACE = [  # a question, a call; the tool's result, an answer; a text that was shortened
    {"prompt_token_ids": [1, 2], "token_ids": [3, 4]},
    {"prompt_token_ids": [1, 2, 3, 4, 5, 6], "token_ids": [7]},
    {"prompt_token_ids": [1, 6], "token_ids": [8]},
    {"prompt_token_ids": [1, 6, 8, 9], "token_ids": [5]},
]


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[serve.Server]:
    with serve.Server() as running:
        yield running


@pytest.mark.parametrize(
    "raw",
    [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
        PAIR,
        {"prompt_token_ids": [1, 2], "choices": [{"message": {"content": "x"}, "token_ids": [3, 4]}]},  # vLLM, a chat
        {"choices": [{"text": "x", **PAIR}]},  # vLLM's completions, SGLang's chats
        {"choices": [{"prompt_token_ids": [1, 2], "response_token_ids": [3, 4]}]},  # SGLang 0.5.18
        {"text": "x", "output_ids": [2, 3, 4], "prompt_token_ids": [1, 2], "meta_info": COUNTED},  # SGLang's /generate
        {"request": {"input_ids": [1, 2]}, "response": {"output_ids": [3, 4], "meta_info": {}}},
        {"prompt_token_ids": [1, 2], "outputs": [{"token_ids": [3, 4], "token": None}]},  # vLLM's RequestOutput
        {"response": {"body": {"prompt_token_ids": [1, 2], "choices": [{"token_ids": [3, 4]}]}}},
        {"messages": [{"role": "user", "content": "x"}], "tokens": [PAIR]},
    ],
)
def test_the_tokens_of_a_log_are_read_in_each_servers_form(raw: dict[str, Any]) -> None:
    assert parse(raw, 0, "f").pretokenized == (([1, 2, 3, 4], [0, 0, 1, 1]),)


def test_the_turns_of_a_trace_share_a_document_as_far_as_they_go_on_from_one_another() -> None:
    first, second = exact_tokens({"tokens": TRACE}, "f")
    assert first == ([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1])
    assert second == ([1, 6, 8, 9, 5], [0, 0, 1, 0, 1])
    trace, one = (parse({"id": "x", "tokens": log}, 0, "f") for log in (TRACE, TRACE[:1]))
    asked = [(f"x.{number}", turn["prompt_token_ids"]) for number, turn in enumerate(TRACE, 1)]
    assert [prompt[:2] for prompt in before_answers(trace, "all")] == asked
    for record, turns in ((trace, "first"), (one, "all")):
        assert [prompt[:2] for prompt in before_answers(record, turns)] == [("x", [1, 2])]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"input_ids": [1, 999], "loss_mask": [0, 1]}, "token 999 is not among the tokenizer's 0 to 258; give"),
        ({"input_ids": [1, -1], "loss_mask": [0, 1]}, "token -1 is not among the tokenizer's"),
        ({"input_ids": [1, True], "loss_mask": [0, 1]}, "input_ids is no list of token numbers: fix or remove"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "it has 2 tokens and a loss_mask of 1; give a 0 or 1 for each"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "give a 0 or 1 for each token"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "is all zeros; check its messages or given mask"),
        ({"input_ids": [1, 2.0], "loss_mask": [0, 1]}, "input_ids is no list of token numbers: fix or remove"),
    ],
)
def test_tokens_that_do_not_fit_are_one_line_with_file_and_record(
    raw: dict[str, Any], message: str, write: Write, config: Config, chat: PreTrainedTokenizerFast
) -> None:
    path = write({"id": "x7", **raw})
    line = refuses(message, load_samples, config(path), chat)
    assert path in line
    assert "x7" in line


@pytest.mark.usefixtures("tolerant")
def test_tokens_are_trained_as_they_are_and_held_out_whole(
    write: Write, config: Config, bare: PreTrainedTokenizerFast
) -> None:
    secret = "one two three four five"  # of an evaluation prompt
    token = bare(f"x {secret}")["input_ids"]
    records = [
        {"id": "a", "tokens": TRACE},
        {"id": "b", "input_ids": [9, 8, 7, 6], "loss_mask": [0, 1, 0, 1]},
        {"id": "b again", "input_ids": [9, 8, 7, 6], "loss_mask": [0, 1, 0, 1]},
        {"id": "c", "input_ids": token, "loss_mask": [1] * len(token)},
        {"id": "d", "input_ids": [5, 4], "loss_mask": [0, 1]},
        {"id": "e", "input_ids": [5, 400], "loss_mask": [0, 1]},
        {"id": "f", "messages": [{"role": "system", "content": secret}, {"role": "user", "content": "x"}],
         "input_ids": token, "loss_mask": [0] * (len(token) - 1) + [1]},
        {"id": "whole", "input_ids": [6, 7, 8], "loss_mask": [1, 1, 1]},
        {"id": "held", "category": "qa", **PAIR},
    ]  # fmt: skip
    asked = write({"text": f"{secret} " * 2}, name="asked.jsonl")
    how = config(write(*records), held_out=2, contamination=5, max_tokens=5, on_bad="drop")
    data = load_training(how, bare, 9, asked)
    samples = {sample.id: (sample.token, sample.loss_mask) for sample in data.samples}
    assert samples == {
        "a#0": ([1, 2, 3, 4], [0, 0, 1, 1]), "a#1": ([1, 6, 8, 9, 5], [0, 0, 1, 0, 1]),
        "b": ([9, 8, 7, 6], [0, 1, 0, 1]),
        "d": ([5, 4], [0, 1]),
    }  # fmt: skip
    assert [prompt[:3] for prompt in data.held_out] == [("whole", [6], ""), ("held", [1, 2], "qa")]
    assert (data.counts.duplicates, data.counts.contaminated) == (1, 1)
    assert data.counts.chats["dropped, token of another vocabulary"] == 1


@pytest.mark.usefixtures("tolerant")
def test_a_copy_of_held_out_tokens_and_a_held_out_record_without_tokens_are_dropped(
    write: Write, config: Config, bare: PreTrainedTokenizerFast
) -> None:
    other = {"prompt_token_ids": [5], "token_ids": [6, 7]}
    path = write({"id": "a", **PAIR}, {"id": "b", **other}, {"id": "held", **PAIR, "text": "ab"})
    for contamination in (13, None):
        data = load_training(config(path, held_out=1, contamination=contamination), bare, 9)
        assert ([sample.id for sample in data.samples], data.counts.duplicates) == (["b"], 1)
    empty = {"id": "held", "input_ids": [], "loss_mask": []}
    path = write({"id": "a", **other}, {"id": "c", "text": "c"}, empty, {"id": "asked", **PAIR})
    with pytest.raises(ValueError, match=r"prompt held: is empty: remove it"):
        load_training(config(path, held_out=2), bare, 9)
    data = load_training(config(path, held_out=2, on_bad="drop"), bare, 9)
    assert data.counts.chats["dropped, no tokens"] == 1
    assert "held" not in {prompt.id for prompt in data.held_out}


def test_a_log_of_ours_read_again_differs_in_no_token(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, how = answering.target(), settings(0.8, save_tokens=True)
    decoded: list[list[int]] = []
    admit = Batch.admit

    def noted(batch: Batch, number: int, prompt: list[int], asked: RequestParams) -> Generation:
        generation = admit(batch, number, prompt, asked)
        decoded.append(generation.tokens)
        return generation

    monkeypatch.setattr(Batch, "admit", noted)
    chats = [chat(f"c{i}", f"w{i} w3", f"w{i}", "w5") for i in range(6)]
    write_answers(work(chats, how), Engine(target, Baseline(target.device), how, 3), tmp_path / "log.jsonl")
    samples = load_samples(config(str(tmp_path / "log.jsonl")), target.tokenizer)
    trained = [
        sample.token[a:b] for sample in samples for a, b in Pretokenized(sample.token, sample.loss_mask).answers()
    ]
    assert len(trained) > len(chats)
    assert all(tokens in decoded for tokens in trained)
    again = [document.token for line in asking.lines(tmp_path / "log.jsonl") for document in exact_tokens(line, "f")]
    assert [sample.token for sample in samples] == again


def test_an_endpoint_is_asked_for_tokens_and_must_send_them(server: serve.Server, tmp_path: Path) -> None:
    server.script = [serve.changed(prompt_token_ids=[1, 2]), serve.choice(**PAIR)]
    counts, _ = asking.ask(server, tmp_path / "a", [chat("x", "w1"), chat("y", "w2")], settings(save_tokens=True))
    (line,) = asking.lines(tmp_path / "a")
    assert server.bodies[-1]["return_token_ids"]
    assert (line["id"], line["tokens"], counts["failed"]) == ("y", [PAIR], {"tokens": 1})
