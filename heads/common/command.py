"""The entry point of every command: Hydra composes its YAML, without seeing the secrets of the command line.

Hydra writes overrides into `multirun.yaml` and its errors, wandb into its files, and a launcher hands them on to other
processes, where `ps` shows them. None of them sees a secret: it moves into the environment, and the override names the
variable.
"""

import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from heads.common.errors import is_reporting_rank, terminate, user_errors
from heads.common.help import help_text, keys, nearest, options
from heads.common.redact import replaced_word
from heads.common.resolvers import ROOT, register_resolvers
from heads.common.target_config import best_head

CONF = str(ROOT / "conf")
SWEEP = {"-m", "--multirun"}
HELP = {"-h", "--help", "--hydra-help", "--info", "--version"}  # words by which nothing runs
BEST = "HEADSTART_BEST_HEAD"  # holds the line about head=best until it is written, here or by a process started here
STATUSES = (0, 1, 2, 3)  # that commands end with: done, failed or an alarm, a mistake, undecided
VARIABLE = "HEADSTART_{}_SECRET"  # by which heads/common/redact.py knows its value for a secret


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
            sys.argv[1:] = without_secrets(sys.argv[1:])
            os.environ["HYDRA_FULL_ERROR"] = "1"  # else it prints its errors itself, values and all
            with user_errors():
                try:
                    sys.argv[1:] = with_best_head(config, sys.argv[1:])
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


def without_secrets(words: Iterable[str]) -> list[str]:
    """Return a command's words with an interpolation instead of every secret, which moves into the environment."""
    return [replaced_word(word, _in_environment) for word in words]


def with_best_head(config: str, words: Sequence[str]) -> list[str]:
    """Return a command's words with the head that is best for its target in place of `head=best`, its default."""
    named = [word for word in words if word.startswith("head=")]
    if HELP.intersection(words) or (named and not any(re.fullmatch(r"head=(.*,)?best(,.*)?", word) for word in named)):
        return [*words]
    if not named and config != "train" and not (config == "data" and "features=stored" in words):
        return [*words]  # no head is read
    # Neither flags nor their values, as of `--cfg job`; a word that is no override is refused when all are read.
    others = [word for word in words if word != "head=best" and re.match(r"~|[^-][^=]*=", word)]
    if SWEEP.intersection(words):
        others = [word for word in others if re.match(r"(experiment|model[.\w]*)=", word)]
    if named not in ([], ["head=best"]) or (SWEEP.intersection(words) and (named or "," in "".join(others))):
        raise ValueError("head=best is one head for one run: in a sweep name the heads, as in head=mtp,mlp")
    experiments = [word.partition("=")[2] for word in others if word.startswith("experiment=")]
    if not named and any(re.search(r"override /head: (?!best\b)", text) for text in map(_experiment, experiments)):
        return [*words]  # found without composing, which takes a fifth of a second
    with initialize_config_dir(CONF, version_base="1.3"):
        composed = compose(config, others, return_hydra_config=True)
    if composed.hydra.runtime.choices.get("head") != "best":  # an experiment's own
        return [*words]
    head, reason = best_head(composed.model.path, composed.model.shape, composed.model.trust_remote_code)
    os.environ[BEST] = f"head=best: {head}, {reason}\n"
    # Beside another override: argparse takes them in one run, before or behind a flag.
    index = next((i for i, word in enumerate(words) if re.match(r"[^-][^=]*=", word)), len(words))
    rest = [word for word in words if word != "head=best"]
    return [*rest[:index], f"head={head}", *rest[index:]]


def _experiment(name: str) -> str:
    """Return the YAML of an experiment, nothing where there is none."""
    path = Path(CONF, "experiment", f"{name}.yaml")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def report_best_head() -> None:
    """Write once, on the first process, what head=best is; not before a command refuses what it can."""
    line = os.environ.pop(BEST, "")
    if is_reporting_rank():
        sys.stderr.write(line)


def _in_environment(secret: str) -> str:
    """Return the interpolation of a new variable that holds the secret, which may be quoted as in an override."""
    if "${" in secret:
        return secret
    try:
        value = OverridesParser.create().parse_override(f"x={secret}").value()
    except HydraException:
        value = None
    name = next(name for name in map(VARIABLE.format, itertools.count()) if name not in os.environ)
    os.environ[name] = value if isinstance(value, str) else secret
    return f"${{oc.env:{name}}}"


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
