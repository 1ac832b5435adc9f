"""Tool calls, of a named function and of the model's own choice: whole, and the baseline's but for near ties.

Parsers of calls read a pass at a time, so a fault of theirs may show in streams alone, and with tool_choice auto alone.
The logprobs of whole replies say whether tokens differ or their parser.
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from eval.audit.ask import AUDITED, BASELINE, ask_text
from eval.audit.compare import (
    EXPLAINED,
    FAULT,
    NEAR_TIE,
    NOT_OFFERED,
    Audit,
    Difference,
    Finding,
    breach,
    gap_at,
    kind_of,
    lead,
    status_of,
    unstreamed,
    with_logprobs,
)  # fmt: skip
from eval.audit.properties import CITIES, SCHEMA, schema_breach
from eval.endpoint.questions import Question
from eval.endpoint.replies import Reply, Token
from eval.measures.losslessness import shared_length

NAME = "report_weather"
AUTO = "auto"
TOOL = {"type": "function", "function": {"name": NAME, "description": "Report the weather.", "parameters": SCHEMA}}
WAYS: dict[str, Any] = {"named": {"type": "function", "function": {"name": NAME}}, AUTO: AUTO}
SAME, OTHER, NOT_CALLED, BROKEN = "the baseline's", "other", "no call of the baseline's", "broken by the baseline too"


class Outcome(NamedTuple):
    """What came of a question: one of the above, the baseline's error, and a difference where there is one."""

    name: str
    error: str = ""
    difference: Difference | None = None


def tool_calls(audit: Audit) -> Finding:
    """Ask for a call of a named function, and once more with the choice left to the model."""
    summaries, differences = [], []
    for way in WAYS:
        outcomes = audit.asker.taken(called(audit, question) for question in questions_of(audit, way))
        counts = Counter(outcome.name for outcome in outcomes)
        differences += [outcome.difference for outcome in outcomes if outcome.difference is not None]
        if count := counts[SAME] + counts[OTHER]:
            texts = [f"{way}: {counts[SAME]} of {count} calls are the baseline's"]
            summaries.append(", ".join([*texts, *(f"{counts[n]} {n}" for n in (NOT_CALLED, BROKEN) if counts[n])]))
        elif outcomes:
            summaries.append(f"{way}: not offered, {outcomes[-1].error or outcomes[-1].name}")
    kinds = Counter(difference.kind for difference in differences)
    summaries += [f"{kinds[NEAR_TIE]} differ at a near tie"] if kinds[NEAR_TIE] else []
    if not any("calls are" in summary for summary in summaries):
        return Finding("tool_calls", NOT_OFFERED, "; ".join(summaries) or "no such questions")
    return Finding("tool_calls", status_of(kinds), "; ".join(summaries), differences)


def questions_of(audit: Audit, way: str) -> list[Question]:
    """Return the questions of a way to ask for calls; none but to a chat."""
    fields = {"tools": [TOOL], "tool_choice": WAYS[way], "max_tokens": 4 * audit.tokens}
    return [
        ask_text(f"tool {way} {city}", f"It is {7 + 3 * i} degrees and sunny in {city}: report it.", True, **fields)
        for i, city in enumerate(CITIES if audit.chat else ())
    ]


def called(audit: Audit, question: Question) -> Outcome:
    """Return what comes of a question to both servers."""
    theirs, ours = (audit.asker.one(side, question) for side in (BASELINE, AUDITED))
    if theirs.error or not theirs.calls:
        return Outcome(NOT_CALLED, theirs.error)
    if parsed(ours) == parsed(theirs):
        return Outcome(SAME)
    listed = unstreamed(with_logprobs(question))
    whole = audit.asker.taken(audit.asker.one(BASELINE, listed) for _ in range(EXPLAINED))
    right = [theirs, *(reply for reply in whole if not reply.error)]
    if parsed(ours) in map(parsed, right) and not ours.error:
        return Outcome(SAME)
    if any(breach_of(question, reply) for reply in right):
        return Outcome(BROKEN)
    again = audit.asker.taken(audit.asker.one(AUDITED, listed) for _ in range(1))
    return Outcome(OTHER, "", difference_of(question, ours, right, again, audit.comparer.near_tie))


def difference_of(
    question: Question, ours: Reply, right: Sequence[Reply], again: Sequence[Reply], near_tie: float
) -> Difference:
    """Return the difference of a reply from all right ones; `again` are the audited server's, whole and with tokens."""
    theirs = right[0]
    if ours.error:
        return breach(question, ours.content, theirs.content, "error", ours.error)
    listed = [reply.tokens for reply in right if reply.tokens]
    mine = [reply.tokens for reply in again if reply.tokens and not reply.error and parsed(reply) == parsed(ours)]
    note = breach_of(question, ours) or "another call than the baseline's"
    gap: float | None = None
    kind = FAULT
    if listed and mine and any(texts_of(mine[0]) == texts_of(tokens) for tokens in listed):
        note = f"the baseline's tokens, read as another call: {note}"
    elif listed and mine:
        gap = max((token_gap(tokens, mine[0]) for tokens in listed), key=lambda seen: seen[0])[1]
        kind = kind_of(gap, near_tie)
    elif breach_of(question, ours) is None:  # the tokens of a call that comes in streams alone are not at hand
        gap = next((gap for reply in right if (gap := written_gap(reply, ours)) is not None), None)
        ties = [tie for tokens in listed if (tie := nearest_tie(tokens)) is not None]
        kind = kind_of(min(ties, default=None) if gap is None else gap, near_tie)
    fault, note = ("tool_call", note) if kind == FAULT else ("", "")
    return breach(question, ours.content, theirs.content, fault, note)._replace(gap=gap, kind=kind)


def written_gap(theirs: Reply, ours: Reply) -> float | None:
    """Return the gap where the arguments of a call differ, as far as its tokens write them as they are sent."""
    raw = b"".join(texts_of(theirs.tokens)).decode(errors="replace")
    if len(theirs.calls) != 1 or len(ours.calls) != 1 or theirs.calls[0][0] != ours.calls[0][0]:
        return None
    before, arguments, after = raw.rpartition(theirs.calls[0][1])
    return gap_at(theirs._replace(text=raw), before + ours.calls[0][1] + after, {})[1] if arguments else None


def breach_of(question: Question, reply: Reply) -> str | None:
    """Return how a reply's calls are broken, whatever the model; None where they are whole."""
    if question.body["tool_choice"] == AUTO:
        broken = [text for _, text in reply.calls if reply.finish != "length" and not isinstance(_parsed(text), dict)]
        return f"{broken[0]!r} is no JSON" if broken else None
    if len(reply.calls) != 1 or reply.calls[0][0] != NAME:
        return f"no call of {NAME}: {reply.content!r}"
    return schema_breach(reply.calls[0][1], reply.finish)


def parsed(reply: Reply) -> list[tuple[str, Any]]:
    """Return a reply's calls, each by its name and its arguments as values; a text where they are no JSON."""
    return [(name, _parsed(arguments)) for name, arguments in reply.calls]


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def texts_of(tokens: Sequence[Token]) -> list[bytes]:
    """Return the texts of tokens."""
    return [token.text for token in tokens]


def token_gap(theirs: Sequence[Token], ours: Sequence[Token]) -> tuple[int, float | None]:
    """Return which token of two answers differs first, and by how many nats the first answer's is likelier there."""
    at = shared_length(texts_of(theirs), texts_of(ours))
    if at == len(theirs):
        return at, None
    rest = b"".join(texts_of(ours)[at:])
    return at, lead(theirs[at].logprob, theirs[at].top, theirs[at].text, rest)


def nearest_tie(tokens: Sequence[Token]) -> float | None:
    """Return the smallest lead of an answer's tokens over the next most probable ones; None where that is not said."""
    leads = [lead(token.logprob, token.top, token.text, b"") for token in tokens]
    numbers = [value for value in leads if value is not None]
    return min(numbers) if tokens and len(numbers) == len(leads) else None
