"""An audit from the first request to page, JSON and verdict."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from eval.audit import calls, greedy, properties, seeds
from eval.audit.ask import AUDITED, BASELINE, QUESTIONS, Asker, ask_text
from eval.audit.compare import (
    FAILED,
    FAULT,
    NOT_OFFERED,
    NOT_RUN,
    PASSED,
    UNDECIDED,
    Audit,
    Bound,
    Comparer,
    Difference,
    Finding,
    breach,
)  # fmt: skip
from eval.audit.faults import diagnosed
from eval.audit.reproduction import cleaned, reproduction
from eval.audit.sampling import SETTINGS, sampling
from eval.audit.speed import drafts_between, share_machine, speed
from eval.audit.view import page, terminal
from eval.config import AuditConfig, AuditorConfig, DecodingConfig, EndpointConfig, Selection
from eval.endpoint.client import Server
from eval.endpoint.questions import read_questions
from eval.measures.cost_model import cycled
from heads.common.files import write_whole
from heads.common.progress import Bar
from heads.common.untrusted import visible

SCHEMA = 1  # of audit.json
PROMPT = 400  # characters of a prompt
WAVERING = 4.0  # nats: a bar for near ties that no rounding explains
JSON, PAGE, REPRODUCTION = "audit.json", "audit.html", "reproduce.py"
CHECKS: dict[str, tuple[str, Callable[[Audit], Finding]]] = {  # each under its title
    "identity": ("Greedy answers alone, cold and warm", greedy.identity),
    "prefix_cache": ("x, y, x again behind a shared prefix", greedy.prefix_cache),
    "conversations": ("Follow-up questions", greedy.conversations),
    "borders": ("Prompts at chunk borders", greedy.borders),
    "concurrency": ("Requests side by side", greedy.side_by_side),
    "cancelled": ("Beside cancelled requests", greedy.cancelled),
    "streaming": ("Whole replies like streamed ones", greedy.streaming),
    "penalties": ("Presence and frequency penalties", greedy.penalties),
    "limits": ("max_tokens", properties.limits),
    "stop_strings": ("Stop strings", properties.stop_strings),
    "usage": ("Counts of tokens", properties.usage),
    "logprobs": ("Logprobs", properties.logprobs_hold),
    "choices": ("Several choices (n)", seeds.choices),
    "tool_calls": ("Tool calls", calls.tool_calls),
    "schemas": ("JSON schema and grammar", properties.schemas),
    "seeds": ("Seeds", seeds.seeds),
    "sampling": ("Sampled text at temperature 1", partial(sampling, check="sampling")),
    "sampling_top_p": ("Sampled text with top_p", partial(sampling, check="sampling_top_p")),
}
TITLES = {check: title for check, (title, _) in CHECKS.items()} | {"speed": "Speed"}


class Verdict(NamedTuple):
    """An audit's outcome: passed, failed or undecided, in a sentence; the fault that it looks like, or none."""

    status: str
    sentence: str
    fault: str


def audited(
    served: EndpointConfig, config: AuditConfig, decoding: DecodingConfig, selection: Selection, workloads: list[str],
    out: Path,
) -> Verdict:  # fmt: skip
    """Audit a server against its baseline; write audit.json, audit.html and a reproduction, and print the verdict.

    Raises:
        ValueError: a server does not answer at first, serves another model, or a workload cannot be read. A server
            that goes away later, a budget that is used up and an interruption leave what was measured until then.
    """
    assert config.audit is not None
    auditor, client = config.auditor, served.client
    plain = replace(client, extra={**client.extra, **auditor.plain})
    sides = {
        AUDITED: Server(config.audit, client, "audit"),
        BASELINE: Server(served.baseline or config.audit, plain, "baseline"),
    }
    sides[BASELINE].check_baseline_of(sides[AUDITED])
    questions = [question for name in workloads for question in read_questions(name, selection, client.chat).prompts]
    questions = questions or [
        ask_text(f"built-in {i}", text, client.chat) for i, text in enumerate(QUESTIONS[: selection.prompts])
    ]
    settings = {"temperature": 0.0, "max_tokens": decoding.max_new_tokens, "top_p": 1.0, "seed": decoding.seed}
    with Bar(min(auditor.requests, expected(auditor, len(questions))), "audit") as bar:
        asker = Asker(sides, auditor, settings, bar)
        comparer = Comparer(asker, auditor.near_tie)
        audit = Audit(asker, comparer, questions, client.chat, decoding.max_new_tokens, decoding.seed, auditor)
        findings = run(audit)
    key = os.environ.get(client.api_key_env) or ""
    record = cleaned(record_of(audit, findings), key)
    script = ""
    if (difference := clearest(findings)) is not None:
        company = cycled(questions, difference.in_flight)[1 : difference.in_flight]
        script = reproduction(audit, difference, client.api_key_env, company, key)
    write(out, record, script)
    for line in terminal(record):
        print(visible(line))
    print(visible(f"audit: {out / JSON} and {out / PAGE}"))
    if script:
        print(visible(f"reproduction: python {out / REPRODUCTION} {sides[AUDITED].url} {sides[BASELINE].url}"))
    return Verdict(**record["verdict"])


def expected(auditor: AuditorConfig, questions: int) -> int:
    """Return about how many requests an audit takes that finds nothing."""
    few = min(greedy.MANY, questions)
    several = sum(2 * max(size, questions) for size in (*auditor.concurrency, 16) if size > 1)
    return 4 * questions + several + 14 * len(auditor.borders) + 17 * few + 200 + 8 * auditor.samples * len(SETTINGS)


def run(audit: Audit) -> list[Finding]:
    """Run all checks and return their findings; `audit.asker.ended` says why it ended before, if it did."""
    findings: list[Finding] = []
    server = audit.asker.sides[AUDITED]
    readings = [server.reading()]
    for check in CHECKS:
        ended = bool(audit.asker.ended)
        findings.append(Finding(check, NOT_RUN, "the audit ended before") if ended else finding_of(audit, check))
        if len(findings) == 1:
            readings.append(server.reading())
    shared = share_machine(*(server.url for server in audit.asker.sides.values()))
    findings.append(speed(audit.timings, (readings[0], readings[1]), audit.seed, shared=shared))
    findings[-1].figures["drafts"] = drafts_between(readings[0], server.reading())
    return findings


def finding_of(audit: Audit, check: str) -> Finding:
    """Run a check and return its finding, though the audit ends in it."""
    _, ask = CHECKS[check]
    finding = next(iter(audit.asker.taken(ask(audit) for _ in range(1))), Finding(check, NOT_RUN, ""))
    return cut_short(finding, audit.asker) if audit.asker.ended else finding


def cut_short(finding: Finding, asker: Asker) -> Finding:
    """Return the finding on the check in which the audit ended: its differences stay, without any it was not run.

    An end of the audited server beside other requests is a fault.
    """
    before = finding.summary if finding.status in (PASSED, FAILED, UNDECIDED) else ""
    finding.summary = f"{before}, then {asker.ended}" if before else asker.ended
    if finding.status in (PASSED, NOT_OFFERED):
        finding.status = NOT_RUN
    if asker.crash is not None:
        question, in_flight, detail = asker.crash
        note = f"{detail}, while the baseline answers"
        crash = breach(question, "", "", "crash", note)._replace(in_flight=in_flight)
        finding.status, finding.differences = FAILED, [crash, *finding.differences]
    return finding


def verdict_of(findings: list[Finding], ended: str, near_tie: float) -> Verdict:
    """Return the outcome of all findings; `near_tie` is the bar of near ties, in nats, that they were found by."""
    failed = [finding for finding in findings if finding.status == FAILED]
    undecided = [finding for finding in findings if finding.status == UNDECIDED]
    count = sum(finding.status == PASSED for finding in findings if finding.check != "speed")
    if failed:
        names = ", ".join(finding.check for finding in failed)
        then = f", then {ended}" if ended else ""
        return Verdict(FAILED, f"not lossless: {names} failed{then}", diagnosed(findings))
    names = ", ".join(finding.check for finding in undecided)
    unjudged = next((f"{f.check} cannot be judged: {f.summary}" for f in undecided if not f.differences), "")
    doubts = {
        f"no fault in {count} checks, then {ended}": bool(ended),
        f"nothing could be compared: {findings[0].summary}": findings[0].status == NOT_OFFERED,
        f"no fault in {count} checks, but the server counts no drafts: does it speculate?": (
            findings[-1].figures["drafts"] == 0
        ),
        f"the baseline left its own answers across {near_tie / 2:.1f} nats: is it greedy?": near_tie > WAVERING,
        f"no fault in {count} checks, but {unjudged}": bool(unjudged),
        f"answers differ in {names}, and no logprobs say whether at near ties": bool(undecided),
    }
    doubt = next((sentence for sentence, there in doubts.items() if there), "")
    return Verdict(UNDECIDED, doubt, "") if doubt else Verdict(PASSED, f"no fault in {count} checks", "")


def clearest(findings: list[Finding]) -> Difference | None:
    """Return the difference that shows the verdict's fault with the largest gap, None without a fault."""
    fault = diagnosed(findings)
    failed = [finding for finding in findings if finding.status == FAILED]
    differences = [d for finding in failed for d in finding.differences if d.kind == FAULT]
    return max(differences, key=lambda d: (d.fault == fault, d.gap or 0.0), default=None)


def record_of(audit: Audit, findings: list[Finding]) -> dict[str, Any]:
    """Return audit.json."""
    sides = audit.asker.sides
    return {
        "schema": SCHEMA,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": sides[AUDITED].model,
        "audited": sides[AUDITED].url,
        "baseline": sides[BASELINE].url,
        "verdict": verdict_of(findings, audit.asker.ended, audit.comparer.near_tie)._asdict(),
        "requests": audit.asker.requests,
        "minutes": round(audit.asker.minutes, 2),
        "settings": {
            **asdict(audit.auditor),
            "near_tie": audit.comparer.near_tie,
            "max_new_tokens": audit.tokens,
            "prompts": len(audit.questions),
            "seed": audit.seed,
        },
        "findings": [finding_record(finding) for finding in findings],
    }  # fmt: skip


def finding_record(finding: Finding) -> dict[str, Any]:
    """Return a finding in audit.json; of its differences the clearest few."""
    shown = sorted(finding.differences, key=lambda d: (d.kind != "fault", -(d.gap or 0)))[:3]
    return {
        "check": finding.check,
        "title": TITLES[finding.check],
        "status": finding.status,
        "summary": finding.summary,
        "fault": finding.fault,
        "figures": finding.figures,
        "differences": [difference_record(difference) for difference in shown],
    }


def difference_record(difference: Difference) -> dict[str, Any]:
    """Return a difference in audit.json; of its prompt the end."""
    return {
        **{key: getattr(difference, key) for key in ("kind", "at", "gap", "fault", "note", "in_flight")},
        "at_least": isinstance(difference.gap, Bound),
        "id": difference.question.id,
        "prompt": difference.question.prompt[-PROMPT:],
        AUDITED: difference.ours,
        BASELINE: difference.theirs,
        "after": [question.id for question in difference.before],
    }


def write(out: Path, record: dict[str, Any], script: str) -> None:
    """Write the files, each whole or not at all; a reproduction of an earlier audit goes."""
    texts = {JSON: json.dumps(record, indent=1, allow_nan=False), PAGE: page(record), REPRODUCTION: script}
    for name, text in texts.items():
        if text:
            write_whole(out / name, text.encode(errors="replace"))
        else:
            (out / name).unlink(missing_ok=True)
