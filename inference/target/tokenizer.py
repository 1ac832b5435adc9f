"""A target's tokenizer: text to tokens and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Encoding
from transformers import BatchEncoding, PreTrainedTokenizerBase

from heads.common.errors import one_line, panicked
from heads.common.untrusted import CUT


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str | list[str], **options: Any) -> BatchEncoding:
    """Tokenize one text or several.

    Raises:
        UnicodeEncodeError: one holds half a surrogate pair, which is no text; tokenizers call it a TypeError.
        ValueError: the tokenizer fails at it.
    """
    for one_text in [text] if isinstance(text, str) else text:
        one_text.encode()
    with _one_line(tokenizer):
        return tokenizer(text, verbose=False, **options)


def encode_one(text: str, tokenizer: PreTrainedTokenizerBase) -> Encoding:
    """Return a text's tokens with their characters, without the special tokens of a fast tokenizer's start and end.

    The tokenizer itself is called: transformers' call around it takes as long again.

    Raises:
        UnicodeEncodeError, ValueError: as `tokenize`.
    """
    text.encode()
    backend: Any = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    with _one_line(tokenizer):
        return backend.encode(text, add_special_tokens=False)


@contextmanager
def _one_line(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not panicked(error):
            raise
        name = tokenizer.name_or_path or "the tokenizer"
        raise ValueError(f"{name}: its tokenizer fails at a text ({one_line(error)}); download it again") from error


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of plain text, with the tokenizer's special tokens at the start.

    An end token that some tokenizers append (add_eos_token) is left out: a target writes nothing after it.

    Raises:
        UnicodeEncodeError, ValueError: see `tokenize`.
    """
    token = list(tokenize(tokenizer, text)["input_ids"])
    if token[:2] == [tokenizer.bos_token_id] * 2:  # the text starts with the token that the tokenizer adds
        token = token[1:]
    if token[-1:] != [tokenizer.eos_token_id]:
        return token
    without_special = list(tokenize(tokenizer, text, add_special_tokens=False)["input_ids"])
    before = token[:-1]
    appended = before[len(before) - len(without_special) :] == without_special  # otherwise the text has it
    return before if before and appended else token


BROKEN = (TemplateSyntaxError, SyntaxError)  # Python raises the latter for blocks that are nested too deeply
RAISED = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError,
    AssertionError, NameError,
)  # fmt: skip


class RenderError(ValueError):
    """A chat that its template does not render: it refuses it, or fails at it. The message is one line."""


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Turn the error of a chat template in the block into one line.

    Raises:
        RenderError: the template does not render this chat.
        ValueError: the template renders no chat, because its syntax is wrong.
    """
    name = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    try:
        yield
    except BROKEN as error:
        raise ValueError(f"{name} is broken: {_why(error)}; correct it") from error
    except RAISED as error:
        raise RenderError(f"{name} refuses it: {_why(error)}") from error


def _why(error: Exception) -> str:
    kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "  # raised by a template's raise_exception
    return kind + one_line(error)[:CUT] if str(error) else type(error).__name__


UNFINISHED = "\ufffd"


def decode(tokenizer: PreTrainedTokenizerBase, token: list[int]) -> str:
    """Return the text of tokens as it is, without special tokens."""
    return str(tokenizer.decode(token, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """Decodes one token at a time and never shows part of a character.

    A token's text depends on those before it: the tokens since the last but one piece of text are decoded again.
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
        """Return the text that has not been shown."""
        before = decode(self.tokenizer, self.tokens[self.begin : self.shown])
        return decode(self.tokenizer, self.tokens[self.begin :])[len(before) :]
