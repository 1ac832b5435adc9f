"""Samples to look at: whole characters, whose turn it is, and a page that needs nothing else."""

import html
import re
from pathlib import Path

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from data.inspection import pieces, roles, show, write_page
from data.text.masks import Sample
from tests.data.families import CHATS, FAMILIES, chat_record, family_tokenizer, masked

TOOLS_AS_USERS = ("qwen25", "qwen3")  # their templates give a tool's result as the user's words


def test_trained_tokens_stand_out_on_a_terminal(bare: PreTrainedTokenizerFast) -> None:
    console = Console(force_terminal=True, color_system="standard", record=True, width=80)
    show([Sample(name, bare("ab")["input_ids"], [0, 1]) for name in ("first", "second")], 1, 8, bare, console)
    shown = console.export_text(styles=True)
    assert "\x1b[2ma\x1b[0m\x1b[1;32mb\x1b[0m" in shown
    assert re.search(r"rows of \S*8\S* tokens are \S*50\.0\S*% full", shown)
    assert "first" in shown
    assert "second" not in shown


def test_a_samples_text_moves_no_cursor(bare: PreTrainedTokenizerFast) -> None:
    console = Console(force_terminal=True, record=True, width=80)
    token = bare("a\x1b[2Jb")["input_ids"]
    show([Sample("[/x]\x1b[2J\ud800", token, [1] * len(token))], 1, 8, bare, console)
    shown = console.export_text(styles=True)
    assert "\x1b[2J" not in shown
    assert "[/x]\ufffd[2J\ufffd: " in shown


def test_characters_of_several_tokens_stay_whole(bare: PreTrainedTokenizerFast) -> None:
    token = bare("é😀a")["input_ids"]
    assert len(token) == 7
    made = pieces(Sample("s", token[:-2], [0, 0, 1, 1, 1]), bare)
    assert [(piece.text, piece.token, piece.trained) for piece in made] == [
        ("é", token[:2], False),
        ("\ufffd", token[2:5], True),
    ]


@pytest.mark.parametrize(
    ("family", "chat"), [(family, chat) for family in FAMILIES for chat in FAMILIES[family]["chats"]]
)
def test_whose_turn_it_is(family: str, chat: str) -> None:
    tokenizer = family_tokenizer(family, False)
    sample = masked(chat_record(family, chat), tokenizer)[-1]
    found = [role for _, role in roles(sample, tokenizer) if role not in ("system", "developer")]
    told = [message["role"] for message in CHATS[chat]["messages"] if message["role"] != "system"]
    if family in TOOLS_AS_USERS:
        told = ["user" if role == "tool" else role for role in told]
    if family == "mistral" and chat == "tools":
        told = ["user", "tool", "user", "assistant"]  # untrained answers have no header in these
    assert found == told


def test_the_page_holds_every_token_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen3", False)
    samples = masked(chat_record("qwen3", "tools_and_reasoning"), tokenizer)
    path = tmp_path / "new" / "masks.html"
    write_page(samples * 2, 1, tokenizer, path)
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|href=|@import|url\(", page)
    assert "prefers-color-scheme:dark" in page
    assert 'name="viewport"' in page
    spans = re.findall(r'<span( class=on)? title="tokens? ([\d ]+), (not )?trained on">(.*?)</span>', page, re.DOTALL)
    assert "".join(html.unescape(span[3]) for span in spans) == tokenizer.decode(samples[0].token)
    assert [int(number) for span in spans for number in span[1].split()] == samples[0].token
    assert [bool(span[0]) for span in spans for _ in span[1].split()] == [bool(on) for on in samples[0].mask]
    assert all(bool(span[0]) != bool(span[2]) for span in spans)
    begun = re.findall(r"<b>(\w+)</b>\s*<span[^>]*>(.*?)</span>", page, re.DOTALL)
    assert {text for role, text in begun if role != "assistant"} == {"&lt;|im_start|&gt;"}
    assert page.count("<h2>") == 1
    on, tokens = sum(samples[0].mask), len(samples[0].mask)
    assert f"<p>{on} of {tokens} tokens trained on ({on / tokens:.1%})</p>" in page
    assert f"<h1>2 samples: {2 * on} of {2 * tokens} tokens trained on" in page
    assert [path.name for path in path.parent.iterdir()] == ["masks.html"]


def test_a_page_shows_markup_as_text(bare: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    token = bare("</span><script>alert(1)</script>")["input_ids"]
    write_page([Sample("<b>", token, [1] * len(token))], 1, bare, tmp_path / "masks.html")
    page = (tmp_path / "masks.html").read_text(encoding="utf-8")
    assert page.count("<script>") == 1
    assert "<h2>&lt;b&gt;</h2>" in page
