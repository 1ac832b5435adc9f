"""python ops/audit.py url=URL baseline=URL: is a served model lossless, and how much faster, over HTTP only."""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: the checkout's root in place of this folder, or `import heads` would fail
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

from omegaconf import DictConfig

from eval.config import Selection
from eval.inputs.workloads import workload_names
from eval.measures.cost_model import cycled, stops_paying
from eval.measures.counters import Counters, between, restarted
from heads.common.command import command, ending_alone
from heads.common.errors import user_errors
from heads.common.files import atomic_write, check_writable
from heads.common.progress import Bar
from heads.common.typed import typed
from heads.common.untrusted import visible
from ops.audits import greedy, properties, sampling
from ops.audits.ask import AUDITED, BASELINE, QUESTIONS, SIDES, Asker, AuditConfig, ask_text
from ops.audits.compare import (
    FAILED,
    FAULT,
    NOT_OFFERED,
    NOT_RUN,
    PASSED,
    UNDECIDED,
    Audit,
    Comparer,
    Difference,
    Finding,
    breach,
    diagnosed,
)  # fmt: skip
from ops.audits.output import cleaned, finding_record, page, reproduction, terminal
from ops.served import Server, read_questions

WAVERING = 4.0  # nats: a bar for near ties that no rounding explains
ASKED = ("url", "baseline", "client", "out", "workload")  # keys of the configuration that are no settings of checks
JSON, PAGE, REPRODUCTION = "audit.json", "audit.html", "reproduce.py"
CHECKS: dict[str, tuple[str, Callable[[Audit], Finding]]] = {  # each with its title
    "identity": ("Greedy answers alone, cold and warm", greedy.identity),
    "prefix_cache": ("x, y, x again behind a shared prefix", greedy.prefix_cache),
    "conversations": ("Follow-up questions", greedy.conversations),
    "borders": ("Prompts at chunk borders", greedy.borders),
    "concurrency": ("Requests side by side", greedy.side_by_side),
    "cancelled": ("Next to cancelled requests", greedy.cancelled),
    "streaming": ("Whole replies like streamed ones", greedy.streaming),
    "penalties": ("Presence and frequency penalties", greedy.penalties),
    "limits": ("max_tokens", properties.limits),
    "stop_strings": ("Stop strings", properties.stop_strings),
    "usage": ("Counts of tokens", properties.usage),
    "logprobs": ("Logprobs", properties.logprobs_hold),
    "choices": ("Several choices (n)", sampling.choices),
    "tool_calls": ("Tool calls", properties.tool_calls),
    "schemas": ("JSON schema and grammar", properties.schemas),
    "seeds": ("Seeds", sampling.seeds),
    "sampling": ("Sampled text at temperature 1", partial(sampling.sampling, check="sampling")),
    "sampling_top_p": ("Sampled text with top_p", partial(sampling.sampling, check="sampling_top_p")),
}


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
    plain = replace(client, extra={**client.extra, **config.plain})
    sides = {
        AUDITED: Server(config.url, client, "url"),
        BASELINE: Server(config.baseline or config.url, plain, BASELINE),
    }
    sides[BASELINE].check_baseline_of(sides[AUDITED])
    selection, names = Selection(config.prompts, 0, False, "first", True), config.workload
    questions = [
        question
        for name in (workload_names(names) if names else [])
        for question in read_questions(name, selection, client.chat).prompts
    ] or [ask_text(f"built-in {i}", text, client.chat) for i, text in enumerate(QUESTIONS[: config.prompts])]
    settings = {"temperature": 0.0, "max_tokens": config.max_new_tokens, "top_p": 1.0, "seed": config.seed}
    with Bar(None, "requests of the audit") as bar:
        asker = Asker(sides, config, settings, bar)
        audit = Audit(asker, Comparer(asker, config.near_tie), questions, config)
        findings = run(audit)
    verdict = verdict_of(findings, asker.ended, audit.comparer.near_tie)
    key = os.environ.get(client.api_key_env) or ""
    options = {name: value for name, value in asdict(config).items() if name not in ASKED}
    record = cleaned({
        "schema": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": sides[AUDITED].model,
        **{side: sides[side].url for side in SIDES},
        "verdict": verdict._asdict(),
        "requests": asker.requests,
        "minutes": round(asker.minutes, 2),
        "settings": {**options, "near_tie": audit.comparer.near_tie, "prompts": len(questions)},
        "findings": [finding_record(one, CHECKS.get(one.check, ("Speed",))[0]) for one in findings],
    }, key)  # fmt: skip
    script = ""
    if (difference := clearest(findings)) is not None:
        company = cycled(questions, difference.in_flight)[1 : difference.in_flight]
        script = reproduction(audit, difference, company, key)
    texts = {JSON: json.dumps(record, indent=1, allow_nan=False), PAGE: page(record), REPRODUCTION: script}
    for name, text in texts.items():
        if text:
            atomic_write(out / name, text.encode(errors="replace"))
        else:  # of an earlier audit
            (out / name).unlink(missing_ok=True)
    lines = [*terminal(record), f"audit: {out / JSON} and {out / PAGE}"]
    if script:
        lines.append(f"reproduction: python {out / REPRODUCTION} {sides[AUDITED].url} {sides[BASELINE].url}")
    print(visible("\n".join(lines)))
    return verdict


def run(audit: Audit) -> list[Finding]:
    """Run all checks and return their findings, the speed's last; `audit.asker.ended` says why it ended early."""
    findings: list[Finding] = []
    asker, server = audit.asker, audit.asker.sides[AUDITED]
    readings = [server.reading()]
    for check, (_, function) in CHECKS.items():
        if asker.ended:
            findings.append(Finding(check, NOT_RUN, "the audit ended before"))
            continue
        taken = asker.taken(function(audit) for _ in range(1))
        findings.append(taken[0] if taken else Finding(check, NOT_RUN, ""))
        cut_short(findings[-1], asker)
        if len(findings) == 1:
            readings.append(server.reading())
    findings.append(speed(audit, readings[0], readings[1]))
    findings[-1].figures["drafts"] = drafts_between(readings[0], server.reading())
    return findings


def cut_short(finding: Finding, asker: Asker) -> None:
    """Change the finding on the check in which the audit ended, if it did: without differences it was not run.

    An end of the audited server under several requests is a fault.
    """
    if not asker.ended:
        return
    before = finding.summary if finding.status in (PASSED, FAILED, UNDECIDED) else ""
    finding.summary = f"{before}, then {asker.ended}" if before else asker.ended
    if finding.status in (PASSED, NOT_OFFERED):
        finding.status = NOT_RUN
    if asker.crash is not None:
        question, in_flight, detail = asker.crash
        crash = breach(question, "", "", "crash", f"{detail}, while the baseline answers")
        finding.status = FAILED
        finding.differences = [crash._replace(in_flight=in_flight), *finding.differences]


def verdict_of(findings: list[Finding], ended: str, near_tie: float) -> Verdict:
    """Return the outcome of all findings; `near_tie` is the bar of near ties, in nats, that they were found by."""
    failed, undecided = ([finding for finding in findings if finding.status == s] for s in (FAILED, UNDECIDED))
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
    differences = [
        d for finding in findings if finding.status == FAILED for d in finding.differences if d.kind == FAULT
    ]
    return max(differences, key=lambda d: (d.fault == fault, d.gap or 0.0), default=None)


def speed(audit: Audit, before: Counters | None, after: Counters | None) -> Finding:
    """Return the speedup at each number of requests in flight, and tokens per pass where the server counts them.

    `before` and `after` are its counters around the answers that came one at a time.
    """
    tokens, alone = Counter[tuple[str, int]](), 0
    seconds: dict[tuple[str, int], float] = {}
    for side, in_flight, replies, wall_s in audit.timings:
        counts = [reply.completion_tokens or 0 for reply in replies]
        tokens[side, in_flight] += sum(counts)
        seconds[side, in_flight] = seconds.get((side, in_flight), 0.0) + wall_s
        alone += sum(max(count - 1, 0) for count in counts) if (side, in_flight) == (AUDITED, 1) else 0
    rates = {key: tokens[key] / seconds[key] for key in tokens if tokens[key] and seconds[key]}
    loads = {
        size: rates[AUDITED, size] / rates[BASELINE, size]
        for side, size in sorted(rates)
        if side == AUDITED and (BASELINE, size) in rates
    }
    losing = stops_paying(loads)
    figures: dict[str, Any] = {"speedup": loads, "loses_from": losing}
    texts = [f"{speedup:.2f}x with {size} in flight" for size, speedup in loads.items()]
    texts += [] if losing is None else [f"speculation loses from {losing} in flight on"]
    if before is not None and after is not None and after.drafts is not None and not restarted(before, after):
        passes = between(before, after, alone)
        if passes.steps:
            figures["tau"] = passes.tokens / passes.steps
            texts.append(f"{figures['tau']:.2f} tokens per pass")
    return Finding("speed", PASSED if loads else NOT_RUN, "; ".join(texts) or "nothing was timed", [], figures)


def drafts_between(before: Counters | None, after: Counters | None) -> int | None:
    """Return how many drafts a server counted between two readings, 0 where it counts none; None if nobody knows."""
    if before is None or after is None or restarted(before, after):
        return None
    first, last = (c.draft_tokens if c.drafts is None else c.drafts for c in (before, after))
    return round((last or 0) - (first or 0))


@command("ops/audit")
def main(cfg: DictConfig) -> None:
    """Audit; exit with 0 if the server passed, 1 if it failed, 2 for a mistake, 3 if undecided."""
    with ending_alone(), user_errors():
        verdict = audited(typed(AuditConfig, cfg))
        raise SystemExit({PASSED: 0, FAILED: 1}.get(verdict.status, 3))


if __name__ == "__main__":
    main()
