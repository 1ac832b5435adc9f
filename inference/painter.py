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

    def close(self, made: Generation) -> None:
        """Print what was held back, and the summary."""
        self.show(self.stream.rest(), STYLES["bonus"])
        self.console.print()
        self.console.print(Text(summary(made), style="dim"), soft_wrap=True)

    def show(self, text: str, style: str) -> None:
        """Print a piece as it is: no wrapping, no markup, no control characters."""
        if text:
            self.console.out(visible(text), style=style, highlight=False, end="")


def summary(made: Generation) -> str:
    """Return one line of numbers: τ and the speed of decoding, without the prefill and its token."""
    if not made.steps:
        return f"{len(made.tokens)} token from the prefill alone ({made.finish})"
    rate = (len(made.tokens) - 1) / made.decode_s if made.decode_s else 0.0
    return (
        f"τ {made.tau:.2f}, {rate:.1f} tokens/s, {len(made.tokens)} tokens in {len(made.steps)} target passes after "
        f"the prefill ({made.finish}); {STYLES['draft']}: drafted, {STYLES['bonus']}: the target's own"
    )
