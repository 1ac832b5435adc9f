"""Checks of greedy answers, and of a reply's properties.

Each check asks both servers the same questions, in the same order and concurrency; the baseline's answers are the
control. A property that the baseline violates too is noted, but is not a fault of speculation.
"""

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from statistics import fmean
from typing import Any

from data.answers.client import FINISH_REASONS
from eval.inputs.workloads import cycled
from ops.audits.compare import (
    AUDITED,
    BASELINE,
    MANY,
    SIDES,
    Asked,
    Audit,
    Finding,
    ask_text,
    compare_answers,
    gap_at,
    unstreamed,
    violation,
    with_logprobs,
)
from ops.served import Question, Questions, Reply

Pairs = Iterator[Asked]
GROUPS = 4  # groups of prompts with a shared prefix, half in each order
SHARED = 220  # words of the shared prefix
TAILS = ("What are the notes about?", "Write the first ten words of the notes, then the last ten.")
FOLLOW_UPS = ("Say that again in other words.", "Give an example of it.")
DIALOGUES = 4
FILLER = "the river runs past old stone walls while light rain falls on quiet fields and far hills turn grey"
AROUND = (-1, 0, 1, 3)  # offsets in tokens from a chunk border


def identity(audit: Audit) -> Finding:
    """Ask one question at a time, twice: with cold and with warm caches, alternating between servers."""
    for side in SIDES:  # the first request to a server is not timed
        audit.asker.one(side, audit.question("warm-up", "Hello", max_tokens=8))
    pairs = []
    for index, question in enumerate(audit.questions * 2):
        # Alternate the order: a server on the same machine may still use its cores after an answer.
        order = SIDES if (index + (index >= len(audit.questions))) % 2 else SIDES[::-1]
        replies = {side: audit.asker.one(side, question) for side in order}
        for side, reply in replies.items():
            audit.time(side, 1, [reply], reply.latency_s)
        audit.add_reference(question, replies[BASELINE])
        pairs.append((question, replies[AUDITED]))
    gaps = [
        gap_at(listed, reply.text, question.body)[1] or 0.0
        for question in audit.questions
        if len({reply.content for reply in audit.answers[question.content]}) > 1
        for listed in audit.explained_by(question)
        for reply in audit.answers[question.content]
        if reply.text != listed.text and not reply.error
    ]
    audit.near_tie = max([audit.near_tie, *(2 * gap for gap in gaps)])  # the baseline's own answers are that far apart
    return compare_answers(audit, pairs)


def prefix_cache(audit: Audit) -> Finding:
    """Ask x, y, x after a shared prefix, and y, x, y after another."""
    before: dict[str, tuple[Question, ...]] = {}
    pairs: list[Asked] = []
    for group in range(GROUPS):
        prefix = f"Notes, page {audit.config.seed}-{group}. {filler(SHARED, group)}\n\n"
        tails = TAILS if group % 2 == 0 else TAILS[::-1]
        x, y = (audit.question(f"prefix {group}{i}", prefix + tail) for i, tail in enumerate(tails))
        before[x.id], before[y.id] = (x, y), (x,)
        pairs += in_order(audit, [x, y, x])
    return compare_answers(audit, pairs, "stale_cache", before)


def conversations(audit: Audit) -> Finding:
    """Ask follow-up questions, with the baseline's answers as the earlier messages."""
    pairs: list[Asked] = []
    for index, question in enumerate(audit.questions[:DIALOGUES]):
        history = [question.prompt, audit.asker.one(BASELINE, question).text]
        for turn, follow_up in enumerate(FOLLOW_UPS, 2):
            turned = audit.question(f"dialogue {index}, turn {turn}", follow_up, *history)
            pairs += in_order(audit, [turned])
            history += [follow_up, audit.texts.get(turned.prompt, "")]
    return compare_answers(audit, pairs, "history")


def chunk_borders(audit: Audit) -> Finding:
    """Ask prompts with token counts around the chunk sizes of chunked prefill, if the baseline counts tokens."""

    def prompt(border: int, words: int) -> Question:
        text = f"Page {audit.config.seed}-{border}: {filler(words, border)}. Continue."
        return audit.question(f"border {border}, {words} words", text)

    pairs: list[Asked] = []
    for border in audit.config.borders:
        words = border // 2
        for _ in range(3):
            count = audit.asker.one(BASELINE, prompt(border, words).having("probe", max_tokens=1)).prompt_tokens
            if count is None:
                break
            words += round((border - count) * min(1.0, words / count))
        else:
            pairs += in_order(audit, [prompt(border, words + more) for more in AROUND])
    return compare_answers(audit, pairs, "prompt_chunk")


def side_by_side(audit: Audit) -> Finding:
    """Ask the questions several at a time."""
    sizes = [size for size in audit.config.concurrency if size > 1]
    pairs = (pair for size in sizes for pair in together(audit, cycled(audit.questions, size), size))
    return compare_answers(audit, pairs, "batch", in_flight=max(sizes, default=1))


def cancelled(audit: Audit) -> Finding:
    """Abort every second one of concurrent requests; compare the others."""
    size = min(8, max(audit.config.concurrency))
    several = cycled(audit.questions, 2 * size)
    pairs = together(audit, several, size, range(1, len(several), 2))
    return compare_answers(audit, pairs, "cancelled", in_flight=size)


def streaming(audit: Audit) -> Finding:
    """Ask without streaming: the texts must be the same."""
    pairs = []
    for question in audit.few:
        whole = unstreamed(question)
        audit.add_reference(question, audit.asker.one(BASELINE, whole))
        pairs.append((question, audit.asker.one(AUDITED, whole)))
    finding = compare_answers(audit, pairs, "streaming")
    return replace(finding, differences=[d._replace(question=unstreamed(d.question)) for d in finding.differences])


def penalties(audit: Audit) -> Finding:
    """Ask with presence and frequency penalties."""
    questions = [
        question.having("with penalties", presence_penalty=0.6, frequency_penalty=0.4) for question in audit.few
    ]
    return compare_answers(audit, in_order(audit, questions), "penalty")


def in_order(audit: Audit, questions: Questions) -> Pairs:
    """Ask both servers one question after another; record the baseline's answers, yield the audited server's."""
    for question in questions:
        audit.add_reference(question, audit.asker.one(BASELINE, question))
    for question in questions:
        yield question, audit.asker.one(AUDITED, question)


def together(audit: Audit, questions: Questions, in_flight: int, cancel: Collection[int] = ()) -> Pairs:
    """Ask both servers several questions at a time; yield the audited server's complete answers."""
    replies = []
    for side in (BASELINE, AUDITED):
        begin = time.perf_counter()
        replies.append(audit.asker.all(side, questions, in_flight, cancel))
        if not cancel:
            audit.time(side, in_flight, replies[-1], time.perf_counter() - begin)
    for i, (question, theirs, ours) in enumerate(zip(questions, *replies, strict=True)):
        if i not in cancel:
            audit.add_reference(question, theirs)
            yield question, ours


def filler(words: int, start: int) -> str:
    """Return a text of `words` words."""
    pieces = FILLER.split()
    return " ".join(pieces[(start + 7 * i) % len(pieces)] for i in range(words))


Holds = Callable[[Question, Reply, Reply], str | None]  # question, audited server's reply, baseline's -> the violation
LIMITS = (1, 2, 3, 5, 8)
# Factor of the tolerance for alternatives' logprobs, which round with two logits. SmolLM2-135M in bfloat16, passes of
# one token against passes of four: at most 0.50 nats apart (0.17 for chosen tokens), 0.06 in the mean.
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
        for question, limit in zip(audit.few, LIMITS * MANY, strict=False)
    ]

    def holds(question: Question, ours: Reply, theirs: Reply) -> str | None:
        limit, count = question.body["max_tokens"], ours.completion_tokens
        if ours.text == theirs.text:  # the token count is a separate check
            odd = ours.finish_reason != theirs.finish_reason and theirs.finish_reason in FINISH_REASONS
            reasons = f"finish_reason {ours.finish_reason} and not {theirs.finish_reason}"
            note = f"the baseline's text of {limit} tokens, {reasons}"
        elif count is not None and (count > limit or (count < limit and ours.finish_reason != "stop")):
            odd = True
            note = f"{count} tokens where max_tokens is {limit}, finish_reason {ours.finish_reason}"
        else:
            odd = count is not None and ours.finish_reason == "length" and theirs.text.startswith(ours.text)
            note = f"{limit} tokens: {ours.text!r} is cut short"
        return note if odd else None

    return checked(audit, "limit", questions, holds)


def stop_strings(audit: Audit) -> Finding:
    """Ask to stop at a string in the middle of an answer."""
    questions = [
        question.having("with a stop string", stop=[stop])
        for question in audit.few
        if (stop := stop_in(audit.answers[question.content][0].text)) is not None
    ]

    def holds(question: Question, ours: Reply, theirs: Reply) -> str | None:
        (stop,) = question.body["stop"]
        if stop in ours.text:
            return f"the stop string {stop!r} is in the text"
        if theirs.finish_reason == "stop" and ours.finish_reason != "stop" and ours.text.startswith(theirs.text):
            return f"finish_reason {ours.finish_reason} where the baseline stops at {stop!r}"
        return None

    return checked(audit, "stop_string", questions, holds)


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

    return checked(audit, "usage", audit.few, holds)


def logprobs_hold(audit: Audit) -> Finding:
    """Compare the logprobs with the text, and with the baseline's of the same tokens."""
    questions = [*map(with_logprobs, audit.few)]
    questions += map(unstreamed, questions[:])

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
            apart("token {} has {:.3f} where the baseline has {:.3f}", audit.near_tie, chosen)
            or apart(alternative, ALTERNATIVE * audit.near_tie, tops)
            or apart("token {} lists {} alternatives where the baseline lists {}", 1, counts)
        )

    if not audit.asker.one(BASELINE, questions[0]).tokens:
        return Finding("not_offered", "the baseline gives no logprobs")
    return checked(audit, "logprobs", questions, holds)


def apart(note: str, most: float, values: Sequence[tuple[int, float, float]]) -> str | None:
    """Return a note on the pair with the largest difference, with its token's index.

    None if no pair differs by more than `most` and the mean difference is at most a quarter of it.
    """
    gaps = [abs(one - other) for _, one, other in values] or [0.0]
    if max(gaps) <= most and fmean(gaps) <= most / 4:
        return None
    return note.format(*values[gaps.index(max(gaps))])


def listed(one: Mapping[bytes, float], other: Mapping[bytes, float]) -> list[tuple[float, float]]:
    """Pair the logprobs of two top lists; a token missing in one list is below the last of that list."""
    pairs = []
    for token, value in {**one, **other}.items() if one and other else ():
        ours, theirs = (top.get(token, min(value, *top.values())) for top in (one, other))
        pairs.append((ours, theirs))
    return pairs


def schemas(audit: Audit) -> Finding:
    """Ask for JSON by a schema: the reply must match the schema."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    fields = {"response_format": form, "max_tokens": 4 * audit.config.max_new_tokens}
    questions = [audit.question(f"schema {city}", f"The weather in {city} as JSON.", **fields) for city in CITIES]

    def holds(_: Question, ours: Reply, __: Reply) -> str | None:
        value = parsed(ours.text)
        if value is None and ours.finish_reason == "length" and ours.text.lstrip().startswith("{"):
            return None  # truncated by the token limit
        held = isinstance(value, dict) and {key: type(one) for key, one in value.items()} == TYPES
        return None if held else f"{ours.text!r} is not of the schema"

    return checked(audit, "schema", questions, holds)


def tool_calls(audit: Audit) -> Finding:
    """Ask a question that needs a tool call: the call's arguments must be JSON."""
    fields = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto",
              "max_tokens": 4 * audit.config.max_new_tokens}  # fmt: skip
    questions = [
        ask_text(f"tool {city}", f"It is {7 + 3 * index} degrees in {city}: report it.", True, **fields)
        for index, city in enumerate(CITIES)
    ]

    def holds(_: Question, ours: Reply, __: Reply) -> str | None:
        broken = [one for _, one in ours.calls if ours.finish_reason != "length" and not isinstance(parsed(one), dict)]
        return f"{broken[0]!r} is no JSON" if broken else None

    return checked(audit, "tool_call", questions, holds)


def parsed(text: str) -> Any:
    """Return the value of a JSON text, None if invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def checked(audit: Audit, fault: str, questions: Questions, holds: Holds) -> Finding:
    """Return the finding on a property; a violation counts if the baseline, asked twice, has the property."""
    held, shared, differences, error = 0, 0, [], "no such questions"
    for question in questions:
        theirs, ours = (audit.asker.one(side, question) for side in (BASELINE, AUDITED))
        if theirs.error:
            error = f"the baseline does not offer it: {theirs.error}"
            continue
        broken = f"it fails: {ours.error}" if ours.error else holds(question, ours, theirs)
        if broken is None:
            held += 1
            continue
        again = audit.asker.one(BASELINE, question)
        if any(reply.error or holds(question, reply, theirs) for reply in (theirs, again)):
            shared += 1
        else:
            suspected = "error" if ours.error else fault
            differences.append(violation(question, ours.content, theirs.content, suspected, broken))
    if not (count := held + shared + len(differences)):
        return Finding("not_offered", error)
    summary = f"{held} of {count} replies hold"
    summary += f"; {shared} violations are the baseline's too" if shared else ""
    if shared == count:
        return Finding("not_offered", f"the baseline does not hold it: {summary}")
    return Finding("failed" if differences else "passed", summary, differences)
