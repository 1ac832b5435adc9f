"""An audit's results: audit.json, the page and the terminal's lines, and a reproduction of a fault."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from heads.common.redact import HIDDEN, SHORTEST, redacted_values
from heads.common.resolvers import ROOT
from ops.audits.checks import ALTERNATIVE
from ops.audits.compare import AUDITED, BASELINE, SIDES, Audit, Bound, Difference, Finding
from ops.served import Json, Question

STYLE = ROOT / "eval" / "report" / "page.css"
SHOWN = 60  # bytes of a text around a difference in the terminal, and before it on the page
LONG = 400
ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=lambda name: "html" in str(name),
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip


def finding_record(finding: Finding) -> Json:
    """Return a finding in audit.json, with its clearest few differences."""
    shown = sorted(finding.differences, key=lambda d: (d.kind != "fault", -(d.gap or 0)))[:3]
    record = {key: getattr(finding, key) for key in ("check", "status", "summary", "fault", "figures")}
    return {**record, "differences": [difference_record(difference) for difference in shown]}


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
    values = {"headline": headline, "cut": cut, "sides": SIDES, "style": style}
    return ENVIRONMENT.get_template(template).render(record=record, **values)


def cut(text: str, at: int) -> tuple[str, str, str]:
    """Return three shortened parts of a text: before a byte, from the byte on, and the rest."""
    data = text.encode()
    pieces = (data[max(0, at - LONG) : at], data[at : at + SHOWN], data[at + SHOWN : at + SHOWN + LONG])
    before, behind, rest = (piece.decode(errors="replace") for piece in pieces)
    return f"…{before}" if at > LONG else before, behind, rest


def reproduction(audit: Audit, difference: Difference, company: Sequence[Question], key: str) -> str:
    """Return a minimal script that reproduces a difference between both servers.

    `company` holds the concurrent questions; `key` is the secret that the script must not contain.
    """

    def literal(value: Any) -> str:
        return json.dumps(cleaned(value, key), indent=1).replace('"""', "\\u0022\\u0022\\u0022")

    sides, questions = audit.asker.sides, [*(company or difference.before), difference.question]
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
    """Return a JSON value without secrets: the key, and texts that look like one."""
    text = json.dumps(redacted_values(value), allow_nan=False)
    return json.loads(text.replace(json.dumps(key)[1:-1], HIDDEN) if len(key) >= SHORTEST else text)
