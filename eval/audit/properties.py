"""Checks of what a reply must hold by itself: limits, stop strings, counts, logprobs, schemas.

Both servers are asked; what the baseline does not hold either is no fault of speculation, and is said.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from data.answers.client import FINISH_REASONS
from eval.audit.ask import AUDITED, BASELINE, LOGPROBS, ask_text
from eval.audit.compare import (
    FAULT,
    NOT_OFFERED,
    Audit,
    Difference,
    Finding,
    breach,
    status_of,
    unstreamed,
    with_logprobs,
)  # fmt: skip
from eval.audit.greedy import MANY
from eval.endpoint.counters import LLAMA, SGLANG, VLLM
from eval.endpoint.questions import Question
from eval.endpoint.replies import LEAST, Reply

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
