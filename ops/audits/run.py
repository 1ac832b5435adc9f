"""An audit from the first request to page, JSON and verdict."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from eval.config import Selection
from eval.inputs.workloads import workload_names
from eval.measures import metrics
from eval.measures.cost_model import cycled, stops_paying
from eval.measures.counters import Counters, between, restarted
from heads.common.files import check_writable, write_whole
from heads.common.progress import Bar
from heads.common.untrusted import visible
from ops.audits import greedy, properties, seeds
from ops.audits.ask import AUDITED, BASELINE, QUESTIONS, Asker, AuditConfig, ask_text
from ops.audits.compare import (
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
    Timed,
    breach,
    diagnosed,
)  # fmt: skip
from ops.audits.output import cleaned, page, reproduction, terminal
from ops.audits.sampling import sampling
from ops.served.client import Server
from ops.served.exchange import Reply, read_questions

SCHEMA = 1  # of audit.json
PROMPT = 400  # characters of a prompt
WAVERING = 4.0  # nats: a bar for near ties that no rounding explains
ASKED = ("url", "baseline", "client", "out", "workload")  # keys of the configuration that are no settings of checks
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
    "tool_calls": ("Tool calls", properties.tool_calls),
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


def audited(config: AuditConfig) -> Verdict:
    """Audit a server against its baseline; write audit.json, audit.html and a reproduction, and print the verdict.

    Raises:
        ValueError: a server does not answer at first, serves another model, or a workload cannot be read. A server
            that goes away later, a budget that is used up and an interruption leave what was measured until then.
    """
    out, client = Path(config.out).expanduser(), config.client
    check_writable(out, "out")
    names = workload_names(config.workload) if config.workload else []
    plain = replace(client, extra={**client.extra, **config.plain})
    sides = {
        AUDITED: Server(config.url, client, "url"),
        BASELINE: Server(config.baseline or config.url, plain, "baseline"),
    }
    sides[BASELINE].check_baseline_of(sides[AUDITED])
    selection = Selection(config.prompts, 0, False, "first", True)
    questions = [question for name in names for question in read_questions(name, selection, client.chat).prompts]
    questions = questions or [
        ask_text(f"built-in {i}", text, client.chat) for i, text in enumerate(QUESTIONS[: config.prompts])
    ]
    settings = {"temperature": 0.0, "max_tokens": config.max_new_tokens, "top_p": 1.0, "seed": config.seed}
    with Bar(None, "requests of the audit") as bar:
        asker = Asker(sides, config, settings, bar)
        comparer = Comparer(asker, config.near_tie)
        audit = Audit(asker, comparer, questions, client.chat, config.max_new_tokens, config.seed, config)
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
            **{key: value for key, value in asdict(audit.config).items() if key not in ASKED},
            "near_tie": audit.comparer.near_tie,
            "prompts": len(audit.questions),
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


LOOPBACK = ("localhost", "127.0.0.1", "::1")


def share_machine(one: str, other: str) -> bool:
    """Whether two servers are processes of one machine, by their URLs."""
    first, second = urlsplit(one), urlsplit(other)
    hosts = {"localhost" if host in LOOPBACK else host for host in (first.hostname, second.hostname)}
    return len(hosts) == 1 and first.port != second.port


def speed(
    timings: Sequence[Timed], counters: tuple[Counters | None, Counters | None], seed: int, *, shared: bool = False
) -> Finding:
    """Return speedups at each number of requests in flight, and acceptance where the server counts it.

    With `shared`, both servers are on one machine, and the finding says what that may do to the speedup.
    """
    loads = [load for size in sorted({t.in_flight for t in timings}) if (load := _load(timings, size, seed))]
    figures: dict[str, Any] = {"loads": loads, **acceptance(timings, counters)}
    if not loads:
        return Finding("speed", NOT_RUN, "no answers of both servers were timed", [], figures)
    texts = [
        f"{load['speedup']:.2f}x [{load['low']:.2f}, {load['high']:.2f}] with {load['in_flight']} in flight"
        for load in loads
    ]
    losing = stops_paying({load["in_flight"]: load["high"] for load in loads})
    figures["loses_from"] = losing
    if losing is not None:
        texts.append(f"speculation loses from {losing} in flight on")
    if shared:
        texts.append("both servers are on one machine: where they share cores or a device, they slow each other")
    if figures.get("tau"):
        texts.append(f"{figures['tau']:.2f} tokens a pass")
    return Finding("speed", PASSED, "; ".join(texts), [], figures)


def _load(timings: Sequence[Timed], in_flight: int, seed: int) -> dict[str, Any] | None:
    """Return both servers' speeds at a number of requests in flight, and the speedup with its bootstrap interval.

    The speedup is that of a user's tokens a second, by pairs of answers to the same question.
    """
    sides: dict[str, list[Reply]] = {BASELINE: [], AUDITED: []}
    walls = {BASELINE: 0.0, AUDITED: 0.0}
    for timed in timings:
        if timed.in_flight == in_flight:
            sides[timed.side] += timed.replies
            walls[timed.side] += timed.wall_s
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(sides[AUDITED], sides[BASELINE], strict=False)
        if (ours.completion_tokens or 0) > 0 and (theirs.completion_tokens or 0) > 0
    ]
    if not pairs:
        return None
    ours, theirs = ([(reply.completion_tokens, reply.latency_s) for reply in side] for side in zip(*pairs, strict=True))
    speedup = metrics.over(ours, theirs)
    low, high = metrics.paired_interval(ours, theirs, seed) or (speedup, speedup)
    totals = {side: sum(r.completion_tokens or 0 for r in sides[side]) / max(walls[side], 1e-9) for side in sides}
    return {
        "in_flight": in_flight,
        "requests": len(pairs),
        "speedup": speedup,
        "low": low,
        "high": high,
        "user": {AUDITED: metrics.speed(ours), BASELINE: metrics.speed(theirs)},
        "throughput": totals,
    }


def drafts_between(before: Counters | None, after: Counters | None) -> int | None:
    """Return how many drafts a server counted between two readings, 0 where it counts none; None if nobody knows."""
    if before is None or after is None or restarted(before, after):
        return None
    first, last = (c.draft_tokens if c.drafts is None else c.drafts for c in (before, after))
    return round((last or 0) - (first or 0))


def acceptance(timings: Sequence[Timed], counters: tuple[Counters | None, Counters | None]) -> dict[str, Any]:
    """Return tokens a pass and acceptance by position between two readings of the audited server's counters."""
    before, after = counters
    if before is None or after is None or after.drafts is None or restarted(before, after):
        return {}
    alone = [timed for timed in timings if timed.side == AUDITED and timed.in_flight == 1]
    decoded = sum(max((reply.completion_tokens or 0) - 1, 0) for timed in alone for reply in timed.replies)
    passes = between(before, after, decoded)
    if not passes.steps:
        return {}
    depths = [count / passes.steps for count in passes.by_depth]
    return {"tau": passes.tokens / passes.steps, "accepted_by_depth": depths}
