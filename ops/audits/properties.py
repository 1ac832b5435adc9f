"""Checks of what a reply must hold by itself: limits, stop strings, counts, logprobs, schemas.

Both servers are asked; what the baseline does not hold either is no fault of speculation, and is said.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from data.answers.client import FINISH_REASONS
from eval.measures.counters import LLAMA, SGLANG, VLLM
from eval.measures.losslessness import shared_length
from ops.audits.ask import AUDITED, BASELINE, LOGPROBS, ask_text
from ops.audits.compare import (
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
from ops.audits.greedy import MANY
from ops.served.exchange import LEAST, Question, Reply, Token

Holds = Callable[[Question, Reply, Reply], str | None]  # of the audited server's reply and the baseline's: the breach

LIMITS = (1, 2, 3, 5, 8)
# Times the tolerance of a chosen token's logprob: an alternative's rounds with two logits. SmolLM2-135M in bfloat16, in
# passes of one token and of four: at most 0.50 nats apart (0.17 of chosen tokens), 0.06 in the mean.
ALTERNATIVE = 2
DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
GBNF = 'root ::= [0-9] [0-9] [0-9] [0-9] "-" [0-9] [0-9] "-" [0-9] [0-9]'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "degrees": {"type": "integer"},
                   "sunny": {"type": "boolean"}},
    "required": ["city", "degrees", "sunny"],
    "additionalProperties": False,
}  # fmt: skip
TYPES = {"city": str, "degrees": int, "sunny": bool}
CITIES = ("Paris", "Lima", "Oslo", "Cairo", "Delhi", "Quito")


def limits(audit: Audit) -> Finding:
    """Ask for a few tokens: as many come, they begin the longer answer, and end for the baseline's reason."""
    questions = [
        question.having(f"of {limit} tokens", max_tokens=limit)
        for question, limit in zip(audit.questions[:MANY], LIMITS * MANY, strict=False)
    ]

    def holds(question: Question, ours: Reply, theirs: Reply) -> str | None:
        limit, count = question.body["max_tokens"], ours.completion_tokens
        if ours.text == theirs.text:  # how it is counted is a check of its own
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
    """Ask to stop at a string in the middle of an answer, once with a limit just behind it."""
    questions = []
    for question in audit.questions[:MANY]:
        reply = audit.comparer.answers[question.content][0]
        if (stop := stop_in(reply.text)) is not None:
            at = question.having("with a stop string", stop=[stop])
            questions.append(at)
            count = audit.asker.one(BASELINE, at).completion_tokens
            if count is not None:
                questions.append(at.having("and a limit", max_tokens=count + 1))

    def holds(question: Question, ours: Reply, theirs: Reply) -> str | None:
        (stop,) = question.body["stop"]
        if stop in ours.text:
            return f"the stop string {stop!r} is in the text"
        if theirs.finish == "stop" and ours.finish != "stop" and ours.text.startswith(theirs.text):
            return f"finish_reason {ours.finish} where the baseline stops at {stop!r}"
        return None

    return checked(audit, "stop_strings", "stop_string", questions, holds)


def stop_in(text: str) -> str | None:
    """Return a word in the middle of a text that is not in it before, with the space before it."""
    middle = len(text) // 3
    return next(
        (m[0] for m in re.finditer(r"\s\S{3,12}", text) if m.start() >= middle and m[0] not in text[: m.start()]), None
    )


def usage(audit: Audit) -> Finding:
    """Compare the counts of tokens with the baseline's of the same text."""

    def holds(_: Question, ours: Reply, theirs: Reply) -> str | None:
        if ours.prompt_tokens != theirs.prompt_tokens:
            return f"{ours.prompt_tokens} tokens of the prompt, the baseline counts {theirs.prompt_tokens}"
        if ours.content == theirs.content and ours.completion_tokens != theirs.completion_tokens:
            return f"{ours.completion_tokens} tokens of the same text, the baseline counts {theirs.completion_tokens}"
        counts = (ours.prompt_tokens, ours.completion_tokens, ours.total_tokens)
        numbers = [count for count in counts if count is not None]
        if len(numbers) == 3 and numbers[0] + numbers[1] != numbers[2]:
            return f"{numbers[0]} and {numbers[1]} tokens add up to {numbers[2]}"
        return None

    return checked(audit, "usage", "usage", audit.questions[:MANY], holds)


def logprobs_hold(audit: Audit) -> Finding:
    """Compare the logprobs with the text, and with the baseline's of the same tokens."""
    questions = [with_logprobs(question) for question in audit.questions[:MANY]]
    questions = [*questions, *map(unstreamed, questions)]
    if not audit.asker.one(BASELINE, questions[0]).tokens:
        return Finding("logprobs", NOT_OFFERED, "the baseline gives no logprobs")
    tolerance, doubts = audit.comparer.near_tie, list[str]()

    def holds(_: Question, ours: Reply, theirs: Reply) -> str | None:
        if not theirs.tokens:
            return None
        if not ours.tokens:
            return "no logprobs"
        if written(theirs) and not written(ours):
            return "the tokens of the logprobs are not those of the text"
        doubt = not_first(theirs, tolerance) or apart(
            "token {} lists {} alternatives where {} were asked for",
            1,
            [(i, len(token.top), max(len(token.top), LOGPROBS)) for i, token in enumerate(theirs.tokens)],
        )
        doubts.extend([doubt] if doubt else [])
        same = takewhile(lambda pair: pair[0].text == pair[1].text, zip(ours.tokens, theirs.tokens, strict=False))
        pairs = [(i, one, other) for i, (one, other) in enumerate(same)]
        return (
            apart(
                "token {} has {:.3f} where the baseline has {:.3f}",
                tolerance,
                [(i, one.logprob, other.logprob) for i, one, other in pairs],
            )
            or apart(
                "an alternative to token {} has {:.3f} where the baseline has {:.3f}",
                ALTERNATIVE * tolerance,
                [(i, *values) for i, one, other in pairs for values in listed(one.top, other.top)],
            )
            or apart(
                "token {} lists {} alternatives where the baseline lists {}",
                1,
                [(i, min(len(one.top), len(other.top)), len(other.top)) for i, one, other in pairs],
            )
            or (None if not_first(theirs, tolerance) else not_first(ours, tolerance))
        )

    finding = checked(audit, "logprobs", "logprobs", questions, holds)
    finding.summary += f"; of the baseline itself {doubts[0]}" if doubts else ""
    return finding


def apart(note: str, most: float, values: Sequence[tuple[int, float, float]]) -> str | None:
    """Return a note on the worst of pairs, each with its token's index, where they differ.

    They differ by more than `most` in one pair, or by more than a quarter of it in the mean.
    """
    gaps = [abs(one - other) for _, one, other in values]
    if not gaps or (max(gaps) <= most and sum(gaps) / len(gaps) <= most / 4):
        return None
    return note.format(*values[gaps.index(max(gaps))])


def listed(one: Mapping[bytes, float], other: Mapping[bytes, float]) -> list[tuple[float, float]]:
    """Return the logprobs of each token in two lists of the most probable; one missing in a list is below its last."""
    if not one or not other:
        return []
    least = min(one.values()), min(other.values())
    return [
        (one.get(token, min(least[0], value)), other.get(token, min(least[1], value)))
        for token, value in {**one, **other}.items()
    ]


def not_first(reply: Reply, tolerance: float) -> str | None:
    """Return which token is not the most probable of its alternatives, as the choice at temperature 0 is."""
    behind = (
        max(token.top.values()) - token.top.get(token.text, LEAST) if token.top else 0.0 for token in reply.tokens
    )
    return next(
        (f"token {i} is not the first of its alternatives" for i, gap in enumerate(behind) if gap > tolerance), None
    )


def written(reply: Reply) -> bool:
    """Whether an answer's tokens are its text."""
    tokens = b"".join(token.text for token in reply.tokens)
    return tokens.strip().startswith(reply.text.encode().strip())


def schemas(audit: Audit) -> Finding:
    """Ask for JSON of a schema, and for text of a grammar where the engine is known: both hold."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    texts = [f"The weather in {city} as JSON." for city in CITIES]
    questions = [
        ask_text(f"schema {i}", text, audit.chat, response_format=form, max_tokens=4 * audit.tokens)
        for i, text in enumerate(texts)
    ]
    counters = audit.asker.sides[AUDITED].reading()
    grammars: dict[str, dict[str, Any]] = {
        VLLM: {"structured_outputs": {"regex": DATE}}, SGLANG: {"regex": DATE}, LLAMA: {"grammar": GBNF},
    }  # fmt: skip
    if counters is not None:
        dates = [f"The date of the foundation of {city}." for city in CITIES]
        fields = grammars[counters.engine]
        questions += [ask_text(f"date {i}", text, audit.chat, **fields) for i, text in enumerate(dates)]

    def holds(question: Question, ours: Reply, _: Reply) -> str | None:
        if "response_format" in question.body:
            return schema_breach(ours.text, ours.finish)
        return None if re.fullmatch(DATE, ours.text.strip()) else f"{ours.text!r} is not of the grammar"

    return checked(audit, "schemas", "schema", questions, holds)


def schema_breach(text: str, finish: str | None) -> str | None:
    """Return how a text breaks the schema, None where it holds, or was cut off by its limit and may have held."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None if finish == "length" and text.lstrip().startswith("{") else f"{text!r} is no JSON"
    if not isinstance(value, dict) or value.keys() != TYPES.keys():
        return f"{text!r} has not the keys of the schema"
    wrong = [key for key, kind in TYPES.items() if type(value[key]) is not kind]
    return f"{wrong[0]} in {text!r} is no {TYPES[wrong[0]].__name__}" if wrong else None


def checked(audit: Audit, check: str, fault: str, questions: Sequence[Question], holds: Holds) -> Finding:
    """Return the finding on a property; a breach counts where the baseline, asked twice, holds it."""

    def outcome(question: Question) -> tuple[str, str, Difference | None]:
        theirs, ours = (audit.asker.one(side, question) for side in (BASELINE, AUDITED))
        if theirs.error:
            return "not offered", theirs.error, None
        broken = f"it fails: {ours.error}" if ours.error else holds(question, ours, theirs)
        if broken is None:
            return "holds", "", None
        again = audit.asker.one(BASELINE, question)
        if any(reply.error or holds(question, reply, theirs) for reply in (theirs, again)):
            return "of the baseline too", "", None
        look = "error" if ours.error else fault
        return "breached", "", breach(question, ours.content, theirs.content, look, broken)

    outcomes = audit.asker.taken(outcome(question) for question in questions)
    counts = Counter(name for name, _, _ in outcomes)
    count = len(outcomes) - counts["not offered"]
    if not count:
        error = outcomes[-1][1] if outcomes else ""
        return Finding(check, NOT_OFFERED, f"the baseline does not offer it: {error}" if error else "no such questions")
    summary = f"{counts['holds']} of {count} replies hold"
    if common := counts["of the baseline too"]:
        summary += f"; {common} breaches are the baseline's too"
    if common == count:
        return Finding(check, NOT_OFFERED, f"the baseline does not hold it: {summary}")
    differences = [difference for _, _, difference in outcomes if difference is not None]
    return Finding(check, status_of({FAULT: len(differences)}), summary, differences)


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
