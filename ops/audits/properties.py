"""Checks of a reply by itself: limits, stop strings, counts, logprobs, schemas, tool calls.

Both servers are asked; what the baseline does not hold either is no fault of speculation, and is said.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from data.answers.client import FINISH_REASONS
from eval.measures.counters import LLAMA, SGLANG, VLLM
from ops.audits.ask import AUDITED, BASELINE, LOGPROBS, ask_text
from ops.audits.compare import (
    FAILED,
    FAULT,
    NEAR_TIE,
    NOT_OFFERED,
    PASSED,
    UNDECIDED,
    UNEXPLAINED,
    Audit,
    Difference,
    Finding,
    breach,
    gap_at,
    kind_of,
    unstreamed,
    with_logprobs,
)  # fmt: skip
from ops.audits.greedy import MANY
from ops.served import LEAST, Question, Reply

Holds = Callable[[Question, Reply, Reply], str | None]  # of the audited server's reply and the baseline's: the breach

LIMITS = (1, 2, 3, 5, 8)
# Times the tolerance of a chosen token's logprob: an alternative's rounds with two logits. SmolLM2-135M in bfloat16, in
# passes of one token and of four: at most 0.50 nats apart (0.17 of chosen tokens), 0.06 in the mean.
ALTERNATIVE = 2
DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
GRAMMARS: dict[str, dict[str, Any]] = {
    VLLM: {"structured_outputs": {"regex": DATE}},
    SGLANG: {"regex": DATE},
    LLAMA: {"grammar": 'root ::= [0-9] [0-9] [0-9] [0-9] "-" [0-9] [0-9] "-" [0-9] [0-9]'},
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "degrees": {"type": "integer"},
                   "sunny": {"type": "boolean"}},
    "required": ["city", "degrees", "sunny"],
    "additionalProperties": False,
}  # fmt: skip
TYPES = {"city": str, "degrees": int, "sunny": bool}
CITIES = ("Paris", "Lima", "Oslo", "Cairo", "Delhi", "Quito")
NAME, AUTO = "report_weather", "auto"
TOOL = {"type": "function", "function": {"name": NAME, "description": "Report the weather.", "parameters": SCHEMA}}
WAYS: tuple[Any, ...] = ({"type": "function", "function": {"name": NAME}}, AUTO)


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
        if (stop := stop_in(audit.comparer.answers[question.content][0].text)) is not None:
            at = question.having("with a stop string", stop=[stop])
            count = audit.asker.one(BASELINE, at).completion_tokens
            questions += [at, *([] if count is None else [at.having("and a limit", max_tokens=count + 1)])]

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
    words = (m for m in re.finditer(r"\s\S{3,12}", text) if m.start() >= len(text) // 3)
    return next((m[0] for m in words if m[0] not in text[: m.start()]), None)


def usage(audit: Audit) -> Finding:
    """Compare the counts of tokens with the baseline's of the same text."""

    def holds(_: Question, ours: Reply, theirs: Reply) -> str | None:
        if ours.prompt_tokens != theirs.prompt_tokens:
            return f"{ours.prompt_tokens} tokens of the prompt, the baseline counts {theirs.prompt_tokens}"
        if ours.content == theirs.content and ours.completion_tokens != theirs.completion_tokens:
            return f"{ours.completion_tokens} tokens of the same text, the baseline counts {theirs.completion_tokens}"
        prompt, completion, total = ours.prompt_tokens, ours.completion_tokens, ours.total_tokens
        if prompt is not None and completion is not None and total not in (None, prompt + completion):
            return f"{prompt} and {completion} tokens add up to {total}"
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
        few = [(i, len(token.top), max(len(token.top), LOGPROBS)) for i, token in enumerate(theirs.tokens)]
        doubt = not_first(theirs, tolerance) or apart("token {} lists {} alternatives where {} were asked for", 1, few)
        doubts.extend([doubt] if doubt else [])
        same = takewhile(lambda pair: pair[0].text == pair[1].text, zip(ours.tokens, theirs.tokens, strict=False))
        pairs = [(i, one, other) for i, (one, other) in enumerate(same)]
        chosen = [(i, one.logprob, other.logprob) for i, one, other in pairs]
        tops = [(i, *values) for i, one, other in pairs for values in listed(one.top, other.top)]
        counts = [(i, min(len(one.top), len(other.top)), len(other.top)) for i, one, other in pairs]
        return (
            apart("token {} has {:.3f} where the baseline has {:.3f}", tolerance, chosen)
            or apart(
                "an alternative to token {} has {:.3f} where the baseline has {:.3f}", ALTERNATIVE * tolerance, tops
            )
            or apart("token {} lists {} alternatives where the baseline lists {}", 1, counts)
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
    for i, token in enumerate(reply.tokens):
        if token.top and max(token.top.values()) - token.top.get(token.text, LEAST) > tolerance:
            return f"token {i} is not the first of its alternatives"
    return None


def written(reply: Reply) -> bool:
    """Whether an answer's tokens are its text."""
    tokens = b"".join(token.text for token in reply.tokens)
    return tokens.strip().startswith(reply.text.encode().strip())


def schemas(audit: Audit) -> Finding:
    """Ask for JSON of a schema, and for text of a grammar where the engine is known: both hold."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    fields = {"response_format": form, "max_tokens": 4 * audit.config.max_new_tokens}
    chat, counters = audit.config.client.chat, audit.asker.sides[AUDITED].reading()
    questions = [ask_text(f"schema {city}", f"The weather in {city} as JSON.", chat, **fields) for city in CITIES]
    if counters is not None:
        grammar, text = GRAMMARS[counters.engine], "The date of the foundation of"
        questions += [ask_text(f"date {city}", f"{text} {city}.", chat, **grammar) for city in CITIES]

    def holds(question: Question, ours: Reply, _: Reply) -> str | None:
        if "response_format" in question.body:
            return schema_breach(ours.text, ours.finish)
        return None if re.fullmatch(DATE, ours.text.strip()) else f"{ours.text!r} is not of the grammar"

    return checked(audit, "schemas", "schema", questions, holds)


def schema_breach(text: str, finish: str | None) -> str | None:
    """Return how a text breaks the schema, None where it holds, or was cut off by its limit and may have held."""
    value = parsed(text)
    if value is None:
        return None if finish == "length" and text.lstrip().startswith("{") else f"{text!r} is no JSON"
    if not isinstance(value, dict) or value.keys() != TYPES.keys():
        return f"{text!r} has not the keys of the schema"
    wrong = [key for key, kind in TYPES.items() if type(value[key]) is not kind]
    return f"{wrong[0]} in {text!r} is no {TYPES[wrong[0]].__name__}" if wrong else None


def tool_calls(audit: Audit) -> Finding:
    """Ask for a call of a named function, and once more with the choice left to the model.

    A broken call is a fault; another than the baseline's is one where it leaves the baseline's tokens at no near tie.
    """
    if not audit.config.client.chat:
        return Finding("tool_calls", NOT_OFFERED, "calls are of chats")
    fields = {"tools": [TOOL], "max_tokens": 4 * audit.config.max_new_tokens}
    questions = [
        ask_text(f"tool {i} {city}", f"It is {7 + 3 * number} degrees and sunny in {city}: report it.", True,
                 tool_choice=way, **fields)
        for i, way in enumerate(WAYS)
        for number, city in enumerate(CITIES)
    ]  # fmt: skip
    differing: Counter[str] = Counter()

    def holds(question: Question, ours: Reply, theirs: Reply) -> str | None:
        broken = broken_call(question, ours)
        if broken or calls_of(ours) == calls_of(theirs):
            return broken
        whole = audit.asker.one(BASELINE, unstreamed(with_logprobs(question)))
        if calls_of(ours) == calls_of(whole):
            return None
        kind = kind_of(call_gap(whole, ours), audit.comparer.near_tie)
        differing[kind] += 1
        return f"another call than the baseline's: {ours.content!r}" if kind == FAULT else None

    finding = checked(audit, "tool_calls", "tool_call", questions, holds)
    ties, silent = differing[NEAR_TIE], differing[UNEXPLAINED]
    finding.summary += f"; {ties} calls differ at a near tie" if ties else ""
    if silent:
        finding.summary += f"; {silent} calls differ, and nothing says how nearly"
        finding.status = UNDECIDED if finding.status == PASSED else finding.status
    return finding


def call_gap(theirs: Reply, ours: Reply) -> float | None:
    """Return the gap where the arguments of a call differ, as far as the tokens write them as they are sent."""
    raw = b"".join(token.text for token in theirs.tokens).decode(errors="replace")
    if [name for name, _ in theirs.calls] != [name for name, _ in ours.calls] or len(ours.calls) != 1:
        return None
    before, arguments, after = raw.rpartition(theirs.calls[0][1])
    return gap_at(theirs._replace(text=raw), before + ours.calls[0][1] + after, {})[1] if arguments else None


def broken_call(question: Question, reply: Reply) -> str | None:
    """Return how a reply's calls are broken, whatever the model; None where they are whole."""
    if question.body["tool_choice"] == AUTO:
        broken = [text for _, text in reply.calls if reply.finish != "length" and not isinstance(parsed(text), dict)]
        return f"{broken[0]!r} is no JSON" if broken else None
    if len(reply.calls) != 1 or reply.calls[0][0] != NAME:
        return f"no call of {NAME}: {reply.content!r}"
    return schema_breach(reply.calls[0][1], reply.finish)


def calls_of(reply: Reply) -> list[tuple[str, Any]]:
    """Return a reply's calls, each by its name and the values of its arguments, their text where that is no JSON."""
    return [(name, parsed(arguments) or arguments) for name, arguments in reply.calls]


def parsed(text: str) -> Any:
    """Return the value of a JSON text, None where it is none."""
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

    audit.asker.taken(map(ask, questions))
    count, shared = counts.total() + len(differences), counts["shared"]
    if not count:
        error = f"the baseline does not offer it: {errors[-1]}" if errors else "no such questions"
        return Finding(check, NOT_OFFERED, error)
    summary = f"{counts['held']} of {count} replies hold"
    summary += f"; {shared} breaches are the baseline's too" if shared else ""
    if shared == count:
        return Finding(check, NOT_OFFERED, f"the baseline does not hold it: {summary}")
    return Finding(check, FAILED if differences else PASSED, summary, differences)
