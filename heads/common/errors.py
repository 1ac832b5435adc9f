"""Errors as users see them: one line on stderr and exit status 2, and the traceback only on request."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
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
    """Say whether an error comes from a library in Rust, such as tokenizers: a panic, or a mere Exception."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn an error that a user can fix, raised in the block or the decorated function, into one line and status 2.

    That is a ValueError, an OSError, and a panic of a library in Rust, which untrusted files cause. Ctrl-C is one line
    too, and status 130.

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
            if os.environ.get("RANK", "0") == "0":
                print("stopped by Ctrl-C", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None
        if not (isinstance(error, ValueError | OSError) or panicked(error)):
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None
