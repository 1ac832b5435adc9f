import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.run import main, show
from data.text.masks import Sample
from tests.data.answering import words
from tests.data.chat_server import Server

Call = Callable[..., None]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Return a function that runs the command with overrides."""

    def run(*overrides: str) -> None:
        monkeypatch.setattr(sys, "argv", ["run.py", *overrides])
        GlobalHydra.instance().clear()
        main()

    return run


@pytest.fixture
def model(chat: PreTrainedTokenizerFast, tmp_path: Path) -> str:
    """Return the folder of a random toy target."""
    torch.manual_seed(0)
    shape: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(chat), max_position_embeddings=256, initializer_range=0.6, **shape)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    chat.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_answers_are_written_and_then_shown(
    call: Call, model: str, write: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(*({"id": f"q{i}", "question": f"what is {i}", "answer": "x"} for i in range(6)))
    out = tmp_path / "new" / "answers.jsonl"
    of_model = [f"model.path={model}", "model.dtype=float32", "model.device=cpu", "data.prompts=", "data.held_out=1"]
    answers = [f"answers={out}", "keep_unfinished=true", "max_new_tokens=5", "batch_size=2", "limit=3"]
    call(*of_model, f"data.path={path}", *answers)
    assert [json.loads(line)["id"] for line in out.read_text(encoding="utf-8").split("\n")[:-1]] == ["q0", "q1", "q2"]
    assert f"{out}: 3 answers in 3 of 3 chats; train on them with data.path={out}" in capsys.readouterr().out
    noted = json.loads(Path(f"{out}.meta.json").read_text(encoding="utf-8"))
    assert [noted[key] for key in ("by", "run", "drafter", "batch_size")] == ["engine", None, {"plain": {}}, 2]
    call(*of_model, f"data.path={path}", "inspect=2", "limit=4")
    shown = capsys.readouterr().out
    assert "assistant\n⟦x<|im_end|>⟧" in shown
    assert "q1: 2 of" in shown
    assert "q2: " not in shown
    assert "4 samples: 8 of" in shown
    assert "records by shape: 4 question and answer; 1 held out" in shown


def test_an_endpoint_answers_instead_of_the_target(
    call: Call,
    write: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    words().save_pretrained(tmp_path / "tokenizer")
    path, out = write(*({"id": f"q{i}", "question": f"w{i}"} for i in range(3))), tmp_path / "a.jsonl"
    with Server() as server:
        call(
            f"model.path={tmp_path / 'tokenizer'}", "model.device=cpu", f"data.path={path}", "data.held_out=0",
            f"answers={out}", f"by={server.url}", "endpoint.api_key_env=MY_KEY", "max_new_tokens=8",
        )  # fmt: skip
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["q0", "q1", "q2"]
    assert "secret" not in (tmp_path / "a.jsonl.meta.json").read_text()
    assert f"{out}: 3 answers in 3 of 3 chats" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "nothing to do: give answers=FILE.jsonl, or inspect=N"),
        (["answers=a.jsonl.gz"], "answers=a.jsonl.gz: is JSON Lines; give a name that ends in .jsonl"),
        (["answers=a.jsonl", "by=ftp://x"], "by=ftp://x: give a URL such as http://localhost:8000"),
        (["answers=a.jsonl", "data.path=/nowhere/chats.jsonl"], "/nowhere/chats.jsonl: neither a file here nor"),
        (["answers=/dev/null/a.jsonl"], "answers=/dev/null: cannot be written"),
        (["answers=a.jsonl", "drafter=head", "run=/nowhere/run"], "/nowhere/run: no such folder"),
        (["answers=a.jsonl", "model.device=cuda:99"], "model.device is cuda:99, and torch sees"),
        (["features=engine"], "features=engine feeds a training: give features=stored"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(
    call: Call, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        call(*overrides)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_trained_tokens_stand_out_and_a_samples_text_moves_no_cursor(bare: PreTrainedTokenizerFast) -> None:
    console = Console(force_terminal=True, color_system="standard", record=True, width=80)
    show([Sample(name, bare("ab")["input_ids"], [0, 1]) for name in ("first", "second")], 1, 8, bare, console)
    shown = console.export_text(styles=True)
    assert "\x1b[2ma\x1b[0m\x1b[1;32mb\x1b[0m" in shown
    assert re.search(r"rows of \S*8\S* tokens are \S*50\.0\S*% full", shown)
    assert "first" in shown
    assert "second" not in shown
    token = bare("é\x1b[2Jb")["input_ids"]
    plain = Console(record=True, width=80)
    show([Sample("[/x]\x1b[2J\ud800", token, [0, 0, *[1] * (len(token) - 2)])], 1, 8, bare, plain)
    shown = plain.export_text()
    assert "é⟦\ufffd[2Jb⟧" in shown, "a character of several tokens stays whole"
    assert "[/x]\ufffd[2J\ufffd: " in shown
