"""The command on a toy target, with and without a head, one prompt and a chat; what it streams; and its refusals."""

import io
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from heads.common.resolvers import register_resolvers
from heads.common.typed import typed
from heads.formats.store import save_head
from inference import api
from inference.decode import Generation, RequestParams, Step, autoregress
from inference.protocol import Drafter
from inference.run import STYLES, GenerateConfig, answer, chat_ids, generate, summary
from inference.target.target import Target
from inference.target.tokenizer import TextStream
from inference.verification.sample import GREEDY, Sampling
from tests import toys
from tests.refusals import refuses

ROOT = Path(__file__).parents[2]
PROMPT = "w1 w2 w3 w4 w5"
TREE = {"kind": "dynamic", "depth": 4, "top_k": 3, "nodes": 9, "paths": [], "widths": []}
TEMPLATE = "{% for message in messages %}w{{ loop.index }} {{ message['content'] }} {% endfor %}w39"


def config(*overrides: str) -> GenerateConfig:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return typed(GenerateConfig, compose("generate", ["max_new_tokens=12", *overrides]))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    words = toys.tokenizer()
    words.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    loaded = toys.target("llama")
    monkeypatch.setattr(loaded, "tokenizer", words)
    monkeypatch.setattr(Target, "load", lambda *_, **__: loaded)
    return loaded


@pytest.fixture
def trained(target: Target, tmp_path: Path) -> Path:
    save_head(tmp_path / "run" / "head", toys.head("eagle", target), target.spec, TREE)
    return tmp_path / "run"


def shown(config: GenerateConfig) -> str:
    file = io.StringIO()
    generate(config, Console(file=file, force_terminal=True, color_system="standard", width=300))
    return file.getvalue()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def expected(target: Target, ids: list[int]) -> str:
    return str(target.tokenizer.decode(autoregress(target, ids, config().request()).tokens))


def test_a_prompt_without_a_run_is_plain_decoding(target: Target) -> None:
    text = shown(config(f"prompt='{PROMPT}'"))
    assert plain(text).startswith(expected(target, [1, 2, 3, 4, 5]) + "\n")
    assert "\x1b[32m" not in text
    assert "τ 1.00, " in text


def test_the_command_on_the_embedded_target_quantised() -> None:
    words = ["model.quantize=int8", "model.dtype=float32", "model.device=cpu", "prompt='def main():'"]
    assert "12 tokens in 11 target passes" in plain(shown(config(*words)))


def test_three_lines_of_python_give_the_commands_text(target: Target, trained: Path) -> None:
    model, drafter = api.load(str(trained), "tree=chain", "tree.depth=2")
    assert (model, drafter.name) == (target, "head")
    pieces: list[tuple[str, str]] = []
    text, generation = api.generate(model, drafter, PROMPT, config().request(), lambda *piece: pieces.append(piece))
    assert text == expected(target, [1, 2, 3, 4, 5]) == "".join(piece for piece, _ in pieces)
    assert {source for _, source in pieces} == set(generation.origins)
    assert api.generate(*api.load(), [1, 2, 3, 4, 5], config().request())[0] == text


def test_a_request_is_decoded_as_the_command_says() -> None:
    sampled = ["temperature=0.5", "top_k=5", "top_p=0.8", "min_p=0.1", "repetition_penalty=1.2"]
    made = config(*sampled, "rule=typical", "lossy=true", "seed=4", "min_new_tokens=3", "stop=[a]")
    sampling = Sampling(0.5, 5, 0.8, 0.1, 1.2)
    asked = RequestParams(12, sampling, ("a",), 4, rule="typical", lossy=True, min_new_tokens=3)
    assert made.request() == asked
    assert made.params(0.5, logit_gaps=True, stop=["a"]) == replace(asked, logit_gaps=True)


def test_a_chat_reads_lines_and_remembers(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(sys, "stdin", io.StringIO("w7 w8\n\nw9\n"))
    lines = plain(shown(config("chat=true"))).splitlines()
    first = expected(target, chat_ids([{"role": "user", "content": "w7 w8"}], target.tokenizer))
    said = (("user", "w7 w8"), ("assistant", first), ("user", "w9"))
    history = [{"role": role, "content": content} for role, content in said]
    assert [lines[0], lines[2]] == [first, expected(target, chat_ids(history, target.tokenizer))]
    assert len(lines) == 4
    assert chat_ids(history[:1], target.tokenizer) == [1, 7, 8, 39]


def test_one_prompt_as_a_chat_and_a_prompt_from_a_pipe(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.tokenizer.chat_template = TEMPLATE
    assert plain(shown(config("chat=true", "prompt='w7 w8'"))).startswith(expected(target, [1, 7, 8, 39]))
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert plain(shown(config())).startswith(expected(target, [1, 2, 3, 4, 5]))


def test_stop_strings_and_least_tokens(target: Target, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = expected(target, [1, 2, 3, 4, 5]).split()
    for source in ([], [f"run={trained}"]):
        text = plain(shown(config(f"prompt='{PROMPT}'", f"stop=['{words[4]} {words[5]}']", *source)))
        assert text.startswith(" ".join(words[:6]) + "\n")
        assert "(stop)" in text
    monkeypatch.setattr(target, "eos", frozenset({int(words[3][1:])}))
    assert "4 tokens" in plain(shown(config(f"prompt='{PROMPT}'")))
    assert "(eos)" in plain(shown(config(f"prompt='{PROMPT}'")))
    assert "12 tokens" in plain(shown(config(f"prompt='{PROMPT}'", "min_new_tokens=12")))


class Terminal(io.StringIO):
    """A person's keyboard."""

    def isatty(self) -> bool:
        return True


def test_refusals_are_one_line(target: Target, trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases = [
        (["chat=true", "prompt=w1"], "has no chat template"),
        ([f"prompt='{'w1 ' * 200}'"], "has 200 tokens but llama reads at most 160"),
        (["prompt=''"], "the prompt is empty"),
        (["prompt=w1", "min_new_tokens=13"], "min_new_tokens is 13: give 0 to max_new_tokens, which is 12"),
        (["prompt=w1", "stop=[w3,'']"], "give a tuple of strings, none of them empty"),
        ([f"run={trained}", "prompt=w1", "tree.nodes=160"], "a tree of 161 nodes is larger than the context"),
        ([f"run={tmp_path}/nowhere", "prompt=w1"], "no such folder"),
        (["max_new_tokens=0", "prompt=w1"], "max_new_tokens is 0"),
        (["temperature=-1", "prompt=w1"], "temperature is -1"),
        (["model.placement=fsdp", "prompt=w1"], "which is not so in decoding"),
        ([f"run={trained}", "prompt=w1", "tree.kind=bush"], "bush"),
        ([], "prompt is missing"),
    ]
    monkeypatch.setattr(sys, "stdin", Terminal())
    for overrides, words in cases:
        refuses(words, lambda *given: shown(config(*given)), *overrides)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tre=chain", "tre is not a known key: do you mean tree?"),
        ("tree=chian", "tree=chian is not there: do you mean chain?"),
    ],
)
def test_a_misspelt_override_in_python_is_a_value_error_that_says_what_is_meant(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        api.load("outputs/none", word)


GREEN, MAGENTA, DIM = "\x1b[32m", "\x1b[35m", "\x1b[2m"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes, so that every character beyond ASCII takes several tokens."""
    alphabet = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bare = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|end|>")


def metaspace() -> PreTrainedTokenizerFast:
    """Return a tokenizer that drops the space before a text's first word, as SentencePiece models do."""
    bare = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "three": 2}, unk_token="three"))
    bare.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=bare)


def stream(text: str) -> list[str]:
    made = TextStream(tokenizer())
    return [*(made.push(token) for token in tokenizer()(text).input_ids), made.rest()]


@pytest.mark.parametrize("text", ["plain", "naïve — 日本語", "👩‍👩‍👧 of 🏳️‍🌈", "  two  spaces\n\ttab ", "ends amid 🦆"])
def test_every_piece_is_whole_and_all_of_them_are_the_text(text: str) -> None:
    pieces = stream(text)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) == len(text)


def test_a_cut_character_is_shown_at_the_end_or_with_the_next_one_alone() -> None:
    made, ids = TextStream(tokenizer()), tokenizer()("a🦆b").input_ids
    assert [made.push(token) for token in ids[:-2]] == ["a", "", "", ""]
    assert made.rest() == "\ufffd"
    made = TextStream(tokenizer())
    assert [made.push(token) for token in (ids[2], ids[-1], ids[-1])] == ["", "\ufffdb", "b"]


def test_any_tokens_give_what_decoding_them_at_once_gives() -> None:
    ids = [random.Random(3).randrange(256) for _ in range(400)]
    made = TextStream(tokenizer())
    whole = "".join([*(made.push(token) for token in ids), made.rest()])
    assert whole == tokenizer().decode(ids)


def test_the_space_between_pieces_stays_and_special_tokens_go() -> None:
    made = TextStream(metaspace())
    assert [made.push(token) for token in (0, 1, 2, 1)] == ["one", " two", "three", " two"]
    marked = TextStream(tokenizer())
    end = tokenizer().eos_token_id
    assert [marked.push(token) for token in [*tokenizer()("ab").input_ids, end]] == ["a", "b", ""]
    assert marked.rest() == ""


def paint(calls: list[tuple[list[int], list[str]]], *, terminal: bool = True) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, color_system="standard" if terminal else None, width=12)
    made = Generation([1] * 7, [], [Step(4, 2, 3, 0.1, 0.1, 0.1)] * 2, [], 0.5, 1.5, "length")

    def speculate(*given: Any) -> Generation:
        for tokens, sources in calls:
            given[-1](tokens, sources)
        return made

    with patch("inference.api.speculate", speculate):
        answer(Mock(spec=Target, tokenizer=tokenizer()), Mock(spec=Drafter), [1], RequestParams(7, GREEDY), console)
    return file.getvalue()


def test_colours_are_the_writers() -> None:
    assert STYLES == {"draft": "green", "bonus": "magenta", "prefill": "magenta"}
    ids = tokenizer()("abcd").input_ids
    shown = paint([(ids[:1], ["prefill"]), (ids[1:], ["draft", "draft", "bonus"])])
    assert shown.startswith(
        f"{MAGENTA}a\x1b[0m{GREEN}b\x1b[0m{GREEN}c\x1b[0m{MAGENTA}d\x1b[0m\n{DIM}τ 3.00, 4.0 tokens/s"
    )

    ids = tokenizer()("é").input_ids  # a character of two writers has the last one's
    assert f"{GREEN}é\x1b[0m" in paint([([ids[0]], ["bonus"]), ([ids[1]], ["draft"])])


def test_text_is_not_wrapped_marked_up_or_obeyed() -> None:
    text = "a line that is longer than [bold]twelve[/bold]\nx"
    shown = paint([(tokenizer()(text).input_ids, ["draft"] * len(text))], terminal=False)
    assert shown.startswith(text + "\n")
    ids = tokenizer()("\x1b[31m\x07").input_ids
    shown = paint([(ids, ["draft"] * len(ids))], terminal=False)
    assert shown.startswith("\ufffd[31m\ufffd\n")

    assert summary(Generation([1], ["prefill"], [], [], 0.1, 0.0, "eos")) == "1 token from the prefill alone (eos)"
