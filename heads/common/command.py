"""The entry point of every command: Hydra composes its YAML, and an error in the overrides is one line.

Hydra writes the overrides of a multirun into `multirun.yaml`, and `ps` shows the overrides of every process. So pass a
secret by an environment variable: `key='${oc.env:NAME}'`.
"""

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import NamedTuple

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from heads.common.errors import is_reporting_rank, terminate, user_errors
from heads.common.resolvers import ROOT, register_resolvers
from heads.common.typed import nearest

CONF = ROOT / "conf"
KEY = re.compile(r"( *)([\w.]+):(?: (.*?))?(?: ?# (.*))?$")  # a line of our YAML: indent, key, value, comment
GROUP = re.compile(r"  - /?(\w+): (\S+|\[.*\])(?: # (.*))?$", re.MULTILINE)  # a line of a YAML file's `defaults`
PROGRAM = "HEADSTART_PROGRAM"  # environment variable: the name of the command in help texts, by default its script
WIDTH = 34  # width in characters of a key and its value in help texts
FLAGS = "-m with several values runs them all; --cfg job prints the configuration; --hydra-help lists Hydra's own flags"
STATUSES = (0, 1, 2, 3)  # exit statuses: done, failed or alarm, invalid input, undecided


def command(config: str) -> Callable[[Callable[[DictConfig], object]], Callable[[], None]]:
    """Return a decorator that turns a function of a configuration into a command, which composes conf/CONFIG.yaml.

    An error in the overrides prints one line and exits with status 2.
    """

    def decorate(task: Callable[[DictConfig], object]) -> Callable[[], None]:
        register_resolvers()
        # `user_errors` is inside `hydra.main`, which would otherwise print the task's errors with all overrides.
        run = exit_this_run()(user_errors()(task))
        composed = hydra.main(version_base="1.3", config_path=str(CONF), config_name=config)(run)

        @wraps(task)
        def main() -> None:
            gc.freeze()  # what imports made is no garbage
            gc.enable()
            if is_reporting_rank():  # other ranks wait in collectives, which handlers do not interrupt
                signal.signal(signal.SIGTERM, terminate)
            if {"-h", "--help"}.intersection(sys.argv):
                sys.stdout.write(f"{help_text(config, sys.argv[1:])}\n")
                return
            os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints errors itself, with the values of overrides
            with user_errors():
                try:
                    composed()
                except (HydraException, OmegaConfBaseException) as error:
                    raise ValueError(describe_override_error(error, sys.argv[1:], config)) from error

        return main

    return decorate


def sweeping() -> bool:
    """Return whether this run is part of a multirun."""
    return HydraConfig.initialized() and bool(HydraConfig.get().mode == RunMode.MULTIRUN)


@contextmanager
def exit_this_run() -> Iterator[None]:
    """End only this run of a multirun, whatever its exit status; a signal ends all runs."""
    try:
        yield
    except SystemExit as ended:
        if not sweeping() or ended.code not in STATUSES:
            raise
        if ended.code:
            raise HydraException("a run of the multirun failed") from None


def describe_override_error(error: Exception, overrides: Sequence[str], config: str) -> str:
    """Return a one-line description of an error in the overrides."""
    if isinstance(error, OverrideParseException):
        key, sign, _ = error.override.partition("=")
        which = f"the override {key}=…" if sign else "a word without a ="
        return f"{which} cannot be read: give KEY=VALUE; a VALUE with spaces or signs such as , = ( goes in quotes"
    cause = str(error.__cause__).partition("\n")[0] if isinstance(error.__cause__, OmegaConfBaseException) else ""
    message = f"{str(error).partition('Config search path:')[0].rstrip()} {cause}"
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).partition("/")
        if not (choices := options(group)):
            return message
        advice = f"choose one of {', '.join(choices)}"
        if f"{group}.path" in keys(config):
            advice += f"; one's own is given by {group}.path=…"
        return f"{group}={name} is not there: {nearest(name, choices) or advice}"
    if unknown := re.match(r"Could not override '([\w.]+)'", message):
        # The unknown key inside a value {…}; OmegaConf names only the first part of a key if that part is unknown.
        key = max(unknown[1], str(getattr(error.__cause__, "full_key", "")), key=len)
        allowed, parent = keys(config, overrides), key.rpartition(".")[0]
        if parent.endswith("losses") or allowed.get(parent) == "{}":  # keys under these parents may have any name
            return f"{key} is not a known key: +{key}=… adds one"
        advice = nearest(key, allowed) or "--help lists them, with head=NAME that head's too"
        return f"{key} is not a known key: {advice}"
    return message


def quoted(value: object) -> str:
    """Return a value quoted for an override; Hydra reads back the same value, whatever characters it has."""
    return str(QuotedString(str(value), Quote.single).with_quotes())


class Entry(NamedTuple):
    """An override: its full key, its default and its comment."""

    key: str
    value: str
    comment: str

    def line(self) -> str:
        """Return the entry as a line of the help."""
        value = "…" if "${" in self.value else self.value
        return f"  {f'{self.key}={value}':{WIDTH}} {self.comment}".rstrip()


def help_text(config: str, overrides: Sequence[str] = ()) -> str:
    """Return the help of the command that composes conf/CONFIG.yaml, with the YAML's leading comments.

    `overrides` such as head=mtp choose the options whose keys are listed.
    """
    above = _text(config).partition("defaults:")[0].removeprefix("# @package _global_\n")
    comments = [line[2:] for line in above.splitlines()]
    started, _, purpose = comments[0].partition(": ")
    used = next(line for line in comments if line.startswith("Most used: ")).split()[2:]
    program = os.environ.get(PROGRAM, started)
    examples = [f"  {program} {line.strip()}" for line in comments if line.startswith("  ")]
    grouped = list(_grouped(config, overrides))
    entry = {entry.key: entry for group in grouped for entry in group}
    lines = [purpose, "", "Most used:", *(entry[key].line() for key in used), "", "Examples:", *examples]
    for group in grouped:
        lines += ["", *(entry.line() for entry in group)]
    return "\n".join([*lines, "", FLAGS])


def keys(config: str, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return the keys and groups of a command with these overrides, with their defaults."""
    return {entry.key: entry.value for group in _grouped(config, overrides) for entry in group}


def entries(text: str, group: str = "") -> Iterator[Entry]:
    """Yield the overrides of a YAML file; a comment follows its key or is on the lines above."""
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


def _text(name: str) -> str:
    return (CONF / f"{name}.yaml").read_text(encoding="utf-8")


def _grouped(config: str, overrides: Sequence[str]) -> Iterator[list[Entry]]:
    """Yield a command's own overrides, then each group with its overrides, then those of an included command."""
    named = dict(override.partition("=")[::2] for override in overrides)
    yield list(entries(_text(config)))
    for name, chosen, comment in GROUP.findall(_text(config)):
        about = "; ".join(filter(None, [comment, f"of {', '.join(options(name))}"]))
        files = [option for option in re.findall(r"[\w.]+", named.get(name, chosen)) if option in options(name)]
        inner = [entry for option in files for entry in entries(_text(f"{name}/{option}"), name)]
        yield [Entry(name, chosen, about), *inner]
    for included in re.findall(r"^  - /(\w+)$", _text(config), re.MULTILINE):
        yield from _grouped(included, overrides)
