"""A generation printed while it is made, each token in the colour of who wrote it."""

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from heads.common.untrusted import visible
from inference.session import Generation
from inference.text_stream import TextStream

STYLES = {"draft": "green", "bonus": "magenta", "prefill": "magenta"}


class Painter:
    """Prints a generation while it is made: the callback of `speculate`."""

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase) -> None:
        self.console, self.stream = console, TextStream(tokenizer)

    def __call__(self, tokens: list[int], sources: list[str]) -> None:
        """Print new tokens; a character that several tokens make has the colour of its last one."""
        for token, source in zip(tokens, sources, strict=True):
            self.show(self.stream.push(token), STYLES[source])

    def close(self, generation: Generation) -> None:
        """Print what was held back, and the summary."""
        self.show(self.stream.rest(), STYLES["bonus"])
        self.console.print()
        self.console.print(Text(summary(generation), style="dim"), soft_wrap=True)

    def show(self, text: str, style: str) -> None:
        """Print a piece as it is: no wrapping, no markup, no control characters."""
        if text:
            self.console.out(visible(text), style=style, highlight=False, end="")


def summary(generation: Generation) -> str:
    """Return one line of numbers: τ and the speed of decoding, without the prefill and its token."""
    if not generation.steps:
        return f"{len(generation.tokens)} token from the prefill alone ({generation.finish})"
    rate = (len(generation.tokens) - 1) / generation.decode_s if generation.decode_s else 0.0
    return (
        f"τ {generation.tau:.2f}, {rate:.1f} tokens/s, {len(generation.tokens)} tokens in {len(generation.steps)} "
        f"target passes after the prefill ({generation.finish}); {STYLES['draft']}: drafted, {STYLES['bonus']}: the "
        "target's own"
    )
