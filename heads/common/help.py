"""The help of a command, read from conf/: what it does, the overrides most used, examples, then all by group."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from heads.common.resolvers import ROOT

CONF = ROOT / "conf"
KEY = re.compile(r"( *)([\w.]+):(?: (.*?))?(?: ?# (.*))?$")  # a line of our YAML: indent, key, value, comment
GROUP = re.compile(r"  - /?(\w+): (\S+|\[.*\])(?: # (.*))?$", re.MULTILINE)  # a line of `defaults`
PROGRAM = "HEADSTART_PROGRAM"  # environment variable: how the user started the command, if not by its script
WIDTH = 34  # of a key and its value
FLAGS = "-m with several values runs them all; --cfg job prints the configuration; --hydra-help lists Hydra's own flags"


class Entry(NamedTuple):
    """An override: its full key, its default and its comment."""

    key: str
    value: str
    comment: str

    def line(self) -> str:
        """Return it as a line of the help."""
        value = "…" if "${" in self.value else self.value
        return f"  {f'{self.key}={value}':{WIDTH}} {self.comment}".rstrip()


def help_text(config: str, words: Sequence[str] = ()) -> str:
    """Return the help of the command that composes conf/CONFIG.yaml, whose first comments say what no key does.

    Its `words` choose the options of groups whose keys are listed, as in head=mtp.
    """
    above = _text(config).partition("defaults:")[0].removeprefix("# @package _global_\n")
    comments = [line[2:] for line in above.splitlines()]
    started, _, purpose = comments[0].partition(": ")
    used = next(line for line in comments if line.startswith("Most used: ")).split()[2:]
    program = os.environ.get(PROGRAM, started)
    examples = [f"  {program} {line.strip()}" for line in comments if line.startswith("  ")]
    grouped = list(_grouped(config, words))
    entry = {entry.key: entry for group in grouped for entry in group}
    lines = [purpose, "", "Most used:", *(entry[key].line() for key in used), "", "Examples:", *examples]
    for group in grouped:
        lines += ["", *(entry.line() for entry in group)]
    return "\n".join([*lines, "", FLAGS])


def keys(config: str, words: Sequence[str] = ()) -> dict[str, str]:
    """Return the keys that a command of these words takes, its groups among them, with their defaults."""
    return {entry.key: entry.value for group in _grouped(config, words) for entry in group}


def entries(text: str, group: str = "") -> Iterator[Entry]:
    """Yield the overrides of a YAML file; a comment stands behind its key, or on the lines above it."""
    package = re.match(r"# @package (\S+)", text)
    names = [package[1].replace("_global_", "") if package else group]
    above, depth = list[str](), 1
    for line in re.sub(r"\A(#.*\n)+|^(defaults|hydra):.*\n( .*\n)*", "", text, flags=re.MULTILINE).splitlines():
        if match := KEY.match(line):
            depth = len(match[1]) // 2 + 1
            names[depth:] = [match[2]]
            if match[3]:
                yield Entry(".".join(filter(None, names)), match[3], match[4] or " ".join(above))
        above = [*above, line.strip("# ")] if line.lstrip().startswith("#") else []


def options(group: str) -> list[str]:
    """Return the options of a group."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the question after the names nearest to a misspelt one, or to its end; empty if none is near."""
    every = sorted(set(names))
    parent, dot, last = word.rpartition(".")
    beside = [name.removeprefix(parent + dot) for name in every if name.startswith(parent + dot)]
    near = [name for name in every if name.endswith(f".{word}")]
    near = near or [parent + dot + name for name in get_close_matches(last, beside, 2)]
    near = near if near or beside else get_close_matches(word, every, 2, 0.8)
    return f"do you mean {' or '.join(near)}?" if near else ""


def _text(name: str) -> str:
    return (CONF / f"{name}.yaml").read_text(encoding="utf-8")


def _grouped(config: str, words: Sequence[str]) -> Iterator[list[Entry]]:
    """Yield a command's own overrides, those of each group after the group itself, and those of an included command."""
    named = dict(word.partition("=")[::2] for word in words)
    yield list(entries(_text(config)))
    for name, chosen, comment in GROUP.findall(_text(config)):
        about = "; ".join(filter(None, [comment, f"of {', '.join(options(name))}"]))
        files = [option for option in re.findall(r"[\w.]+", named.get(name, chosen)) if option in options(name)]
        inner = [entry for option in files for entry in entries(_text(f"{name}/{option}"), name)]
        yield [Entry(name, chosen, about), *inner]
    for included in re.findall(r"^  - /(\w+)$", _text(config), re.MULTILINE):
        yield from _grouped(included, words)
