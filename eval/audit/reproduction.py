"""A minimal reproduction of a difference as one script of the standard library, to be attached to a report upstream."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from eval.audit.ask import AUDITED, BASELINE, SIDES
from eval.audit.compare import Audit, Difference
from eval.audit.faults import FAULTS
from eval.audit.properties import ALTERNATIVE
from eval.endpoint.questions import Question
from heads.common.redact import HIDDEN, SHORTEST, redacted_values

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
