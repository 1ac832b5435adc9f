"""The doctor: whether a head on disk or on the Hub will draft for its target, in which engine, and what to mend.

It examines a head in our own form or in any foreign one that is read here, damaged or not: files and keys by what each
engine makes of them, and by measurement whether the head drafts best as its files declare it and as its card says. It
reads and never writes.

config.py      its types
examined.py    the head as it lies on disk or on the Hub
against.py     the target, as much of it as loads
finding.py     what a check says, for the terminal
tensors.py     files, names, shapes, values, dtype
options.py     the keys by which engines find a class, or stumble
belongs.py     whether it is this target's: weights, tokenizer, template
vocabulary.py  drafted tokens, lm_head, embedding
layers.py      the layers that it says it reads
positions.py   rotary positions and length
trials.py      the head tried on other layers, tokens and positions
measured.py    what the trials say
card.py        the measured acceptance against the card's
checkup.py     all checks by measurement, in one go
"""

from collections.abc import Callable
from typing import Any

from heads.common.errors import one_line
from heads.formats.hub import load_found
from heads.formats.store import CONFIG, WEIGHTS
from train.release.doctor import against, belongs, checkup, examined, layers, options, positions, tensors, vocabulary
from train.release.doctor.against import Against
from train.release.doctor.belongs import TEMPLATE
from train.release.doctor.config import DoctorConfig, other_part, part
from train.release.doctor.examined import Examined
from train.release.doctor.finding import WRONG, Finding, Findings, meant_for, unknown, written

__all__ = ["CHECKS", "TEMPLATE", "DoctorConfig", "examine", "other_part", "part", "report"]

# Which checks say nothing where a file cannot be read.
NEEDED = {
    CONFIG: {"architectures", "tensors", "dtype", "keys", "said twice", "biases", "vocabulary", "lm_head", "layers",
             "rope", "length"},
    WEIGHTS: {"tensors", "values", "dtype", "biases", "vocabulary", "lm_head", "embedding"},
}  # fmt: skip
# The checks of what the files say, in the order in which they are told; those by measurement follow.
CHECKS: dict[str, Callable[[Examined, Against], Findings]] = {
    "files": tensors.readable,
    "target": belongs.target,
    "tokenizer": belongs.tokenizer,
    "chat template": belongs.template,
    "architectures": options.architectures,
    "name": options.named,
    "tensors": tensors.names,
    "values": tensors.values,
    "dtype": tensors.dtype,
    "keys": options.keys,
    "said twice": positions.twice,
    "biases": options.biases,
    "vocabulary": vocabulary.vocabulary,
    "lm_head": vocabulary.lm_head,
    "embedding": vocabulary.embedding,
    "layers": layers.declared,
    "rope": positions.theta,
    "length": positions.length,
}


def examine(config: DoctorConfig) -> list[Finding]:
    """Examine a head.

    Returns:
        What every check says, in order.

    Raises:
        ValueError: there is no head, no target, or no workload of the name that is given.
    """
    head = examined.read(config.doctor)
    target = against.load(config.target, head, config.checkup.dtype, config.checkup.measure)
    found = []
    for name, check in CHECKS.items():
        unread = [file for file, names in NEEDED.items() if name in names and file in head.trouble]
        said = [unknown(f"{unread[0]} cannot be read")] if unread else _checked(check, head, target)
        found += [each._replace(check=name) for each in said]
    loaded, why = _loaded(head, target)
    if target.embeddings is not None:
        found.append(tensors.loads(why)._replace(check="loads"))
    if target.whole is None or loaded is None:
        found += [unknown(target.why or "the head does not load")._replace(check=name) for name in checkup.CHECKS]
    else:
        found += checkup.measure(head, target, loaded, config.checkup)
    return [meant_for(each, config.format) for each in found]


def report(config: DoctorConfig) -> tuple[str, int]:
    """Return what an examination finds, as text, and the exit status: 1 where something is wrong.

    Raises:
        ValueError: as `examine`.
    """
    found = examine(config)
    return written(found), int(any(each.verdict == WRONG for each in found))


def _checked(check: Callable[[Examined, Against], Findings], head: Examined, target: Against) -> list[Finding]:
    """Return what a check finds; on a config.json of quite other kinds it may stumble, which the others outlive."""
    try:
        return list(check(head, target))
    except (TypeError, AttributeError, KeyError, IndexError, ValueError, RuntimeError) as error:
        return [unknown(f"the check stumbled over a value of another kind ({one_line(error)})")]


def _loaded(head: Examined, target: Against) -> tuple[Any, str]:
    """Return the head for its target, or why it does not load."""
    if target.embeddings is None or target.spec is None:
        return None, target.why
    try:
        return load_found(head.folder, target.embeddings, target.spec), ""
    except (ValueError, OSError) as error:
        return None, one_line(error)
