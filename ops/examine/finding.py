"""Findings: right, wrong or unknown; a wrong one with its cost and remedy."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

OK, WRONG, UNKNOWN = VERDICTS = ("ok", "wrong", "not known")
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "speculators": "speculators",
           "gguf": "llama.cpp", "openvino": "optimum-intel"}  # fmt: skip


class Finding(NamedTuple):
    """One line of the examination."""

    verdict: str  # one of VERDICTS
    check: str  # the key, the tensor or the name of the check
    says: str  # the observation
    costs: str = ""  # the effect on each engine; for wrong ones only
    remedy: str = ""  # the key and value, or the command, that fixes it; for wrong ones only
    engines: tuple[str, ...] = ()  # the engines it harms, keys of ENGINES; empty: all


Findings = Iterator[Finding]


def ok(says: str, check: str) -> Finding:
    """Return that something is right."""
    return Finding(OK, check, says)


def unknown(why: str, check: str) -> Finding:
    """Return that something cannot be known here, and why."""
    return Finding(UNKNOWN, check, why)


def wrong(check: str, says: str, costs: str, remedy: str, *engines: str) -> Finding:
    """Return that something is wrong, with its cost, its remedy and the engines harmed (none named: all)."""
    return Finding(WRONG, check, says, costs, remedy, engines)


def meant_for(finding: Finding, engine: str | None) -> Finding:
    """Return a finding for one engine: a fault of other engines becomes ok, and one that only it has becomes wrong."""
    if engine in finding.engines:
        return finding._replace(verdict=WRONG)
    if engine is None or not finding.engines or finding.verdict != WRONG:
        return finding
    return ok(f"{finding.says}, which harms {listed(finding.engines)}", finding.check)


def listed(engines: Sequence[str]) -> str:
    """Return the names of engines for reading."""
    return ", ".join(ENGINES[name] for name in engines)


def written(findings: Sequence[Finding]) -> str:
    """Return the findings as lines for the terminal, and their counts."""
    wide, name = max(map(len, VERDICTS)), max(len(finding.check) for finding in findings)
    lines = []
    for verdict, check, says, costs, remedy, _ in findings:
        lines.append(f"{verdict:{wide}}  {check:{name}}  {says}")
        if verdict == WRONG:
            lines += [f"{'':{wide + name + 4}}{what}: {text}" for what, text in (("costs", costs), ("remedy", remedy))]
    verdicts = [finding.verdict for finding in findings]
    return "\n".join([*lines, ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS)])
