"""Audit a served model over HTTP, for losslessness and speedup: python ops/audit.py url=URL baseline=URL."""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root replaces the script's folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from omegaconf import DictConfig

from eval.config import Selection
from eval.inputs.workloads import cycled, workload_names
from eval.measures.counters import Counters, restarted
from heads.common.command import command
from heads.common.errors import HIDDEN, SHORTEST, redacted_values
from heads.common.files import atomic_write, check_writable
from heads.common.progress import Bar
from heads.common.resolvers import ROOT
from heads.common.typed import Json, typed
from heads.common.untrusted import visible
from ops.audits import checks, sampling
from ops.audits.checks import ALTERNATIVE
from ops.audits.compare import (
    AUDITED,
    BASELINE,
    SIDES,
    Asker,
    Audit,
    AuditConfig,
    Bound,
    Difference,
    EndedError,
    Finding,
    Status,
    ask_text,
    diagnosed,
    violation,
)
from ops.served import Questions, Server, read_questions

WAVERING = 4.0  # nats; rounding cannot explain a near-tie threshold above this
ASKED = ("url", "baseline", "client", "out", "workload", "questions")  # configuration keys that are not checks
JSON, PAGE, REPRODUCTION = "audit.json", "audit.html", "reproduce.py"
# Ordered so that a fault in one check may also fail later checks.
CHECKS: dict[str, Callable[[Audit], Finding]] = {
    "identity": checks.identity,
    "prefix_cache": checks.prefix_cache,
    "conversations": checks.conversations,
    "borders": checks.chunk_borders,
    "concurrency": checks.side_by_side,
    "cancelled": checks.cancelled,
    "streaming": checks.streaming,
    "penalties": checks.penalties,
    "limits": checks.limits,
    "stop_strings": checks.stop_strings,
    "usage": checks.usage,
    "logprobs": checks.logprobs_hold,
    "schemas": checks.schemas,
    "tool_calls": checks.tool_calls,
    "sampling": partial(sampling.sampling, check="sampling"),
    "sampling_top_p": partial(sampling.sampling, check="sampling_top_p"),
    "seeds": sampling.seeds,
    "choices": sampling.choices,
}


STYLE = ROOT / "eval" / "report" / "page.css"
SHOWN = 60  # bytes shown around a difference in the terminal, and before it on the page
LONG = 400
ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("audits")), autoescape=lambda name: "html" in str(name),
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip


def difference_record(difference: Difference) -> Json:
    """Return a difference in audit.json, with the end of its prompt."""
    return {
        **{key: getattr(difference, key) for key in ("kind", "at", "gap", "fault", "note", "in_flight")},
        "at_least": isinstance(difference.gap, Bound),
        "id": difference.question.id,
        "prompt": difference.question.prompt[-LONG:],
        AUDITED: difference.ours,
        BASELINE: difference.theirs,
        "after": [question.id for question in difference.before],
    }


def rendered(template: str, record: Json) -> str:
    """Render a template with an audit's record; the page loads no resources and escapes all texts."""
    headline = ENVIRONMENT.get_template("headline.j2").render(record=record).strip()
    style = Markup(STYLE.read_text(encoding="utf-8"))
    page = ENVIRONMENT.get_template(template)
    return page.render(record=record, headline=headline, cut=cut, sides=SIDES, style=style)


def cut(text: str, at: int) -> tuple[str, str, str]:
    """Return three shortened parts of a text: before byte `at`, from it on, and the rest."""
    data = text.encode()
    pieces = (data[max(0, at - LONG) : at], data[at : at + SHOWN], data[at + SHOWN : at + SHOWN + LONG])
    before, behind, rest = (piece.decode(errors="replace") for piece in pieces)
    return f"…{before}" if at > LONG else before, behind, rest


def reproduction(audit: Audit, difference: Difference, concurrent: Questions, key: str) -> str:
    """Return a minimal script that reproduces a difference between both servers.

    `concurrent` holds the questions asked concurrently; `key` is a secret that the script must not contain.
    """

    def literal(value: Any) -> str:
        return json.dumps(cleaned(value, key), indent=1).replace('"""', "\\u0022\\u0022\\u0022")

    sides = audit.asker.sides
    questions = [*(concurrent or difference.before), difference.question]
    return ENVIRONMENT.get_template("reproduce.py.j2").render(
        d=difference,
        urls=[sides[side].url for side in SIDES],
        key=audit.config.client.api_key_env,
        requests=literal([{"path": one.path, "body": audit.asker.body(AUDITED, one)} for one in questions]),
        extra=literal([sides[side].config.extra for side in SIDES]),
        near_tie=audit.near_tie,
        alternative=ALTERNATIVE,
    )


def cleaned(value: Any, key: str) -> Any:
    """Return a JSON value without secrets: the key, and strings that look like secrets."""
    text = json.dumps(redacted_values(value), allow_nan=False)
    return json.loads(text.replace(json.dumps(key)[1:-1], HIDDEN) if len(key) >= SHORTEST else text)


class Verdict(NamedTuple):
    """An audit's verdict in a sentence, and the fault it points to, if any."""

    status: Status
    sentence: str
    fault: str


def audited(config: AuditConfig) -> Verdict:
    """Audit a server against its baseline; write audit.json, audit.html and a reproduction, and print the verdict.

    Refuse a server that does not answer at first or serves another model. One that goes away later, a budget that is
    used up and an interruption leave what was measured until then.
    """
    out, client = Path(config.out).expanduser(), config.client
    check_writable(out, "out")
    server = Server(config.url, client, "url")
    plain = replace(client, extra={**client.extra, **config.plain})
    baseline = Server(config.baseline or config.url, plain, BASELINE)
    baseline.check_baseline_of(server)
    sides = {AUDITED: server, BASELINE: baseline}
    selection = Selection(config.prompts, 0, False, "first", True)
    questions = [
        question
        for name in (workload_names(config.workload) if config.workload else [])
        for question in read_questions(name, selection, client.chat).prompts
    ] or [ask_text(f"built-in {i}", text, client.chat) for i, text in enumerate(config.questions[: config.prompts])]
    settings = {"temperature": 0.0, "max_tokens": config.max_new_tokens, "top_p": 1.0, "seed": config.seed}
    with Bar(None, "requests of the audit") as bar:
        asker = Asker(sides, config, settings, bar)
        audit = Audit(asker, questions, config)
        findings = run(audit)
    verdict = verdict_of(findings, asker.ended, audit.near_tie)
    key = os.environ.get(client.api_key_env) or ""
    options = {name: value for name, value in asdict(config).items() if name not in ASKED}
    record = cleaned({
        "schema": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": server.model,
        **{side: sides[side].url for side in SIDES},
        "verdict": verdict._asdict(),
        "requests": asker.requests,
        "minutes": round(asker.minutes, 2),
        "settings": {**options, "near_tie": audit.near_tie, "prompts": len(questions)},
        "findings": [
            {
                **{key: getattr(one, key) for key in ("check", "status", "summary", "fault", "figures")},
                "differences": [difference_record(difference) for difference in clearest(one.differences)[:3]]
            }
            for one in findings
        ],
    }, key)  # fmt: skip
    texts = {JSON: json.dumps(record, indent=1, allow_nan=False), PAGE: rendered("audit.html.j2", record)}
    lines = f"{rendered('audit.txt.j2', record)}audit: {out / JSON} and {out / PAGE}"
    (out / REPRODUCTION).unlink(missing_ok=True)  # left by an earlier audit
    failed = [difference for one in findings if one.status == "failed" for difference in one.differences]
    if shown := clearest(failed, verdict.fault):
        difference = shown[0]
        concurrent = cycled(questions, difference.in_flight)[1 : difference.in_flight]
        texts[REPRODUCTION] = reproduction(audit, difference, concurrent, key)
        lines += f"\nreproduction: python {out / REPRODUCTION} {server.url} {baseline.url}"
    for name, text in texts.items():
        atomic_write(out / name, text.encode(errors="replace"))
    print(visible(lines))
    return verdict


def run(audit: Audit) -> list[Finding]:
    """Run all checks and return their findings, speed last; `audit.asker.ended` is the reason of an early end."""
    findings = []
    asker, server = audit.asker, audit.asker.sides[AUDITED]
    before = server.reading()
    for check, function in CHECKS.items():
        finding = Finding("not_run", "the audit ended before")
        try:
            finding = finding if asker.ended else function(audit)
        except (EndedError, KeyboardInterrupt) as error:
            asker.ended = str(error) or "interrupted"
            finding.summary = asker.ended
            if asker.crash is not None:
                question, in_flight = asker.crash
                crash = violation(question, "", "", "crash", f"{asker.ended}, while the baseline answers")
                finding = Finding("failed", asker.ended, [crash._replace(in_flight=in_flight)])
        finding.check = check
        findings.append(finding)
    return [*findings, speed(audit, before, server.reading())]


def verdict_of(findings: list[Finding], ended: str, near_tie: float) -> Verdict:
    """Return the verdict on all findings; `near_tie` is the threshold of near ties in nats."""
    failed, undecided = ([one for one in findings if one.status == s] for s in ("failed", "undecided"))
    then = f", then {ended}" if ended else ""
    if failed:
        sentence = f"not lossless: {', '.join(one.check for one in failed)} failed{then}"
        return Verdict("failed", sentence, diagnosed(findings))
    held = f"no fault in {sum(one.status == 'passed' for one in findings[:-1])} checks"
    unjudged = [f"{one.check} cannot be judged: {one.summary}" for one in undecided if not one.differences]
    names = ", ".join(one.check for one in undecided)
    doubts = [
        held + then if ended else "",
        f"nothing could be compared: {findings[0].summary}" if findings[0].status == "not_offered" else "",
        "" if findings[-1].figures["drafts"] != 0 else f"{held}, but the server counts no drafts: does it speculate?",
        f"the baseline left its own answers across {near_tie / 2:.1f} nats: is it greedy?" * (near_tie > WAVERING),
        *(f"{held}, but {doubt}" for doubt in unjudged),
        f"answers differ in {names}, and no logprobs say whether at near ties" if undecided else "",
    ]
    doubt = next(filter(None, doubts), "")
    return Verdict("undecided", doubt, "") if doubt else Verdict("passed", held, "")


def clearest(differences: list[Difference], fault: str = "") -> list[Difference]:
    """Return the differences in order: faults first, `fault` before other faults, then by decreasing gap."""
    return sorted(differences, key=lambda d: (d.kind != "fault", d.fault != fault, -(d.gap or 0.0)))


def speed(audit: Audit, before: Counters | None, after: Counters | None) -> Finding:
    """Return the speedup at each number of requests in flight, and the server's count of drafts, if known."""
    rates = {key: tokens / audit.seconds[key] for key, tokens in audit.tokens.items() if tokens and audit.seconds[key]}
    loads = {
        size: rates[AUDITED, size] / rates[BASELINE, size]
        for side, size in sorted(rates)
        if side == AUDITED and (BASELINE, size) in rates
    }
    losing, drafts = stops_paying(loads), None
    if before is not None and after is not None and not restarted(before, after):
        first, last = (c.draft_tokens if c.drafts is None else c.drafts for c in (before, after))
        drafts = round((last or 0) - (first or 0))
    texts = [f"{speedup:.2f}x with {size} in flight" for size, speedup in loads.items()]
    texts += [] if losing is None else [f"speculation loses from {losing} in flight on"]
    figures = {"speedup": loads, "loses_from": losing, "drafts": drafts}
    return Finding("passed" if loads else "not_run", "; ".join(texts) or "nothing was timed", [], figures, "speed")


def stops_paying(gains: Mapping[int, float]) -> int | None:
    """Return the smallest load beyond which no speedup is above 1; None if the largest load still has one."""
    return min(takewhile(lambda size: gains[size] <= 1, sorted(gains, reverse=True)), default=None)


@command("ops/audit")
def main(cfg: DictConfig) -> None:
    """Audit; exit with 0 if the server passed, 1 if it failed, 2 for invalid input, 3 if undecided."""
    raise SystemExit({"passed": 0, "failed": 1}.get(audited(typed(AuditConfig, cfg)).status, 3))


if __name__ == "__main__":
    main()
