"""Errors as users see them: one line on stderr and exit status 2; and removal of secrets from all shown text."""

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heads.common.untrusted import visible

# A secret is recognised by its shape (tokens of the Hub, of OpenAI, GitHub, AWS and wandb, `Bearer …`, a password in a
# URL), by its name (`HF_TOKEN=…`), or because an environment variable with such a name has that value.
HIDDEN = "[redacted]"
ERROR_FILE = "HEADSTART_ERROR_FILE"  # environment variable: a file that also receives the line of a command's error
SHAPES = re.compile(
    r"\bhf_(?:jwt|oauth)_[\w.-]{20,}|\bhf_[A-Za-z0-9]{20,}|\bsk-[\w-]{16,}|\bgh[oprsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bwandb_v\d+_\w{16,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,}"
    r"|(?i:(?<=\bbearer )|(?<=\bbearer%20))[\w.~+/=-]{8,}|(?<=://)[^\s/@]+(?=@)"
    r"|(?<=[?&]Signature=)[^&\s\"']+|(?<=[?&]Policy=)[^&\s\"']+|(?<=[?&]sig=)[^&\s\"']+"
    r"|(?<=X-Amz-Signature=)[^&\s\"']+|(?<=X-Amz-Credential=)[^&\s\"']+|(?<=X-Amz-Security-Token=)[^&\s\"']+"
)
# In a tokenizer's settings `token` is a token: `eos_token=…` is not a secret, and a number is not one either.
PLAIN = r"(?:eos|bos|pad|unk|mask|sep|cls|image|special|stop|per|draft|drafted|next|first|last|new)_token"
NAME = (
    r"(?:[\w.+-]*(?:token|api[_-]?key|wandb[_.-]?key|secret|passw(?:or)?d|credentials?|access[_-]?key|private[_-]?key))"
)
SECRET_NAME = re.compile(rf"(?!(?:[\w.+-]*[_.])?{PLAIN}$){NAME}", re.IGNORECASE)
NUMBER = r"(?:null|none|[\d.]+)(?![\w.-])"
VALUE = rf"""(?!{NUMBER})(?P<value>"[^"]+"|'[^']+'|[^\s'"&,;)}}]+)"""
GIVEN = re.compile(rf"(?<![\w.+-])(?![\w.+-]*{PLAIN}=)(?P<name>{NAME}=){VALUE}", re.IGNORECASE)
ITEM = re.compile(  # an item of a mapping in an override
    rf"""(?P<name>(?<=[{{,])\s*["']?(?!(?:[\w.+-]*[_.])?{PLAIN}["']?\s*:){NAME}["']?\s*:\s*){VALUE}""", re.IGNORECASE
)
SHORTEST = 8  # characters; shorter environment values are not searched for in text
# Loggers of huggingface_hub's clients, which log every request with its URL, and of libraries that read untrusted files
# and log errors that our one line already reports.
CHATTY = {
    "httpx": logging.WARNING, "httpx2": logging.WARNING, "transformers": logging.ERROR, "datasets": logging.CRITICAL,
}  # fmt: skip


def redacted(text: str) -> str:
    """Return the text with `HIDDEN` instead of every secret."""
    for name, value in list(os.environ.items()):
        if len(value) >= SHORTEST and value in text and SECRET_NAME.fullmatch(name):
            text = text.replace(value, HIDDEN)
    text = GIVEN.sub(rf"\g<name>{HIDDEN}", text)
    return SHAPES.sub(HIDDEN, text)


def redacted_words(words: Iterable[str]) -> list[str]:
    """Redact the words of a command line; in `NAME=VALUE` with a secret's name the whole value is hidden."""
    shown = []
    for word in words:
        name, _, value = word.partition("=")
        if SECRET_NAME.fullmatch(name) and value and not re.fullmatch(NUMBER, value, re.IGNORECASE):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redacted(ITEM.sub(rf"\g<name>{HIDDEN}", word)))
    return shown


def redacted_values(values: Any) -> Any:
    """Redact every string of a configuration, and every value whose key is a secret's name."""
    if isinstance(values, dict):
        return {
            redacted(key) if isinstance(key, str) else key: HIDDEN
            if isinstance(value, str) and value and SECRET_NAME.fullmatch(str(key))
            else redacted_values(value)
            for key, value in values.items()
        }
    if isinstance(values, list | tuple):
        return [redacted_values(value) for value in values]
    return redacted(values) if isinstance(values, str) else values


def redact_logs() -> None:
    """Redact every log line of this process and escape control characters (`visible`); idempotent."""

    def record_of(*args: Any, **named: Any) -> logging.LogRecord:
        record = logging.LogRecord(*args, **named)
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # logging itself reports arguments that do not fit the format
            return record
        if (shown := visible(redacted(message))) != message:
            record.msg, record.args = shown, ()
        return record

    logging.setLogRecordFactory(record_of)


def one_line(error: BaseException) -> str:
    """Return the error's message as one printable line without secrets, its type where it has no message."""
    return redacted(visible(" ".join(str(error).split()) or type(error).__name__))


def panicked(error: BaseException) -> bool:
    """Return whether an error comes from a Rust library such as tokenizers: a panic, or a bare Exception."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


class TerminatedError(KeyboardInterrupt):
    """A SIGTERM; it ends a command as Ctrl-C does, so the same handlers save its work."""


def terminate(number: int, _: object) -> None:
    """Raise `TerminatedError`, as the handler of SIGTERM; a repeated signal from a launcher is ignored."""
    signal.signal(number, signal.SIG_IGN)
    raise TerminatedError


@contextmanager
def report_on_interrupt(describe: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C or SIGTERM in the block, add what is saved to the command's line; an inner block comes first.

    `describe` is called after the block.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.args = stop.args or (describe(),)
        raise


def is_reporting_rank() -> bool:
    """Return whether this is the main process: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn an error that a user can fix, raised in the block or the decorated function, into one line and status 2.

    User errors are a ValueError, an OSError, and a panic of a Rust library, which untrusted files cause. Ctrl-C is one
    line with status 130, SIGTERM one with status 143.

    HEADSTART_DEBUG=1 in the environment lets the error through with its traceback. From here on log lines have no
    secrets, and requests to the Hub are not logged.
    """
    redact_logs()
    for name, level in CHATTY.items():
        logging.getLogger(name).setLevel(level)
    logging.getLogger("huggingface_hub").propagate = False  # its handler would print the lines a second time
    try:
        yield
    except BaseException as error:
        if os.environ.get("HEADSTART_DEBUG") == "1":
            raise
        if isinstance(error, KeyboardInterrupt):
            terminated = isinstance(error, TerminatedError)
            if is_reporting_rank():
                stop = f"stopped by {'SIGTERM' if terminated else 'Ctrl-C'}"
                print("; ".join([stop, *error.args]), file=sys.stderr)
            raise SystemExit(128 + (signal.SIGTERM if terminated else signal.SIGINT)) from None
        if not (isinstance(error, ValueError | OSError) or panicked(error)):
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        if file := os.environ.get(ERROR_FILE):
            Path(file).write_text(one_line(error), encoding="utf-8")
        raise SystemExit(2) from None
