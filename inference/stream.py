"""Tokens to text as they come, in the colour of who wrote them."""

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from heads.outside import visible
from inference.decode import Generation

STYLES = {"draft": "green", "bonus": "magenta", "prefill": "magenta"}
UNFINISHED = "\ufffd"


class TextStream:
    """Decodes one token at a time and never shows part of a character.

    A token is decoded together with those before it, because what it reads depends on them; only the tokens since the
    last but one piece of text are decoded again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.begin = self.shown = 0  # tokens[begin:shown] is the last piece shown, the context of the next

    def push(self, token: int) -> str:
        """Return the text that the token completes, empty while a character lacks bytes."""
        self.tokens.append(token)
        piece = self.rest()
        if not piece or piece.endswith(UNFINISHED):
            return ""
        self.begin, self.shown = self.shown, len(self.tokens)
        return piece

    def rest(self) -> str:
        """Return the text that is held back."""
        return self.decode(self.begin, len(self.tokens))[len(self.decode(self.begin, self.shown)) :]

    def decode(self, begin: int, end: int) -> str:
        """Return the text of a range of tokens, without special tokens."""
        text = self.tokenizer.decode(
            self.tokens[begin:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


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
