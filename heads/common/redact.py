"""Removal of secrets from written and printed text: command lines, configurations, errors and log lines.

A secret is known by its shape (tokens of the Hub, of OpenAI, GitHub, AWS and wandb, `Bearer …`, a password in a URL),
by the name that it is given under (`HF_TOKEN=…`, `api_key=…`), or by being a value of such a name in the environment.
"""

import logging
import os
import re
from collections.abc import Iterable
from typing import Any

from heads.common.untrusted import visible

HIDDEN = "[redacted]"
SHAPES = re.compile(
    r"\bhf_(?:jwt|oauth)_[\w.-]{20,}|\bhf_[A-Za-z0-9]{20,}|\bsk-[\w-]{16,}|\bgh[oprsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bwandb_v\d+_\w{16,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,}"
    r"|(?i:(?<=\bbearer )|(?<=\bbearer%20))[\w.~+/=-]{8,}|(?<=://)[^\s/@]+(?=@)"
    r"|(?<=[?&]Signature=)[^&\s\"']+|(?<=[?&]Policy=)[^&\s\"']+|(?<=[?&]sig=)[^&\s\"']+"
    r"|(?<=X-Amz-Signature=)[^&\s\"']+|(?<=X-Amz-Credential=)[^&\s\"']+|(?<=X-Amz-Security-Token=)[^&\s\"']+"
)
# Words in a tokenizer are tokens too: `eos_token=…` is no secret, nor is a number.
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
SHORTEST = 8  # characters; shorter secrets of the environment are not searched for in text


def redacted(text: str) -> str:
    """Return the text with `HIDDEN` instead of every secret."""
    for name, value in list(os.environ.items()):
        if len(value) >= SHORTEST and value in text and SECRET_NAME.fullmatch(name):
            text = text.replace(value, HIDDEN)
    text = GIVEN.sub(lambda match: match["name"] + HIDDEN, text)
    return SHAPES.sub(HIDDEN, text)


def redacted_words(words: Iterable[str]) -> list[str]:
    """Redact the words of a command line; of `NAME=VALUE` with a secret's name the whole value is hidden."""
    shown = []
    for word in words:
        name, _, value = word.partition("=")
        if SECRET_NAME.fullmatch(name) and value and not re.fullmatch(NUMBER, value, re.IGNORECASE):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redacted(ITEM.sub(lambda match: match["name"] + HIDDEN, word)))
    return shown


def redacted_values(values: Any) -> Any:
    """Redact a configuration: every string in it, and every value whose key is a secret's name."""
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
    """Redact every log line of this process and make it `visible`, whoever logs it; idempotent."""
    logging.setLogRecordFactory(_record)


def _record(*args: Any, **named: Any) -> logging.LogRecord:
    record = logging.LogRecord(*args, **named)
    try:
        message = record.getMessage()
    except (TypeError, ValueError):  # logging itself reports arguments that do not fit the format
        return record
    if (shown := visible(redacted(message))) != message:
        record.msg, record.args = shown, ()
    return record
