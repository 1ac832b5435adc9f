"""Checks of greedy answers: alone, after other prompts, in conversations, at chunk borders, concurrently.

Each asks both servers the same questions, in the same order and concurrency; the baseline's answers are the control.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from eval.measures.cost_model import cycled
from ops.audits.ask import AUDITED, BASELINE, SIDES, ask_text
from ops.audits.compare import Audit, Finding, judged, unstreamed
from ops.served import Question, Reply

Pairs = Iterator[tuple[Question, Reply]]

GROUPS = 4  # groups of prompts with a shared prefix, half in either order
SHARED = 220  # words of the shared prefix
TAILS = ("What are the notes about?", "Write the first ten words of the notes, then the last ten.")
FOLLOW_UPS = ("Say that again in other words.", "Give an example of it.")
DIALOGUES = 4
FILLER = "the river runs past old stone walls while light rain falls on quiet fields and far hills turn grey"
AROUND = (-1, 0, 1, 3)  # offsets in tokens from a chunk border
MANY = 12  # prompts for most checks


def identity(audit: Audit) -> Finding:
    """Ask every question alone, twice: with cold and with warm caches, both servers in turn."""
    for side in SIDES:  # a server's first request is not timed
        audit.asker.one(side, ask_text("warm-up", "Hello", audit.config.client.chat, max_tokens=8))
    replies: dict[str, list[Reply]] = {side: [] for side in SIDES}
    for number, question in enumerate(audit.questions * 2):
        # In either order: a server on the same machine that has just answered still takes its cores.
        for side in SIDES if (number + (number >= len(audit.questions))) % 2 else SIDES[::-1]:
            replies[side].append(audit.asker.one(side, question))
        audit.learn(question, replies[BASELINE][-1])
    for side, several in replies.items():
        audit.time(side, 1, several, sum(reply.latency_s for reply in several))
    audit.calibrate(audit.questions)
    return judged(audit, "identity", zip(audit.questions * 2, replies[AUDITED], strict=True))


def prefix_cache(audit: Audit) -> Finding:
    """Ask x, y and x again behind a prefix that both share, and y, x, y behind another."""
    before: dict[str, tuple[Question, ...]] = {}

    def pairs() -> Pairs:
        for group in range(GROUPS):
            prefix = f"Notes, page {audit.config.seed}-{group}. {filler(SHARED, group)}\n\n"
            x, y = (
                ask_text(f"prefix {group}{name}", prefix + tail, audit.config.client.chat)
                for name, tail in zip("xy", TAILS if group % 2 == 0 else TAILS[::-1], strict=True)
            )
            before[x.id], before[y.id] = (x, y), (x,)
            yield from in_order(audit, [x, y, x])

    return judged(audit, "prefix_cache", pairs(), "stale_cache", before)


def conversations(audit: Audit) -> Finding:
    """Ask follow-up questions, with the baseline's answers as the earlier messages."""

    def pairs() -> Pairs:
        for number, question in enumerate(audit.questions[:DIALOGUES]):
            history = [question.prompt, audit.asker.one(BASELINE, question).text]
            for turn, follow_up in enumerate(FOLLOW_UPS, 2):
                turned = ask_text(f"dialogue {number}, turn {turn}", follow_up, audit.config.client.chat, *history)
                yield from in_order(audit, [turned])
                history += [follow_up, audit.texts.get(turned.prompt, "")]

    return judged(audit, "conversations", pairs(), "history")


def borders(audit: Audit) -> Finding:
    """Ask prompts with token counts around engines' chunk sizes of chunked prefill."""
    pairs = (pair for border in audit.config.borders for pair in in_order(audit, around(audit, border)))
    return judged(audit, "borders", pairs, "prompt_chunk")


def around(audit: Audit, border: int) -> list[Question]:
    """Return prompts of about `border` tokens by the baseline's count; empty if it does not count."""

    def prompt(words: int) -> Question:
        text = f"Page {audit.config.seed}-{border}: {filler(words, border)}. Continue."
        return ask_text(f"border {border}, {words} words", text, audit.config.client.chat)

    words = border // 2
    for _ in range(3):
        count = audit.asker.one(BASELINE, prompt(words).having("probe", max_tokens=1)).prompt_tokens
        if count is None:
            return []
        words += round((border - count) * min(1.0, words / count))
    return [prompt(words + more) for more in AROUND]


def side_by_side(audit: Audit) -> Finding:
    """Ask the questions several at a time."""
    sizes = [size for size in audit.config.concurrency if size > 1]
    pairs = (pair for size in sizes for pair in together(audit, cycled(audit.questions, size), size))
    return judged(audit, "concurrency", pairs, "batch", in_flight=max(sizes, default=1))


def cancelled(audit: Audit) -> Finding:
    """Abort every second of concurrent requests; compare the others."""
    size = min(8, max(audit.config.concurrency))
    several = cycled(audit.questions, 2 * size)
    pairs = together(audit, several, size, range(1, len(several), 2))
    return judged(audit, "cancelled", pairs, "cancelled", in_flight=size)


def streaming(audit: Audit) -> Finding:
    """Ask without streaming: the texts must be the same."""

    def pairs() -> Pairs:
        for question in audit.questions[:MANY]:
            whole = unstreamed(question)
            audit.learn(question, audit.asker.one(BASELINE, whole))
            yield question, audit.asker.one(AUDITED, whole)

    finding = judged(audit, "streaming", pairs(), "streaming")
    return replace(finding, differences=[d._replace(question=unstreamed(d.question)) for d in finding.differences])


def penalties(audit: Audit) -> Finding:
    """Ask with presence and frequency penalties."""
    fields = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
    questions = [question.having("with penalties", **fields) for question in audit.questions[:MANY]]
    return judged(audit, "penalties", in_order(audit, questions), "penalty")


def in_order(audit: Audit, questions: Sequence[Question]) -> Pairs:
    """Ask both servers one question after another; learn the baseline's answers, yield the audited server's."""
    for question in questions:
        audit.learn(question, audit.asker.one(BASELINE, question))
    for question in questions:
        yield question, audit.asker.one(AUDITED, question)


def together(audit: Audit, questions: Sequence[Question], in_flight: int, cancel: Collection[int] = ()) -> Pairs:
    """Ask both servers several questions at a time; yield the audited server's complete answers."""
    replies = {}
    for side in (BASELINE, AUDITED):
        begin = time.perf_counter()
        replies[side] = audit.asker.all(side, questions, in_flight, cancel)
        if not cancel:
            audit.time(side, in_flight, replies[side], time.perf_counter() - begin)
    for i, (question, theirs, ours) in enumerate(zip(questions, replies[BASELINE], replies[AUDITED], strict=True)):
        if i not in cancel:
            audit.learn(question, theirs)
            yield question, ours


def filler(words: int, start: int) -> str:
    """Return a text of N words."""
    pieces = FILLER.split()
    return " ".join(pieces[(start + 7 * i) % len(pieces)] for i in range(words))
