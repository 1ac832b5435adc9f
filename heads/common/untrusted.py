"""Parsing untrusted files: depth limits, no code references, no path traversal.

A head, a run's folder, a report or a feature store may come from the Hub or from an archive. Its content selects no
code to run, and its file names lead to no other folder.
"""

import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import constants

yaml: Any = importlib.import_module("yaml")  # imported by name, since PyYAML has no type hints
NAMES_CODE = ("_target_", "_partial_", "auto_map", "custom_generate", "trust_remote_code")
LONGEST = 255  # bytes of a file name
MOST_YAML = 1 << 20  # bytes; the parser takes a minute for twenty times as many
DEEPEST = 100  # maximum depth of nested lists and mappings
CUT = 200  # maximum length in characters of a value in an error
TOO_DEEP = "nested too deeply"
UNSHOWN = (  # control characters but newline and tab, direction overrides, line separators, surrogates
    *range(9), *range(11, 32), *range(127, 160),
    *range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000),
)  # fmt: skip
CONTROL = dict.fromkeys(UNSHOWN, "\N{REPLACEMENT CHARACTER}")


def parse_json(content: bytes | str, deepest: int = DEEPEST) -> Any:
    """Return a JSON text's value; refuse another text or one nested above `deepest`, without a file's name."""
    try:
        return shallow(json.loads(content if isinstance(content, str) else content.decode("utf-8")), deepest)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from None


def parse_yaml(content: bytes) -> Any:
    """Return the value of a YAML text; refuse more than plain values or MOST_YAML bytes, without a file's name.

    A tag such as `!!python/object` is more than that, and so is an alias, by which a short text becomes a huge value.
    """
    if len(content) > MOST_YAML:
        raise ValueError(f"{len(content)} bytes of YAML, at most {MOST_YAML} are read")
    try:
        text = content.decode("utf-8")
        depth = 0  # checked while parsing, whose time is quadratic in the depth
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("an alias (*name) is not read here, write its value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ValueError(TOO_DEEP)
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


def parsed_file(path: Path, remedy: str, parse: Callable[[bytes], Any] = parse_json) -> Any:
    """Return the parsed content of a file; refuse a damaged file, with the remedy, and a file that is not `regular`."""
    try:
        return parse(regular(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); {remedy}") from None


def shallow(value: Any, deepest: int = DEEPEST) -> Any:
    """Return the value; refuse one nested deeper than `deepest`, so that readers can recurse."""
    level = [value]
    for _ in range(deepest):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return value
    raise ValueError(TOO_DEEP)


def entries(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings and lists, with its keys joined by dots."""
    yield key, value
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from entries(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from entries(inner, key)


def names_code(value: Any) -> str | None:
    """Return the first key, at any depth, that names code to run; None if no key does.

    A key that is switched off, as in `trust_remote_code: false`, does not count.
    """
    keys = (key.rpartition(".")[2] for key, item in entries(value) if item)
    return next((key for key in keys if key in NAMES_CODE), None)


def regular(path: Path) -> Path:
    """Return the path of a regular file, or of a folder of such; refuse what may block: a pipe, a socket, a device."""
    for file in path.iterdir() if path.is_dir() else [path]:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ValueError(f"{file}: a pipe, a socket or a device, which is not read; put a file in its place")
    return path


def plain_name(name: object) -> bool:
    """Return whether a name is a file name without a folder."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and Path(name).name == name
        and name not in ("", ".", "..")
        and len(os.fsencode(name)) <= LONGEST
    )


def inside(folder: Path, name: object) -> Path:
    """Return the path of a file in the folder, by a name from an untrusted file; refuse one that is not `regular`.

    Refuse a name that leads out of the folder, and a link that does but for those of the Hub's cache, into itself.
    """
    if not plain_name(name):
        raise ValueError(
            f"{folder}: {shown(name)} is named in it, which is no file of that folder; get the folder again"
        )
    path = regular(folder / str(name))
    real = path.resolve()
    homes = [folder.resolve(), Path(constants.HF_HUB_CACHE).resolve()]
    if not any(real.is_relative_to(home) for home in homes):
        raise ValueError(f"{path}: a link out of its folder, to {real}; put the file itself there")
    return path


def visible(text: str) -> str:
    """Return a text that is safe to print: line breaks stay, control characters and surrogates are replaced."""
    return text.translate(CONTROL)


def shown(value: object) -> str:
    """Return a value for an error message: one line of at most CUT characters."""
    text = repr(value)
    return text if len(text) <= CUT else text[:CUT] + "…"
