"""Chat templates: transformers renders them in jinja2's sandbox; whatever one raises becomes one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from heads.common.errors import one_line
from heads.common.untrusted import CUT

BROKEN = (TemplateSyntaxError, SyntaxError)  # the latter from Python, whose own limits nested blocks meet
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
    kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "  # what raise_exception raises
    return kind + one_line(error)[:CUT] if str(error) else type(error).__name__
