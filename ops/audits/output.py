"""An audit's page and its lines for a terminal: audit.json in words."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from heads.common.redact import HIDDEN, SHORTEST, redacted_values
from heads.common.resolvers import ROOT
from ops.audits.ask import AUDITED, BASELINE, SIDES
from ops.audits.compare import (
    FAILED,
    FAULT,
    FAULTS,
    NEAR_TIE,
    NOT_OFFERED,
    NOT_RUN,
    PASSED,
    UNDECIDED,
    UNEXPLAINED,
    Audit,
    Difference,
)  # fmt: skip
from ops.audits.properties import ALTERNATIVE
from ops.served.exchange import Question

HERE = Path(__file__).parent
STYLE = ROOT / "eval" / "report" / "page.css"
SHOWN = 60  # bytes of a text around a difference in the terminal, and before it on the page
LONG = 400
WIDTH, HEIGHT, EDGE = 640, 260, 56  # of the plot, in its own units

STATUSES = {PASSED: "passed", FAILED: "FAILED", UNDECIDED: "undecided", NOT_OFFERED: "not offered",
            NOT_RUN: "not run"}  # fmt: skip
KINDS = {FAULT: "a fault", NEAR_TIE: "a near tie",
         UNEXPLAINED: "not explained: the baseline's logprobs do not say how near"}  # fmt: skip


def headline(record: dict[str, Any]) -> str:
    """Return the verdict in one sentence for everybody."""
    verdict = record["verdict"]
    fault = FAULTS[verdict["fault"]].what if verdict["fault"] in FAULTS else ""
    text = {
        PASSED: f"Lossless as far as it was checked: {verdict['sentence']}",
        FAILED: f"NOT LOSSLESS: {fault or verdict['sentence']}",
        UNDECIDED: f"Undecided: {verdict['sentence']}",
    }[verdict["status"]]
    loads = loads_of(record)
    if not loads or verdict["status"] == FAILED:
        return f"{text}."
    return f"{text}; {loads[0]['speedup']:.2f} times as fast, one request at a time."


def loads_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the speeds of an audit at each number of requests in flight."""
    return next((f["figures"]["loads"] for f in record["findings"] if f["check"] == "speed"), [])


def terminal(record: dict[str, Any]) -> Iterator[str]:
    """Yield the lines for a terminal."""
    yield f"{record['model']} at {record['audited']}, against {record['baseline']}"
    for finding in record["findings"]:
        measured = finding["check"] == "speed" and finding["status"] == PASSED
        status = "measured" if measured else STATUSES[finding["status"]]
        yield f"  {status:11} {finding['title']}: {finding['summary']}"
        for difference in finding["differences"] if finding["status"] == FAILED else ():
            yield f"{'':14}{one_line(difference)}"
            break
    yield headline(record)
    yield f"{record['requests']} requests in {record['minutes']:.1f} minutes"


def one_line(difference: dict[str, Any]) -> str:
    """Return a difference in a line: where, and what both servers wrote there."""
    at = difference["at"]
    if difference["note"]:
        return f"prompt {difference['id']}: {difference['note']}"
    ours, theirs = (difference[side].encode()[at : at + SHOWN].decode(errors="replace") for side in SIDES)
    return f"prompt {difference['id']}, byte {at}: {ours!r} instead of {theirs!r}{gap_of(difference)}"


def gap_of(difference: dict[str, Any]) -> str:
    """Return by how much the baseline prefers its own answer, as the end of a sentence; empty where it is not known."""
    least = " at least" if difference["at_least"] else ""
    return "" if difference["gap"] is None else f",{least} {difference['gap']:.2f} nats less likely to the baseline"


def page(record: dict[str, Any]) -> str:
    """Return the page, which loads nothing from anywhere; texts of servers are escaped by the template."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("audit.html.j2").render(
        record=record,
        headline=headline(record),
        fault=FAULTS.get(record["verdict"]["fault"]),
        statuses=STATUSES,
        kinds=KINDS,
        failed=FAILED,
        cut=cut,
        gap_of=gap_of,
        plot=plot(record),
        sides=SIDES,
        style=Markup(STYLE.read_text(encoding="utf-8")),
    )


def cut(text: str, at: int) -> tuple[str, str, str]:
    """Return a text before a byte, behind it, and what follows, each as long as it is read."""
    data = text.encode()
    parts = (data[max(0, at - LONG) : at], data[at : at + SHOWN], data[at + SHOWN : at + SHOWN + LONG])
    before, behind, rest = (piece.decode(errors="replace") for piece in parts)
    return f"…{before}" if at > LONG else before, behind, rest


def plot(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the curves of throughput against the speed of one user, in the plot's units; None without two loads."""
    loads = loads_of(record)
    if len(loads) < 2:
        return None
    most = [max(load[key][side] for load in loads for side in SIDES) for key in ("user", "throughput")]
    curves = []
    for side in SIDES:
        points = [
            (
                EDGE + (WIDTH - 2 * EDGE) * load["user"][side] / most[0],
                HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * load["throughput"][side] / most[1],
                load["in_flight"],
            )
            for load in loads
        ]
        curves.append({"side": side, "points": points})
    return {"width": WIDTH, "height": HEIGHT, "edge": EDGE, "most": most, "curves": curves}


TEMPLATE = Path(__file__).parent / "reproduce.py.j2"
SAMPLED = 256  # answers of either server to a sampled request
ROUNDS = 8  # of requests in flight together, which do not meet alike each time


def reproduction(audit: Audit, difference: Difference, variable: str, company: Sequence[Question], key: str) -> str:
    """Return a script that asks both servers what showed a difference, and no more.

    `company` are questions that were in flight together with it; `variable` is the environment's that holds the key.
    """
    asker = audit.asker
    before = company if difference.in_flight > 1 else difference.before
    questions = [*before, difference.question]
    requests = [{"path": question.path, "body": asker.body(AUDITED, question)} for question in questions]
    seed = difference.fault == "seed"
    what = FAULTS[difference.fault].what if difference.fault in FAULTS else "the answers of both servers differ"
    environment = Environment(keep_trailing_newline=True, trim_blocks=True, undefined=StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"With speculative decoding: {what}.",
        name="reproduce.py",
        audited=asker.sides[AUDITED].url,
        baseline=asker.sides[BASELINE].url,
        key=variable,
        requests=_literal(requests, key),
        extra=_literal([asker.sides[side].config.extra for side in SIDES], key),
        in_flight=difference.in_flight,
        rounds=ROUNDS if difference.in_flight > 1 else 1,
        cancel=difference.fault == "cancelled",
        samples=SAMPLED if difference.question.body.get("temperature") and not seed else 1,
        near_tie=audit.comparer.near_tie,
        alternative=ALTERNATIVE,
        twice=seed,
    )


def cleaned(value: Any, key: str) -> Any:
    """Return what JSON says without secrets: the key, and what looks like one."""
    text = json.dumps(redacted_values(value), allow_nan=False)
    return json.loads(text.replace(json.dumps(key)[1:-1], HIDDEN) if len(key) >= SHORTEST else text)


def _literal(value: Any, key: str) -> str:
    return json.dumps(cleaned(value, key), indent=1).replace('"""', "\\u0022\\u0022\\u0022")
