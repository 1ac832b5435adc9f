"""Text for the bundled target: the Python sources that every machine with headstart installed already has.

Two kinds of documents come out of the standard library and the installed packages: whole modules, and the chat form
`{"prompt": signature and docstring, "answer": body}` of every documented function. A module whose path hashes to
0 modulo HOLD_OUT is never trained on; held-out prompts come from those modules alone, and only where the same body
does not stand in a trained module too (vendored copies are common).
"""

import ast
import hashlib
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HOLD_OUT = 40
MAX_MODULE_BYTES = 120_000
MAX_DOCSTRING = 320
SKIP = {"site-packages", "dist-packages", "lib2to3", "idlelib", "turtledemo", "__pycache__"}


class Function(NamedTuple):
    """One documented function: where it stands, what the user says and what the assistant answers."""

    source: str
    prompt: str
    answer: str


def modules() -> Iterator[tuple[str, str]]:
    """Yield (path relative to its root, text) of every readable module, in a fixed order."""
    paths = sysconfig.get_paths()
    for root in (Path(paths["stdlib"]), Path(paths["purelib"])):
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if SKIP & set(relative.parts) or path.stat().st_size > MAX_MODULE_BYTES:
                continue
            try:
                yield str(relative), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def held_out(source: str) -> bool:
    """Whether this module is kept away from training; depends on its path alone, so machines agree."""
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % HOLD_OUT == 0


def functions(source: str, text: str) -> Iterator[Function]:
    """Yield the documented functions of one module in chat form; a module that does not parse yields nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and len(node.body) > 1:
                yield Function(f"{source}:{node.name}", *_chat_form(lines, node, docstring))


def _chat_form(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef, docstring: str) -> tuple[str, str]:
    first, second = node.body[0], node.body[1]
    signature = textwrap.dedent("\n".join(lines[node.lineno - 1 : first.lineno - 1]))
    summary = docstring.split("\n\n", maxsplit=1)[0][:MAX_DOCSTRING]
    start = min([second.lineno, *(d.lineno for d in getattr(second, "decorator_list", []))])
    body = textwrap.dedent("\n".join(lines[start - 1 : node.end_lineno]))
    return (
        signature.rstrip() + "\n" + textwrap.indent(f'"""{summary}"""', "    "),
        textwrap.indent(body.rstrip(), "    ") + "\n",
    )


def corpus() -> tuple[list[str], list[Function], list[Function]]:
    """Return (trained modules, trained functions, held-out functions), bodies deduplicated across all of them."""
    texts, trained, kept = [], [], []
    seen: set[str] = set()
    for source, text in modules():
        group = kept if held_out(source) else trained
        if group is trained:
            texts.append(text)
        for function in functions(source, text):
            if function.answer not in seen:
                seen.add(function.answer)
                group.append(function)
    bodies = {function.answer for function in trained}
    return texts, trained, [function for function in kept if function.answer not in bodies]
