"""Inspection of loss masks: tokens coloured by mask, in the terminal.

Not inspect.py: `python data/run.py` would then import this file instead of Python's own module.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.batches import fingerprint, pack
from data.text.masks import Sample
from heads.common.untrusted import visible
from inference.text_stream import TextStream


def pieces(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Return the shortest texts of whole characters, mostly a token each, and whether each is trained on."""
    done: list[tuple[str, bool]] = []
    stream = TextStream(tokenizer, special=True)
    for token, on in zip(sample.token, sample.mask, strict=True):
        if text := stream.push(token):
            done.append((text, bool(on)))
    rest = stream.rest()
    return [*done, (rest, bool(sample.mask[-1]))] if rest else done


def show(samples: Sequence[Sample], count: int, length: int, tokenizer: PreTrainedTokenizerBase, out: Console) -> None:
    """Print the first `count` samples with their trained tokens highlighted, and the coverage of each and of all."""
    for sample in samples[:count]:
        out.rule(Text(visible(f"{sample.id}: {coverage([sample])}")))
        brackets = not out.is_terminal
        text = Text()
        for on, run in groupby(pieces(sample, tokenizer), key=itemgetter(1)):
            string = visible("".join(text for text, _ in run))
            text.append(f"⟦{string}⟧" if on and brackets else string, style="bold green" if on else "dim")
        out.print(text)
    filled = sum(len(sample.token) for sample in samples) / pack(samples, length).token.numel()
    out.rule(f"{len(samples)} samples: {coverage(samples)}")
    out.print(f"rows of {length} tokens are {filled:.1%} full; fingerprint {fingerprint(samples)}")


def coverage(samples: Sequence[Sample]) -> str:
    """Describe how many tokens are trained on."""
    trained, tokens = sum(sum(sample.mask) for sample in samples), sum(len(sample.mask) for sample in samples)
    return f"{trained} of {tokens} tokens trained on ({trained / tokens:.1%})"
