"""The entry point of every command: Hydra composes its YAML, and a mistake in the overrides is one line.

Hydra writes the overrides of a multirun into `multirun.yaml`, and `ps` shows those of every process. A secret is given
by an environment variable: `key='${oc.env:NAME}'`.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from heads.common.errors import is_reporting_rank, terminate, user_errors
from heads.common.help import help_text, keys, nearest, options
from heads.common.resolvers import ROOT, register_resolvers

CONF = str(ROOT / "conf")
STATUSES = (0, 1, 2, 3)  # that commands end with: done, failed or an alarm, a mistake, undecided


def command(config: str) -> Callable[[Callable[[DictConfig], object]], Callable[[], None]]:
    """Return a decorator that turns a function of a configuration into a command, which composes conf/CONFIG.yaml.

    A mistake in the overrides ends it with one line, which shows none of their values, and exit status 2.
    """

    def decorate(task: Callable[[DictConfig], object]) -> Callable[[], None]:
        register_resolvers()
        # Errors of the task end within: Hydra would print them, overrides and all, before it lets them through.
        composed = hydra.main(version_base="1.3", config_path=CONF, config_name=config)(user_errors()(task))

        @wraps(task)
        def main() -> None:
            if is_reporting_rank():  # the others wait in calls that no handler ends, and keep nothing
                signal.signal(signal.SIGTERM, terminate)
            if {"-h", "--help"}.intersection(sys.argv):
                sys.stdout.write(f"{help_text(config, sys.argv[1:])}\n")
                return
            os.environ["HYDRA_FULL_ERROR"] = "1"  # else it prints its errors itself, values and all
            with user_errors():
                try:
                    composed()
                except (HydraException, OmegaConfBaseException) as error:
                    raise ValueError(mistake(error, sys.argv[1:], config)) from error

        return main

    return decorate


def sweeping() -> bool:
    """Whether this run is one of a multirun."""
    return HydraConfig.initialized() and bool(HydraConfig.get().mode == RunMode.MULTIRUN)


@contextmanager
def ending_alone() -> Iterator[None]:
    """Let a run of a multirun end alone, with whatever status it has said: the others go on. A signal ends them all."""
    try:
        yield
    except SystemExit as ended:
        if not sweeping() or ended.code not in STATUSES:
            raise
        if ended.code:
            raise HydraException("a run of the multirun failed") from None


def mistake(error: Exception, words: Sequence[str], config: str) -> str:
    """Describe the mistake in the overrides, without their values but for the name of a missing option."""
    if isinstance(error, OverrideParseException):
        key, sign, _ = error.override.partition("=")
        which = f"the override {key}=…" if sign else "a word without a ="
        return f"{which} cannot be read: give KEY=VALUE; a VALUE with blanks or signs such as , = ( stands in quotes"
    cause = str(error.__cause__).partition("\n")[0] if isinstance(error.__cause__, OmegaConfBaseException) else ""
    message = f"{str(error).partition('Config search path:')[0].rstrip()} {cause}"
    if isinstance(error, MissingConfigException):
        whole = str(error.missing_cfg_file)
        group, _, name = whole.rpartition("/") if options(whole.rpartition("/")[0]) else whole.partition("/")
        if not options(group):
            return message
        advice = f"choose one of {', '.join(options(group))}"
        if f"{group}.path" in keys(config):
            advice += f"; one's own is given by {group}.path=…"
        return f"{group}={name} is not there: {nearest(name, options(group)) or advice}"
    if unknown := re.match(r"Could not override '([\w.]+)'", message):
        # Of a value {…} the key within it that is not known; where the first part is none, OmegaConf says that alone.
        key = max(unknown[1], str(getattr(error.__cause__, "full_key", "")), key=len)
        allowed, parent = keys(config, words), key.rpartition(".")[0]
        if parent.endswith("losses") or allowed.get(parent) == "{}":  # whose keys may have any name
            return f"{key} is not a known key: +{key}=… adds one"
        advice = nearest(key, allowed) or "--help lists them, with head=NAME that head's too"
        return f"{key} is not a known key: {advice}"
    given = [value for word in words for value in re.split(r"[\s,'\"]+", word.partition("=")[2])]
    for value in sorted({*given, *(value.strip("()[]{}") for value in given)} - {""}, key=len, reverse=True):
        message = re.sub(rf"(?<![\w.]){re.escape(value)}(?!\.?\w)", "…", message)
    return message


def quoted(value: object) -> str:
    """Return a value as an override's, in quotes: Hydra reads back what it is, whatever characters it has."""
    doubled = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + (r"\'" if match[2] else ""), str(value))
    return f"'{doubled}'"
