"""Checks of a reply by itself: limits, stop strings, counts, logprobs, schemas, tool calls.

Both servers are asked; a property that the baseline breaks too is noted, but is no fault of speculation.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from data.answers.client import FINISH_REASONS
from ops.audits.ask import AUDITED, BASELINE, ask_text
from ops.audits.compare import Audit, Difference, Finding, breach, unstreamed, with_logprobs
from ops.audits.greedy import MANY
from ops.served import Question, Reply

Holds = Callable[[Question, Reply, Reply], str | None]  # of the audited server's reply and the baseline's: the breach

LIMITS = (1, 2, 3, 5, 8)
# Times the tolerance of a chosen token's logprob: an alternative's rounds with two logits. SmolLM2-135M in bfloat16, in
# passes of one token and of four: at most 0.50 nats apart (0.17 of chosen tokens), 0.06 in the mean.
ALTERNATIVE = 2
TYPES = {"city": str, "degrees": int}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "degrees": {"type": "integer"}},
    "required": [*TYPES],
    "additionalProperties": False,
}
CITIES = ("Paris", "Lima", "Oslo", "Cairo", "Delhi", "Quito")
FUNCTION = {"name": "report_weather", "description": "Report the weather.", "parameters": SCHEMA}


def limits(audit: Audit) -> Finding:
    """Ask for a few tokens: the reply must be a prefix of the longer answer, with the baseline's finish reason."""
    questions = [
        question.having(f"of {limit} tokens", max_tokens=limit)
        for question, limit in zip(audit.questions[:MANY], LIMITS * MANY, strict=False)
    ]

    def holds(question: Question, ours: Reply, theirs: Reply) -> str | None:
        limit, count = question.body["max_tokens"], ours.completion_tokens
        if ours.text == theirs.text:  # the count is a separate check
            if ours.finish == theirs.finish or theirs.finish not in FINISH_REASONS:
                return None
            return f"the baseline's text of {limit} tokens, finish_reason {ours.finish} and not {theirs.finish}"
        if count is None:
            return None
        if count == limit or (count < limit and ours.finish == "stop"):
            short = theirs.text.startswith(ours.text) and ours.finish == "length"
            return f"{limit} tokens: {ours.text!r} is cut short" if short else None
        return f"{count} tokens where max_tokens is {limit}, finish_reason {ours.finish}"

    return checked(audit, "limits", "limit", questions, holds)


def stop_strings(audit: Audit) -> Finding:
    """Ask to stop at a string in the middle of an answer."""
    questions = []
    for question in audit.questions[:MANY]:
        if (stop := stop_in(audit.answers[question.content][0].text)) is not None:
            questions.append(question.having("with a stop string", stop=[stop]))

    def holds(question: Question, ours: Reply, theirs: Reply) -> str | None:
        (stop,) = question.body["stop"]
        if stop in ours.text:
            return f"the stop string {stop!r} is in the text"
        if theirs.finish == "stop" and ours.finish != "stop" and ours.text.startswith(theirs.text):
            return f"finish_reason {ours.finish} where the baseline stops at {stop!r}"
        return None

    return checked(audit, "stop_strings", "stop_string", questions, holds)


def stop_in(text: str) -> str | None:
    """Return a word in the middle of a text that does not occur earlier, with the space before it."""
    words = (m for m in re.finditer(r"\s\S{3,12}", text) if m.start() >= len(text) // 3)
    return next((m[0] for m in words if m[0] not in text[: m.start()]), None)


def usage(audit: Audit) -> Finding:
    """Compare the token counts with the baseline's for the same text."""

    def holds(_: Question, ours: Reply, theirs: Reply) -> str | None:
        if ours.prompt_tokens != theirs.prompt_tokens:
            return f"{ours.prompt_tokens} tokens of the prompt, the baseline counts {theirs.prompt_tokens}"
        if ours.content == theirs.content and ours.completion_tokens != theirs.completion_tokens:
            return f"{ours.completion_tokens} tokens of the same text, the baseline counts {theirs.completion_tokens}"
        return None

    return checked(audit, "usage", "usage", audit.questions[:MANY], holds)


def logprobs_hold(audit: Audit) -> Finding:
    """Compare the logprobs with the text, and with the baseline's of the same tokens."""
    questions = [with_logprobs(question) for question in audit.questions[:MANY]]
    questions = [*questions, *map(unstreamed, questions)]
    tolerance = audit.near_tie

    def holds(_: Question, ours: Reply, theirs: Reply) -> str | None:
        if not theirs.tokens:
            return None
        if not ours.tokens:
            return "no logprobs"
        same = takewhile(lambda pair: pair[0].text == pair[1].text, zip(ours.tokens, theirs.tokens, strict=False))
        pairs = [(i, one, other) for i, (one, other) in enumerate(same)]
        chosen = [(i, one.logprob, other.logprob) for i, one, other in pairs]
        tops = [(i, *values) for i, one, other in pairs for values in listed(one.top, other.top)]
        counts = [(i, min(len(one.top), len(other.top)), len(other.top)) for i, one, other in pairs]
        alternative = "an alternative to token {} has {:.3f} where the baseline has {:.3f}"
        return (
            apart("token {} has {:.3f} where the baseline has {:.3f}", tolerance, chosen)
            or apart(alternative, ALTERNATIVE * tolerance, tops)
            or apart("token {} lists {} alternatives where the baseline lists {}", 1, counts)
        )

    if not audit.asker.one(BASELINE, questions[0]).tokens:
        return Finding("logprobs", "not_offered", "the baseline gives no logprobs")
    return checked(audit, "logprobs", "logprobs", questions, holds)


def apart(note: str, most: float, values: Sequence[tuple[int, float, float]]) -> str | None:
    """Return a note on the pair with the largest difference, with its token's index.

    They differ by more than `most` in one pair, or by more than a quarter of it in the mean.
    """
    gaps = [abs(one - other) for _, one, other in values]
    if not gaps or (max(gaps) <= most and sum(gaps) / len(gaps) <= most / 4):
        return None
    return note.format(*values[gaps.index(max(gaps))])


def listed(one: Mapping[bytes, float], other: Mapping[bytes, float]) -> list[tuple[float, float]]:
    """Pair the logprobs of two top lists; a token missing in one list is below that list's last."""
    if not one or not other:
        return []
    least = min(one.values()), min(other.values())
    return [
        (one.get(token, min(least[0], value)), other.get(token, min(least[1], value)))
        for token, value in {**one, **other}.items()
    ]


def schemas(audit: Audit) -> Finding:
    """Ask for JSON by a schema: the reply must match the schema."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    fields = {"response_format": form, "max_tokens": 4 * audit.config.max_new_tokens}
    chat = audit.config.client.chat
    questions = [ask_text(f"schema {city}", f"The weather in {city} as JSON.", chat, **fields) for city in CITIES]

    def holds(_: Question, ours: Reply, __: Reply) -> str | None:
        value = parsed(ours.text)
        if value is None and ours.finish == "length" and ours.text.lstrip().startswith("{"):
            return None  # cut off by the token limit
        held = isinstance(value, dict) and {key: type(one) for key, one in value.items()} == TYPES
        return None if held else f"{ours.text!r} is not of the schema"

    return checked(audit, "schemas", "schema", questions, holds)


def tool_calls(audit: Audit) -> Finding:
    """Ask a question that needs a tool call: the call's arguments must be JSON."""
    fields = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto",
              "max_tokens": 4 * audit.config.max_new_tokens}  # fmt: skip
    questions = [
        ask_text(f"tool {city}", f"It is {7 + 3 * number} degrees in {city}: report it.", True, **fields)
        for number, city in enumerate(CITIES)
    ]

    def holds(_: Question, ours: Reply, __: Reply) -> str | None:
        broken = [text for _, text in ours.calls if ours.finish != "length" and not isinstance(parsed(text), dict)]
        return f"{broken[0]!r} is no JSON" if broken else None

    return checked(audit, "tool_calls", "tool_call", questions, holds)


def parsed(text: str) -> Any:
    """Return the value of a JSON text, None if invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def checked(audit: Audit, check: str, fault: str, questions: Sequence[Question], holds: Holds) -> Finding:
    """Return the finding on a property; a breach counts where the baseline, asked twice, holds it."""
    counts: Counter[str] = Counter()
    differences: list[Difference] = []
    errors: list[str] = []

    def ask(question: Question) -> None:
        theirs, ours = (audit.asker.one(side, question) for side in (BASELINE, AUDITED))
        if theirs.error:
            errors.append(theirs.error)
            return
        broken = f"it fails: {ours.error}" if ours.error else holds(question, ours, theirs)
        if broken is None:
            counts["held"] += 1
            return
        again = audit.asker.one(BASELINE, question)
        if any(reply.error or holds(question, reply, theirs) for reply in (theirs, again)):
            counts["shared"] += 1
            return
        look = "error" if ours.error else fault
        differences.append(breach(question, ours.content, theirs.content, look, broken))

    for question in questions:
        ask(question)
    count, shared = counts.total() + len(differences), counts["shared"]
    if not count:
        error = f"the baseline does not offer it: {errors[-1]}" if errors else "no such questions"
        return Finding(check, "not_offered", error)
    summary = f"{counts['held']} of {count} replies hold"
    summary += f"; {shared} breaches are the baseline's too" if shared else ""
    if shared == count:
        return Finding(check, "not_offered", f"the baseline does not hold it: {summary}")
    return Finding(check, "failed" if differences else "passed", summary, differences)
