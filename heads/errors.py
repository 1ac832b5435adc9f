"""What a user sees of an error: one line on stderr and exit status 2, and the traceback only when asked for."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from heads.redact import redact_logs, redacted

CHATTY = ("httpx", "httpx2")  # of huggingface_hub, which log every request with its URL


def one_line(error: BaseException) -> str:
    """Return the error's message as one line without secrets, its type where it has no message.

    What moves a terminal's cursor, as a name from outside may, is shown as a sign.
    """
    line = " ".join(str(error).split()) or type(error).__name__
    return redacted("".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in line))


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError or OSError of the block, or of the function it decorates, into one line and exit status 2.

    HEADSTART_DEBUG=1 in the environment lets the error through with its traceback. Log lines are without secrets, and
    without every request to the Hub, from here on.
    """
    redact_logs()
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("HEADSTART_DEBUG") == "1":
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None
