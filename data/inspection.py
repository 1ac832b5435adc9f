"""Inspection of loss masks: tokens coloured by mask, in the terminal and as one page of HTML.

Not inspect.py: `python data/run.py` would then import this file instead of Python's own module.
"""

import html
import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.batches import fingerprint, pack
from data.text.masks import Sample
from heads.common.files import write_whole
from heads.common.untrusted import visible
from inference.text_stream import TextStream

ROLE = re.compile(
    r"<[|\uff5c]?(?:im_start|start|start_of_turn|start_of_role|start_header_id)[|\uff5c]?>(\w+)"
    r"|<[|\uff5c](system|developer|user|assistant|chatbot|tool)[^<>]*>|\[(INST|TOOL_RESULTS)\]|(?<!\w)(USER|ASSISTANT):",
    re.IGNORECASE,
)
NAMES = {
    "inst": "user",
    "model": "assistant",
    "chatbot": "assistant",
    "functions": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "tool_results": "tool",
    "tools": "system",
}
STYLE = """
:root{color-scheme:light dark;--on:#b6e8c0;--ink:#1a1a1a;--dim:#666;--page:#fff;--line:#ddd}
@media(prefers-color-scheme:dark){:root{--on:#1d5b31;--ink:#eee;--dim:#a0a0a0;--page:#16181c;--line:#3a3d44}}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:1rem 1rem 4rem;color:var(--ink);
background:var(--page)}
h1{font-size:1.3rem}h1,h2,p{overflow-wrap:anywhere}
h2{font-size:1rem;margin:2rem 0 .3rem}p{margin:.3rem 0;color:var(--dim)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:.85rem/1.6 ui-monospace,monospace;color:var(--dim);
border:1px solid var(--line);border-radius:6px;padding:.7rem;margin:.4rem 0}
pre span:hover{outline:1px solid currentcolor}
.on{background:var(--on);color:var(--ink)}
b{font:600 .7rem system-ui,sans-serif;color:var(--page);background:var(--dim);border-radius:3px;padding:0 .3rem;
margin-right:.2rem}
meter{width:100%;height:.7rem}
output{position:fixed;left:0;right:0;bottom:0;padding:.5rem 1rem;background:var(--page);
border-top:1px solid var(--line)}
"""
SCRIPT = """
const output = document.querySelector('output');
for (const event of ['pointerover', 'click'])
  document.addEventListener(event, e => { if (e.target.title) output.textContent = e.target.title; });
"""


class Piece(NamedTuple):
    """The shortest text of whole characters: its tokens, mostly one, and whether it is trained on."""

    text: str
    token: list[int]
    trained: bool


def pieces(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """Return the sample's text, token by token."""
    done: list[Piece] = []
    stream, waiting = TextStream(tokenizer, special=True), list[int]()
    for token, on in zip(sample.token, sample.mask, strict=True):
        text = stream.push(token)
        waiting.append(token)
        if text:
            done.append(Piece(text, waiting, bool(on)))
            waiting = []
    return [*done, Piece(stream.rest(), waiting, bool(sample.mask[-1]))] if waiting else done


def show(samples: Sequence[Sample], count: int, length: int, tokenizer: PreTrainedTokenizerBase, out: Console) -> None:
    """Print the first `count` samples with their trained tokens highlighted, and the coverage of each and of all."""
    for sample in samples[:count]:
        out.rule(Text(visible(f"{sample.id}: {coverage([sample])}")))
        out.print(_coloured(sample, tokenizer, brackets=not out.is_terminal))
    filled = sum(len(sample.token) for sample in samples) / pack(samples, length).token.numel()
    out.rule(f"{len(samples)} samples: {coverage(samples)}")
    out.print(f"rows of {length} tokens are {filled:.1%} full; fingerprint {fingerprint(samples)}")


def write_page(samples: Sequence[Sample], count: int, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write the same as one page of HTML that needs no other file: hover over a token, or tap it, for its id."""
    title = f"{len(samples)} samples: {coverage(samples)}"
    body = "\n".join(_section(sample, tokenizer) for sample in samples[:count])
    page = (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>Loss masks</title>\n<style>{STYLE}</style>\n<h1>{title}</h1>\n"
        f'<p><span class="on">Coloured</span>: trained on. Fingerprint {fingerprint(samples)}</p>\n'
        f"{body}\n<output>hover over a token, or tap it</output>\n<script>{SCRIPT}</script>\n</html>\n"
    )
    write_whole(path, page.encode())


def coverage(samples: Sequence[Sample]) -> str:
    """Describe how many tokens are trained on."""
    trained, tokens = _counts(samples)
    return f"{trained} of {tokens} tokens trained on ({trained / tokens:.1%})"


def roles(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, str]]:
    """Return the start of each of the sample's turns, as a character of its text, and its role.

    Read off headers of known forms in the untrained text; an unknown form is shown as text alone.
    """
    turns: list[tuple[int, str]] = []
    start = 0
    for trained, run in groupby(pieces(sample, tokenizer), key=lambda piece: piece.trained):
        text = "".join(piece.text for piece in run)
        if trained:
            turns.append((start, "assistant"))
        else:
            words = [(header.start(), next(filter(None, header.groups())).lower()) for header in ROLE.finditer(text)]
            turns += [(start + offset, NAMES.get(word, word)) for offset, word in words]
        start += len(text)
    return [turn for before, turn in pairwise([(0, ""), *turns]) if turn[1] != before[1]]


def _counts(samples: Sequence[Sample]) -> tuple[int, int]:
    return sum(sum(sample.mask) for sample in samples), sum(len(sample.mask) for sample in samples)


def _coloured(sample: Sample, tokenizer: PreTrainedTokenizerBase, brackets: bool) -> Text:
    """Return the sample's text; `brackets` encloses the trained text in brackets, for output without colours."""
    text = Text()
    for on, run in groupby(pieces(sample, tokenizer), key=lambda piece: piece.trained):
        string = visible("".join(piece.text for piece in run))
        text.append(f"⟦{string}⟧" if on and brackets else string, style="bold green" if on else "dim")
    return text


def _section(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    trained, tokens = _counts([sample])
    labels, start, spans = roles(sample, tokenizer), 0, []
    for text, token, on in pieces(sample, tokenizer):
        start += len(text)
        while labels and labels[0][0] < start:
            spans.append(f"<b>{html.escape(labels.pop(0)[1])}</b>")
        title = (
            f"{'token' if len(token) == 1 else 'tokens'} {' '.join(map(str, token))}, {'' if on else 'not '}trained on"
        )
        spans.append(f'<span{" class=on" if on else ""} title="{title}">{html.escape(visible(text))}</span>')
    return (
        f"<h2>{html.escape(visible(sample.id))}</h2><p>{coverage([sample])}</p>"
        f'<meter value="{trained}" max="{tokens}"></meter>\n<pre>{"".join(spans)}</pre>'
    )
