"""The doctor: checks whether a head on disk or on the Hub will draft for its target, and in which engine.

It examines a head in our own form or in any foreign one that is read here, damaged or not: files and keys by what each
engine makes of them, and by a few decoded prompts whether it is accepted as its card says. It reads and never writes.

examined.py    the head's files, from disk or the Hub, and the target as far as it loads
finding.py     the findings of a check, for the terminal
declared.py    whose target it is; the keys of config.json by which engines find a class, or stumble
tensors.py     files, names, shapes, values, dtype; drafted tokens, lm_head, embedding
layers.py      the layers that its config.json names
positions.py   rotary positions and length
checkup.py     the measured acceptance against the card's
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from heads.common.errors import one_line
from heads.formats import lora
from heads.formats.hub import load_found, sibling_spec
from heads.formats.store import CONFIG, WEIGHTS
from train.release.config import DoctorConfig
from train.release.doctor import checkup, declared, examined, layers, positions, tensors
from train.release.doctor.declared import TEMPLATE
from train.release.doctor.examined import Against, Examined
from train.release.doctor.finding import WRONG, Finding, Findings, meant_for, ok, unknown, written

__all__ = ["CHECKS", "TEMPLATE", "examine", "report"]


class Check(NamedTuple):
    """A check, the files that it needs, and what is right where it finds nothing, if it yields faults alone."""

    run: Callable[[Examined, Against], Findings]
    needs: tuple[str, ...] = ()
    faultless: str | Callable[[Examined, Against], str] = ""


# In the order of the report; the check by measurement follows.
CHECKS = {
    "files": Check(tensors.readable),
    "target": Check(declared.target),
    "tokenizer": Check(declared.tokenizer),
    "chat template": Check(declared.template),
    "architectures": Check(declared.architectures, (CONFIG,), declared.classes),
    "name": Check(declared.named),
    "tensors": Check(tensors.names, (CONFIG, WEIGHTS), "the names and shapes that engines look for"),
    "values": Check(tensors.values, (WEIGHTS,), "all finite, no matrix all zero"),
    "dtype": Check(tensors.dtype, (CONFIG, WEIGHTS)),
    "keys": Check(declared.keys, (CONFIG,), "none that engines stumble over"),
    "said twice": Check(declared.twice, (CONFIG,), "nothing is said twice and differently"),
    "biases": Check(declared.biases, (CONFIG, WEIGHTS), "those that the files hold"),
    "vocabulary": Check(tensors.vocabulary, (CONFIG, WEIGHTS), tensors.drafted),
    "lm_head": Check(tensors.lm_head, (CONFIG, WEIGHTS), tensors.whose_lm_head),
    "embedding": Check(tensors.embedding, (WEIGHTS,)),
    "layers": Check(layers.declared, (CONFIG,), layers.summary),
    "rope": Check(positions.theta, (CONFIG,)),
    "length": Check(positions.length, (CONFIG,)),
}


def examine(config: DoctorConfig) -> list[Finding]:
    """Return the findings of every check on a head, in order; refuse a missing head, target or workload."""
    head = examined.read(config.doctor)
    target = examined.load_target(config.target, head, config.checkup.dtype, config.checkup.measure)
    target = replace(target, sibling=config.model.sibling)
    loaded, why = _loaded(head, target)
    if (head.folder / lora.CONFIG).is_file():
        head = _whole(head, loaded, why)
    findings = []
    for name, check in CHECKS.items():
        unread = [file for file in check.needs if file in head.trouble]
        results = [unknown(f"{unread[0]} cannot be read")] if unread else _checked(check, head, target)
        findings += [finding._replace(check=name) for finding in results]
    if target.embeddings is not None:
        findings.append(tensors.loads(why)._replace(check="loads"))
    if target.whole is None or loaded is None:
        results = [unknown(target.why or "the head does not load")]
    else:
        results = list(checkup.acceptance(head, target.whole, loaded, target.sibling, config.checkup))
    findings += [finding._replace(check="acceptance") for finding in results]
    return [meant_for(finding, config.format) for finding in findings]


def report(config: DoctorConfig) -> tuple[str, int]:
    """Return the findings of `examine` as text, and the exit status: 1 where something is wrong."""
    findings = examine(config)
    return written(findings), int(any(finding.verdict == WRONG for finding in findings))


def _checked(check: Check, head: Examined, target: Against) -> list[Finding]:
    """Return the findings of a check; an error on a config.json of unexpected types becomes a finding."""
    right = check.faultless
    try:
        findings = list(check.run(head, target))
        return findings if findings or not right else [ok(right if isinstance(right, str) else right(head, target))]
    except (TypeError, AttributeError, KeyError, IndexError, ValueError, RuntimeError) as error:
        return [unknown(f"the check stumbled over a value of another kind ({one_line(error)})")]


def _whole(adapter: Examined, loaded: Any, why: str) -> Examined:
    """Return an adapter with the tensors of the head that it makes; where that does not load, why is the trouble."""
    others = {name: error for name, error in adapter.trouble.items() if name != WEIGHTS}
    if loaded is None:
        return replace(adapter, trouble={**others, WEIGHTS: why})
    return replace(adapter, tensors=loaded.state_dict(), trouble=others)


def _loaded(head: Examined, target: Against) -> tuple[Any, str]:
    """Return the head for its target, or why it does not load."""
    if target.embeddings is None or target.spec is None:
        return None, target.why
    try:
        spec = sibling_spec(head.folder, target.spec, "is examined for") if target.sibling else target.spec
        return load_found(head.folder, target.embeddings, spec), ""
    except (ValueError, OSError) as error:
        return None, one_line(error)
