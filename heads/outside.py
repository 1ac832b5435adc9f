"""What comes from outside is data: parsed under limits, naming no code, and no file but those beside it.

A head, a run's folder, a report or a feature store may come from the Hub or from an archive. Nothing in them decides
what is run, and a name in them leads nowhere else.
"""

import importlib
import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import constants

yaml: Any = importlib.import_module("yaml")  # by name: PyYAML comes without types
NAMES_CODE = ("_target_", "_partial_", "auto_map", "custom_generate", "trust_remote_code")
LONGEST = 255  # bytes of a file's name
DEEPEST = 100  # lists and mappings in each other
CUT = 200  # characters of a value in an error


def parse_json(content: bytes) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: it is none, or nested too deeply; in one line, without the file's name.
    """
    try:
        return _shallow(json.loads(content.decode("utf-8")))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from None


def parse_yaml(content: bytes) -> Any:
    """Return what a YAML text says.

    Raises:
        ValueError: it is none, holds more than plain values (a tag such as `!!python/object`), or has an alias, by
            which a short text becomes a huge value; in one line, without the file's name.
    """
    try:
        text = content.decode("utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("an alias (*name) is not read here, write its value out")
        return _shallow(yaml.safe_load(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


def _shallow(value: Any) -> Any:
    """Return a value that is nested no deeper than any file of ours, so that whoever walks through it may recurse."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            part
            for held in level
            if isinstance(held, dict | list)
            for part in (held.values() if isinstance(held, dict) else held)
        ]
        if not level:
            return value
    raise ValueError("nested too deeply")


def names_code(value: Any) -> str | None:
    """Return the first key, at any depth, by which a configuration would name code to run; None without one.

    A key that is switched off, as in `trust_remote_code: false`, names none.
    """
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if isinstance(held, dict):
            if found := next((key for key in NAMES_CODE if held.get(key)), None):
                return found
            waiting += held.values()
        elif isinstance(held, list):
            waiting += held
    return None


def plain_name(name: object) -> bool:
    """Say whether this is the name of a file in a folder, and no way out of it."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and Path(name).name == name
        and name not in ("", ".", "..")
        and len(os.fsencode(name)) <= LONGEST
    )


def inside(folder: Path, name: object) -> Path:
    """Return the path of a file that a file in the folder names.

    Raises:
        ValueError: the name leads out of the folder, or is a link that does. The Hub's cache, whose snapshots are links
            into itself, is no way out.
    """
    if not plain_name(name):
        raise ValueError(
            f"{folder}: {shown(name)} is named in it, which is no file of that folder; get the folder anew"
        )
    path = folder / str(name)
    real = path.resolve()
    homes = [folder.resolve(), Path(constants.HF_HUB_CACHE).resolve()]
    if not any(real.is_relative_to(home) for home in homes):
        raise ValueError(f"{path}: a link out of its folder, to {real}; put the file itself there")
    return path


def shown(value: object) -> str:
    """Return a value as it may stand in an error: one line, not too long."""
    text = repr(value)
    return text if len(text) <= CUT else text[:CUT] + "…"
