"""The doctor: checks whether a head on disk or on the Hub will draft for its target, and in which engine.

It examines a head in our own form or in any foreign one that is read here, damaged or not: files and keys by what each
engine makes of them, and by measurement whether the head drafts best as its files declare it and as its card says. It
reads and never writes.

examined.py    the head's files, from disk or the Hub, and the target as far as it loads
finding.py     the findings of a check, for the terminal
declared.py    whose target it is; the keys of config.json by which engines find a class, or stumble
tensors.py     files, names, shapes, values, dtype; drafted tokens, lm_head, embedding
layers.py      the layers that its config.json names
positions.py   rotary positions and length
trials.py      the head run on other layers, tokens and positions
checkup.py     findings from the trials, and the measured acceptance against the card's
"""

from collections.abc import Callable
from typing import Any

from heads.common.errors import one_line
from heads.formats.hub import load_found
from heads.formats.store import CONFIG, WEIGHTS
from train.release.config import DoctorConfig
from train.release.doctor import checkup, declared, examined, layers, positions, tensors
from train.release.doctor.declared import TEMPLATE
from train.release.doctor.examined import Against, Examined
from train.release.doctor.finding import WRONG, Finding, Findings, meant_for, ok, unknown, written

__all__ = ["CHECKS", "TEMPLATE", "examine", "report"]

# The checks that are skipped where a file cannot be read.
NEEDED = {
    CONFIG: {"architectures", "tensors", "dtype", "keys", "said twice", "biases", "vocabulary", "lm_head", "layers",
             "rope", "length"},
    WEIGHTS: {"tensors", "values", "dtype", "biases", "vocabulary", "lm_head", "embedding"},
}  # fmt: skip
# The checks of the files, in the order of the report; those by measurement follow.
CHECKS: dict[str, Callable[[Examined, Against], Findings]] = {
    "files": tensors.readable,
    "target": declared.target,
    "tokenizer": declared.tokenizer,
    "chat template": declared.template,
    "architectures": declared.architectures,
    "name": declared.named,
    "tensors": tensors.names,
    "values": tensors.values,
    "dtype": tensors.dtype,
    "keys": declared.keys,
    "said twice": declared.twice,
    "biases": declared.biases,
    "vocabulary": tensors.vocabulary,
    "lm_head": tensors.lm_head,
    "embedding": tensors.embedding,
    "layers": layers.declared,
    "rope": positions.theta,
    "length": positions.length,
}

# What the checks that yield faults alone say where they find none.
FAULTLESS = {
    "values": "all finite, no matrix all zero",
    "keys": "none that engines stumble over",
    "said twice": "nothing is said twice and differently",
    "biases": "those that the files hold",
}


def examine(config: DoctorConfig) -> list[Finding]:
    """Examine a head.

    Returns:
        The findings of every check, in order.

    Raises:
        ValueError: there is no head, no target, or no workload of the name that is given.
    """
    head = examined.read(config.doctor)
    target = examined.load_target(config.target, head, config.checkup.dtype, config.checkup.measure)
    findings = []
    for name in CHECKS:
        unread = [file for file, names in NEEDED.items() if name in names and file in head.trouble]
        results = [unknown(f"{unread[0]} cannot be read")] if unread else _checked(name, head, target)
        findings += [finding._replace(check=name) for finding in results]
    loaded, why = _loaded(head, target)
    if target.embeddings is not None:
        findings.append(tensors.loads(why)._replace(check="loads"))
    if target.whole is None or loaded is None:
        findings += [unknown(target.why or "the head does not load")._replace(check=name) for name in checkup.CHECKS]
    else:
        findings += checkup.measure(head, target, loaded, config.checkup)
    return [meant_for(finding, config.format) for finding in findings]


def report(config: DoctorConfig) -> tuple[str, int]:
    """Return the findings of an examination as text, and the exit status: 1 where something is wrong.

    Raises:
        ValueError: as `examine`.
    """
    findings = examine(config)
    return written(findings), int(any(finding.verdict == WRONG for finding in findings))


def _checked(name: str, head: Examined, target: Against) -> list[Finding]:
    """Return the findings of a check; an error on a config.json of unexpected types becomes a finding."""
    try:
        findings = list(CHECKS[name](head, target))
        return [ok(FAULTLESS[name])] if name in FAULTLESS and not findings else findings
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
