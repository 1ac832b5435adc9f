"""Text for Markdown: untrusted names and values are shown literally, never as markup."""

import json
import re
from textwrap import indent
from typing import Any

MARKUP = re.compile(r"([\\`*_\[\]<>~&#!|])")


def escaped(text: str) -> str:
    """Return a text in one line, every sign of Markdown and HTML in it as itself."""
    return MARKUP.sub(r"\\\1", " ".join(text.split()))


def code(value: object) -> str:
    """Return a value as code, whatever backticks it holds."""
    text = " ".join(str(value).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def block(text: str, language: str = "") -> str:
    """Return lines as a block of code, whatever backticks they hold."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def quoted(text: str) -> str:
    """Return a text as Python writes it, in one line."""
    return json.dumps(text, ensure_ascii=False)


def bullets(values: dict[str, Any]) -> str:
    """Return a nested list of everything that is set."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines += [f"- {escaped(str(key))}:", *(indent(bullets(value), "  ").splitlines())]
        elif value not in (None, [], {}, ""):
            lines.append(f"- {escaped(str(key))}: {code(value)}")
    return "\n".join(lines)
