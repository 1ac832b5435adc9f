"""An audit's results: audit.json, the page and the terminal's lines, and a reproduction of a fault."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from heads.common.redact import HIDDEN, SHORTEST, redacted_values
from heads.common.resolvers import ROOT
from ops.audits.ask import AUDITED, BASELINE, SIDES
from ops.audits.compare import FAILED, FAULT, FAULTS, NEAR_TIE, PASSED, UNEXPLAINED, Audit, Bound, Difference, Finding
from ops.audits.properties import ALTERNATIVE
from ops.served import Question

STYLE = ROOT / "eval" / "report" / "page.css"
SHOWN = 60  # bytes of a text around a difference in the terminal, and before it on the page
LONG = 400
KINDS = {FAULT: "a fault", NEAR_TIE: "a near tie",
         UNEXPLAINED: "not explained: the baseline's logprobs do not say how near"}  # fmt: skip
ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=lambda name: "html" in str(name),
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip
SAMPLED = 256  # answers of either server to a sampled request
ROUNDS = 8  # of requests in flight together, which do not meet alike each time


def finding_record(finding: Finding, title: str) -> dict[str, Any]:
    """Return a finding in audit.json, with its clearest few differences."""
    shown = sorted(finding.differences, key=lambda d: (d.kind != FAULT, -(d.gap or 0)))[:3]
    keys = ("check", "status", "summary", "fault", "figures")
    return {
        **{key: getattr(finding, key) for key in keys},
        "title": title,
        "differences": [difference_record(difference) for difference in shown],
    }


def difference_record(difference: Difference) -> dict[str, Any]:
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


def headline(record: dict[str, Any]) -> str:
    """Return the verdict in one sentence for everybody."""
    status, sentence, fault = (record["verdict"][key] for key in ("status", "sentence", "fault"))
    if status == FAILED:
        return f"NOT LOSSLESS: {FAULTS.get(fault, sentence)}."
    text = f"{'Lossless as far as it was checked' if status == PASSED else 'Undecided'}: {sentence}"
    alone = record["findings"][-1]["figures"]["speedup"].get("1")
    return f"{text}; {alone:.2f} times as fast, one request at a time." if alone else f"{text}."


def terminal(record: dict[str, Any]) -> Iterator[str]:
    """Yield the lines for a terminal."""
    yield f"{record['model']} at {record['audited']}, against {record['baseline']}"
    for finding in record["findings"]:
        yield f"  {finding['status'].replace('_', ' '):11} {finding['title']}: {finding['summary']}"
        if finding["status"] == FAILED:
            yield f"{'':14}{one_line(finding['differences'][0])}"
    yield headline(record)
    yield f"{record['requests']} requests in {record['minutes']:.1f} minutes"


def one_line(difference: dict[str, Any]) -> str:
    """Return a difference in a line: where, and what both servers wrote there."""
    if difference["note"]:
        return f"prompt {difference['id']}: {difference['note']}"
    at = difference["at"]
    ours, theirs = (difference[side].encode()[at : at + SHOWN].decode(errors="replace") for side in SIDES)
    return f"prompt {difference['id']}, byte {at}: {ours!r} instead of {theirs!r}{gap_of(difference)}"


def gap_of(difference: dict[str, Any]) -> str:
    """Return by how much the baseline prefers its own answer, as the end of a sentence; empty where it is not known."""
    least = " at least" if difference["at_least"] else ""
    return "" if difference["gap"] is None else f",{least} {difference['gap']:.2f} nats less likely to the baseline"


def page(record: dict[str, Any]) -> str:
    """Return the page, which loads nothing from anywhere; texts of servers are escaped by the template."""
    style = Markup(STYLE.read_text(encoding="utf-8"))
    return ENVIRONMENT.get_template("audit.html.j2").render(
        record=record, headline=headline(record), kinds=KINDS, cut=cut, gap_of=gap_of, sides=SIDES, style=style
    )


def cut(text: str, at: int) -> tuple[str, str, str]:
    """Return a text before a byte, behind it, and what follows, each as long as it is read."""
    data = text.encode()
    pieces = (data[max(0, at - LONG) : at], data[at : at + SHOWN], data[at + SHOWN : at + SHOWN + LONG])
    before, behind, rest = (piece.decode(errors="replace") for piece in pieces)
    return f"…{before}" if at > LONG else before, behind, rest


def reproduction(audit: Audit, difference: Difference, company: Sequence[Question], key: str) -> str:
    """Return a script that asks both servers what showed a difference, and no more.

    `company` are questions that were in flight together with it; `key` is the secret that it must not hold.
    """
    asker, fault, question = audit.asker, difference.fault, difference.question
    together, seed = difference.in_flight > 1, fault == "seed"

    def literal(value: Any) -> str:
        return json.dumps(cleaned(value, key), indent=1).replace('"""', "\\u0022\\u0022\\u0022")

    questions = [*(company if together else difference.before), question]
    return ENVIRONMENT.get_template("reproduce.py.j2").render(
        title=f"With speculative decoding: {FAULTS.get(fault, 'the answers of both servers differ')}.",
        audited=asker.sides[AUDITED].url,
        baseline=asker.sides[BASELINE].url,
        key=audit.config.client.api_key_env,
        requests=literal([{"path": one.path, "body": asker.body(AUDITED, one)} for one in questions]),
        extra=literal([asker.sides[side].config.extra for side in SIDES]),
        in_flight=difference.in_flight,
        rounds=ROUNDS if together else 1,
        cancel=fault == "cancelled",
        samples=SAMPLED if question.body.get("temperature") and not seed else 1,
        near_tie=audit.comparer.near_tie,
        alternative=ALTERNATIVE,
        twice=seed,
    )


def cleaned(value: Any, key: str) -> Any:
    """Return a JSON value without secrets: the key, and texts that look like one."""
    text = json.dumps(redacted_values(value), allow_nan=False)
    return json.loads(text.replace(json.dumps(key)[1:-1], HIDDEN) if len(key) >= SHORTEST else text)
