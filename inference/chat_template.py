"""Chat templates, which are programs from outside: they end, and whatever they raise is one line.

transformers renders them in jinja2's sandbox, which keeps them from files and from Python, but not from work without
end. Here they are compiled for that sandbox with a clock in it: each round of a loop, each macro and each item of a
filter looks at it, so it needs no thread and no signal. What one step may make is bounded: a sum, a product or a power,
a text of texts, one with a width or with parts replaced.
"""

import importlib
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from time import thread_time
from typing import Any

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from heads.common.errors import one_line
from heads.common.untrusted import CUT

SECONDS = 10.0  # of a processor that one rendering may take: thousands of times what the longest chats do
LARGEST = 1 << 20  # elements of a product, or bits of a number
WIDEST = 1 << 24  # characters of a text that one step makes
MULTIPLYING = ("replace", "translate", "wordwrap", "join", "indent")  # a text by another, or by items
ITEMS = 100_000  # of what does not say how many it has: as many as the sandbox's longest range
WIDENING = ("center", "indent", "batch", "slice", "tojson", "ljust", "rjust", "zfill", "expandtabs")  # by a number
# In a format's text: widths that are large, or given beside it.
WIDTHS = {
    "format": re.compile(r"%[^%a-zA-Z]*([0-9]{6}|\*)"),  # the filter, and the operator %
    "str.format": re.compile(r"\{[^{}]*:[^{}]*([0-9]{6}|\{)"),
}
ROUNDS = 8  # between two looks at the clock, which cost as much as a round
BROKEN = (TemplateSyntaxError, SyntaxError)  # the latter from Python, whose own limits nested blocks meet
RAISED = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError,
    AssertionError, NameError,
)  # fmt: skip

utils: Any = importlib.import_module("transformers.utils.chat_template_utils")
compile_as_it_is: Callable[[str], Template] = utils._compile_jinja_template


class RenderError(ValueError):
    """A chat that its template does not render: it refuses it, or fails at it. The message is one line."""


class EndlessError(Exception):
    """A template that has had its time."""


class Clock(threading.local):
    """When the rendering at hand must have ended, by the time of its thread, and the rounds since the last look."""

    end = math.inf
    rounds = 0

    def tick(self) -> None:
        """Count a round."""
        self.rounds += 1
        if self.rounds % ROUNDS == 0 and thread_time() > self.end:
            raise EndlessError


CLOCK = Clock()


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Bound the rendering of a chat in the block, and turn what its template raises into one line.

    Raises:
        RenderError: the template does not render this chat.
        ValueError: it renders none, or does not end.
    """
    name = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    CLOCK.end = thread_time() + SECONDS
    try:
        yield
    except EndlessError:
        raise ValueError(f"{name} does not end: stopped after {SECONDS:g} s of one chat; correct it") from None
    except BROKEN as error:
        raise ValueError(f"{name} is broken: {_why(error)}; correct it") from error
    except RAISED as error:
        raise RenderError(f"{name} refuses it: {_why(error)}") from error
    finally:
        CLOCK.end = math.inf


def _why(error: Exception) -> str:
    kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "  # what raise_exception raises
    return kind + one_line(error)[:CUT] if str(error) else type(error).__name__


def _join(generator: CodeGenerator, node: nodes.Concat, frame: Frame) -> None:
    """Write the call of `Timed.joined` for the operator ~, which no sandbox intercepts."""
    generator.write("environment.joined(")
    for operand in node.nodes:
        generator.visit(operand, frame)
        generator.write(", ")
    generator.write(")")


Joining = type("Joining", (CodeGenerator,), {"visit_Concat": _join})


class Timed(ImmutableSandboxedEnvironment):
    """The sandbox with the clock in it."""

    code_generator_class = Joining
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def from_string(self, source: Any, *args: Any, **named: Any) -> Template:
        """Compile a template whose loops and macros look at the clock."""
        tree = self.parse(source)
        tick = nodes.EnvironmentAttribute("tick", lineno=1)
        repeated: Any = tree.find_all((nodes.For, nodes.Macro))
        for node in repeated:
            node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:  # the body does not see what that leaves out
                node.test = nodes.And(tick, node.test, lineno=node.lineno)
        tree.set_environment(self)
        return super().from_string(tree, *args, **named)

    @property
    def tick(self) -> bool:
        """A look at the clock, as an expression that is true."""
        CLOCK.tick()
        return True

    @staticmethod
    def concat(texts: Iterable[str]) -> str:
        """Join what a template, a macro or a block gives."""
        pieces, size = [], 0
        for piece in texts:
            size += len(piece)
            if size > WIDEST:
                raise SecurityError("a text of it is too large")
            pieces.append(piece)
        return "".join(pieces)

    def joined(self, *texts: object) -> str:
        """Return the texts of some values in one, as the operator ~ does."""
        return self.concat(map(str, texts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise to a power, where that is no bomb."""
        if operator == "%":
            _check_width("format", left, right)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            if len(left) + len(right) > WIDEST:
                raise SecurityError("the result of + is too large")
        elif operator != "+" and _size(operator, left, right) > LARGEST:
            raise SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what the sandbox puts in the place of str.format, where that is no bomb."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_width("str.format", value.__self__.replace("{{", "").replace("}}", ""))
        return wrapped

    def call(self, context: Context, called: Any, /, *args: Any, **named: Any) -> Any:
        """Call a function or a method, where a text's is no bomb."""
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str):
            _check_width(called.__name__, owner, *args, **named)
        return super().call(context, called, *args, **named)


def _check_width(name: str, text: Any = None, /, *given: Any, **named: Any) -> None:
    """Check that what makes a text of a text makes none that is too large."""
    every = (*given, *named.values())
    size, numbers = 0, [value for value in every if isinstance(value, int)]
    if name in WIDENING:
        lines = str(text).count("\n") + str(text).count("\t") if isinstance(text, str) else 0
        size = max(numbers, default=0) * (1 + lines)
    if name == "replace" and not named and len(given) > 1 and all(isinstance(one, str) for one in (text, *given[:2])):
        size = _replaced(text, *given)
    elif name in MULTIPLYING:
        size = max(size, _length(text) * max(map(_length, every), default=0))
    if name == "sum" and any(isinstance(value, list | tuple) for value in every):
        raise SecurityError("a sum of lists may be too large")
    if size > WIDEST or (name in WIDTHS and isinstance(text, str) and WIDTHS[name].search(text)):
        raise SecurityError(f"the result of {name} is too large")


def _replaced(text: str, old: str, new: str, most: Any = None, *_: Any) -> int:
    """Return the characters of a text in which `old` is replaced, `most` times or, if that is no count, everywhere."""
    times = text.count(old)  # of an empty one, once more than there are characters
    if isinstance(most, int) and most >= 0:
        times = min(times, most)
    return len(text) + times * max(0, len(new) - len(old))


def _length(value: Any) -> int:
    """Return the characters or items of a value, the characters of a mapping's longest text; 1 of what has neither."""
    if isinstance(value, dict):
        return max(map(_length, value.values()), default=0)
    return len(value) if hasattr(value, "__len__") else ITEMS if isinstance(value, Iterator) else 1


def _size(operator: str, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    held, times = (left, right) if isinstance(right, int) else (right, left)
    return len(held) * times if isinstance(times, int) and hasattr(held, "__len__") else 0


def _timed(name: str, applied: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that looks at the clock with each item that it yields."""

    @wraps(applied)  # by whose attributes jinja2 knows what to hand it
    def call(*args: Any, **named: Any) -> Any:
        values = [value for value in args if not isinstance(value, Environment | EvalContext | Context)]
        _check_width(name, *values, **named)
        result = applied(*args, **named)
        return _items(result) if isinstance(result, Iterator) else result

    return call


def _items(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        CLOCK.tick()
        yield item


@lru_cache
def compile_timed(template: str) -> Template:
    """Return what transformers compiles of a template, in an environment with the same in it, and the clock."""
    if len(template) > LARGEST:
        raise TemplateSyntaxError(f"it has {len(template)} characters", 1)
    original = compile_as_it_is("").environment
    timed = Timed(
        trim_blocks=original.trim_blocks,
        lstrip_blocks=original.lstrip_blocks,
        extensions=[type(extension) for extension in original.extensions.values()],
    )
    # lipsum is a loop of Python's own.
    timed.globals = {name: value for name, value in original.globals.items() if name != "lipsum"}
    timed.filters = {name: _timed(name, applied) for name, applied in original.filters.items()}
    return timed.from_string(template)


utils._compile_jinja_template = compile_timed  # transformers has no other place for an environment of one's own
