"""Inspection of loss masks: tokens coloured by mask, in the terminal and as one page of HTML.

Not inspect.py: `python data/run.py` would then import this file instead of Python's own module.
"""

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
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
TEMPLATE = Path(__file__).with_name("inspection.html.j2")


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
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"{len(samples)} samples: {coverage(samples)}",
        fingerprint=fingerprint(samples),
        sections=[_section(sample, tokenizer) for sample in samples[:count]],
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


def _section(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what the page shows of a sample: its pieces, each behind the roles whose turns begin in it."""
    trained, tokens = _counts([sample])
    labels, start, spans = roles(sample, tokenizer), 0, []
    for piece in pieces(sample, tokenizer):
        start += len(piece.text)
        begun = [labels.pop(0)[1] for at, _ in list(labels) if at < start]
        spans.append({"roles": begun, "piece": piece, "text": visible(piece.text)})
    counts = {"coverage": coverage([sample]), "trained": trained, "tokens": tokens}
    return {"id": visible(sample.id), "spans": spans, **counts}
