"""Errors as users see them: one line on stderr and exit status 2, and the traceback only on request."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from heads.common.redact import redact_logs, redacted
from heads.common.untrusted import visible

# Loggers of huggingface_hub's clients, which log every request with its URL; and of libraries that read untrusted files
# and repeat in lines of their own what our one line says.
CHATTY = {
    "httpx": logging.WARNING, "httpx2": logging.WARNING, "transformers": logging.ERROR, "datasets": logging.CRITICAL,
}  # fmt: skip


def one_line(error: BaseException) -> str:
    """Return the error's message as one printable line without secrets, its type where it has no message."""
    return redacted(visible(" ".join(str(error).split()) or type(error).__name__))


def panicked(error: BaseException) -> bool:
    """Return whether an error comes from a library in Rust, such as tokenizers: a panic, or a mere Exception."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


class TerminatedError(KeyboardInterrupt):
    """A SIGTERM, which ends a command as Ctrl-C does: whatever keeps its work at one does at the other."""


def terminate(number: int, _: object) -> None:
    """Raise `TerminatedError`, as the handler of SIGTERM; a launcher may forward the signal again, which is ignored."""
    signal.signal(number, signal.SIG_IGN)
    raise TerminatedError


@contextmanager
def keeping(describe: Callable[[], str]) -> Iterator[None]:
    """Have the line of a command that Ctrl-C or SIGTERM stops in the block say what is kept; an inner block goes first.

    `describe` is called once the block has ended.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.args = stop.args or (describe(),)
        raise


def is_reporting_rank() -> bool:
    """Whether this process is the first of those that a launcher has started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn an error that a user can fix, raised in the block or the decorated function, into one line and status 2.

    That is a ValueError, an OSError, and a panic of a library in Rust, which untrusted files cause. Ctrl-C is one line
    too, and status 130; so is SIGTERM, status 143.

    HEADSTART_DEBUG=1 in the environment lets the error through with its traceback. Log lines are without secrets, and
    without every request to the Hub, from here on.
    """
    redact_logs()
    for name, level in CHATTY.items():
        logging.getLogger(name).setLevel(level)
    logging.getLogger("huggingface_hub").propagate = False  # it prints its lines itself
    try:
        yield
    except BaseException as error:
        if os.environ.get("HEADSTART_DEBUG") == "1":
            raise
        if isinstance(error, KeyboardInterrupt):
            number = signal.SIGTERM if isinstance(error, TerminatedError) else signal.SIGINT
            if is_reporting_rank():
                name = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
                print("; ".join([f"stopped by {name}", *error.args]), file=sys.stderr)
            raise SystemExit(128 + number) from None
        if not (isinstance(error, ValueError | OSError) or panicked(error)):
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None
