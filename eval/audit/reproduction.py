"""A minimal reproduction of a difference as one script of the standard library, to be attached to a report upstream."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from eval.audit.ask import AUDITED, BASELINE, Asker, Question
from eval.audit.compare import Difference
from eval.audit.faults import FAULTS

TEMPLATE = Path(__file__).parent / "reproduce.py.j2"
SAMPLED = 64  # answers of either server to a sampled request


def reproduction(asker: Asker, difference: Difference, key: str, company: Sequence[Question]) -> str:
    """Return a script that asks both servers what showed a difference, and no more.

    `company` are questions that were in flight together with it; `key` is the environment variable of the key.
    """
    before = company if difference.in_flight > 1 else difference.before
    requests = [_request(asker, question) for question in [*before, difference.question]]
    seed = difference.fault == "seed"
    what = FAULTS[difference.fault].what if difference.fault in FAULTS else "the answers of both servers differ"
    environment = Environment(keep_trailing_newline=True, trim_blocks=True, undefined=StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"With speculative decoding: {what}.",
        name="reproduce.py",
        audited=asker.sides[AUDITED].url,
        baseline=asker.sides[BASELINE].url,
        key=key,
        requests=json.dumps(requests, indent=1).replace('"""', "\\u0022\\u0022\\u0022"),
        in_flight=difference.in_flight,
        samples=SAMPLED if difference.question.body.get("temperature") and not seed else 1,
        twice=seed,
    )


def _request(asker: Asker, question: Question) -> dict[str, Any]:
    body = {"model": asker.sides[AUDITED].model, **asker.settings, **question.body}
    return {"path": question.path, "body": body}
