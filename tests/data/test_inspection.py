"""Samples to look at: whole characters."""

import re

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from data.run import pieces, show
from data.text.masks import Sample


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
    assert made == [("é", False), ("\ufffd", True)]
