"""What a check says: that something is right, wrong or not to be known here; of what is wrong its cost and remedy."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

OK, WRONG, UNKNOWN = VERDICTS = ("ok", "wrong", "not known")
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "speculators": "speculators"}


class Finding(NamedTuple):
    """One line of the examination.

    Attributes:
        verdict: one of VERDICTS.
        says: what was found.
        costs: which engine does what because of it; of what is wrong alone.
        remedy: the key and value, or the command, that mends it; of what is wrong alone.
        engines: whom it harms, keys of ENGINES; empty: everyone.
        check: which check it is of.
    """

    verdict: str
    says: str
    costs: str = ""
    remedy: str = ""
    engines: tuple[str, ...] = ()
    check: str = ""


Findings = Iterator[Finding]


def ok(says: str) -> Finding:
    """Return that something is right."""
    return Finding(OK, says)


def unknown(why: str) -> Finding:
    """Return that something cannot be known here, and why."""
    return Finding(UNKNOWN, why)


def wrong(says: str, costs: str, remedy: str, *engines: str) -> Finding:
    """Return what is wrong, what it costs, what to do, and which engines are harmed: none named, all that read it."""
    return Finding(WRONG, says, costs, remedy, engines)


def meant_for(found: Finding, engine: str | None) -> Finding:
    """Return a finding as it stands where one engine alone is to read the head: what harms others is no fault then."""
    if engine is None or found.verdict != WRONG or not found.engines or engine in found.engines:
        return found
    harmed = ", ".join(ENGINES[each] for each in found.engines)
    return ok(f"{found.says}, which harms {harmed} alone")._replace(check=found.check)


def written(findings: Sequence[Finding]) -> str:
    """Return the findings as lines for the terminal, and their counts."""
    wide, name = max(map(len, VERDICTS)), max((len(found.check) for found in findings), default=0)
    lines = []
    for found in findings:
        lines.append(f"{found.verdict:{wide}}  {found.check:{name}}  {found.says}")
        if found.verdict == WRONG:
            lines += [
                f"{'':{wide + name + 4}}{what}: {text}"
                for what, text in (("costs", found.costs), ("remedy", found.remedy))
            ]
    counts = {verdict: sum(found.verdict == verdict for found in findings) for verdict in VERDICTS}
    return "\n".join([*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())])
