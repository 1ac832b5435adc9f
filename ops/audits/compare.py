"""Greedy answers compared with the baseline's, near ties separated from faults.

A server may choose another token where two are nearly as likely, because batches of other shapes round otherwise. So a
difference is a fault only where the baseline's own logprobs put the audited server's token further below its choice
than `near_tie`; every answer that the baseline itself gave to the question, in any order or company, is right.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eval.measures.losslessness import shared_length
from ops.audits.ask import AUDITED, BASELINE, LOGPROBS, Asker, AuditConfig
from ops.served.exchange import Question, Reply, Token

FAULT, NEAR_TIE, UNEXPLAINED = KINDS = ("fault", "near_tie", "unexplained")
PASSED, FAILED, UNDECIDED, NOT_OFFERED, NOT_RUN = ("passed", "failed", "undecided", "not_offered", "not_run")
TELLING = ("early_stop", "limit", "lost_token", "error")  # faults that texts show by themselves
ALONE = ("crash", "leak")  # faults that one difference of many tells
EXPLAINED = 2  # answers of the baseline with logprobs, at most, for a question in doubt
COPIED = 24  # characters that another request's answer shares with a leaked one
RESUMED = 12  # characters after which a text that lost a token goes on as before
LONGEST_TOKEN = 24  # characters
SHOWN = 400  # characters of a note


class Bound(float):
    """A gap of which no more is known than that it is at least so many nats: the token is not among those listed."""


class Difference(NamedTuple):
    """An answer of the audited server that is none of the baseline's.

    `at` is the first differing byte of both texts, `gap` how many nats the audited server's token lies below the
    baseline's choice there (None: not known). `fault` is a key of FAULTS, empty where it looks like none.
    `before` are questions to ask first to see it, `in_flight` how many requests at a time; `note` says what is wrong
    where that is not the text.
    """

    question: Question
    ours: str
    theirs: str
    at: int
    gap: float | None
    kind: str
    fault: str = ""
    before: tuple[Question, ...] = ()
    in_flight: int = 1
    note: str = ""


@dataclass
class Finding:
    """The outcome of a check: its status, what was compared in a sentence, and the differences."""

    check: str
    status: str
    summary: str
    differences: list[Difference] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def fault(self) -> str:
        """The fault that most of its failures look like, but one of ALONE if any does; empty for none."""
        looks = Counter(d.fault for d in self.differences if d.kind == FAULT and d.fault)
        if not looks or self.status != FAILED:
            return ""
        return next((fault for fault in ALONE if looks[fault]), looks.most_common(1)[0][0])


class Comparer:
    """Judges greedy answers of the audited server by the baseline's; `near_tie` is in nats."""

    def __init__(self, asker: Asker, near_tie: float) -> None:
        self.asker, self.near_tie = asker, near_tie
        self.answers: dict[tuple[str, str], list[Reply]] = {}  # of the baseline, by question
        self.explained: dict[tuple[str, str], list[Reply]] = {}
        self.texts: dict[str, str] = {}  # the baseline's first answers by prompt

    def learn(self, question: Question, reply: Reply) -> None:
        """Take an answer of the baseline as a right one."""
        if not reply.error:
            self.texts.setdefault(question.prompt, reply.text)
        self.answers.setdefault(question.content, []).append(reply)

    def varied(self, questions: Iterable[Question]) -> int:
        """Return to how many questions the baseline gave different answers."""
        keys = {question.content for question in questions}
        return sum(len({reply.content for reply in self.answers.get(key, [])}) > 1 for key in keys)

    def calibrate(self, questions: Iterable[Question]) -> None:
        """Raise `near_tie` to twice the largest gap across which the baseline itself left its own answers."""
        gaps = [
            gap_at(listed, reply.text, question.body)[1] or 0.0
            for question in questions
            if self.varied([question])
            for listed in self._explained(question)
            for reply in self.answers[question.content]
            if reply.text != listed.text and not reply.error
        ]
        self.near_tie = max([self.near_tie, *(2 * gap for gap in gaps)])

    def fails(self, question: Question) -> bool:
        """Whether the baseline answered a question with an error."""
        return any(reply.error for reply in self.answers[question.content])

    def difference(self, question: Question, ours: Reply) -> Difference | None:
        """Return the difference of an answer from all of the baseline's to this question, None where it is one."""
        theirs = self.answers[question.content]
        if ours.content in {reply.content for reply in theirs}:
            return None
        if ours.error:
            return breach(question, ours.content, theirs[0].content, "error", "")
        explained = self._explained(question)
        if ours.content in {reply.content for reply in explained}:
            return None
        nearest = max([*explained, *theirs], key=lambda reply: first_difference(ours.text, reply.text))
        at, gap = max(
            (gap_at(reply, ours.text, question.body) for reply in explained),
            default=(0, None),
            key=lambda seen: (seen[0], seen[1] is not None),
        )
        kind = kind_of(gap, self.near_tie)
        if kind == FAULT and first_difference(ours.text, nearest.text) > at:
            kind = UNEXPLAINED  # the baseline itself left its own answer here
        at = first_difference(ours.text, nearest.text) if gap is None else at
        fault = self._looks(question, ours, nearest.text, at) if kind == FAULT else ""
        return Difference(question, ours.content, nearest.content, at, gap, kind, fault)

    def _explained(self, question: Question) -> list[Reply]:
        """Return answers of the baseline with logprobs; none from a server without them, or after the audit's end."""
        key = question.content
        if key not in self.explained:
            listed = with_logprobs(question)
            replies = self.asker.taken(self.asker.one(BASELINE, listed) for _ in range(EXPLAINED))
            self.explained[key] = [reply for reply in replies if reply.tokens]
        return self.explained[key]

    def _looks(self, question: Question, ours: Reply, theirs: str, at: int) -> str:
        """Return the fault that a difference looks like by its texts alone."""
        rest = ours.text.encode()[at:].decode(errors="replace")
        after = theirs.encode()[at:].decode(errors="replace")
        if not rest:
            return "early_stop" if ours.finish == "stop" else "limit"
        others = [text for prompt, text in self.texts.items() if prompt != question.prompt]
        copied = rest[:COPIED]
        if len(copied) == COPIED and copied not in theirs and any(copied in text for text in others):
            return "leak"
        resumed = rest[:RESUMED]
        if len(resumed) == RESUMED and resumed in after[1 : LONGEST_TOKEN + RESUMED]:
            return "lost_token"
        return self._step(question, ours, at)

    def _step(self, question: Question, ours: Reply, at: int) -> str:
        """Return which token of a pass is wrong, from a stream with logprobs whose events are passes."""
        listed = with_logprobs(question)
        reply = next(iter(self.asker.taken(self.asker.one(AUDITED, listed) for _ in range(1))), Reply())
        if len(reply.steps) < 2 or first_difference(reply.text, ours.text) <= at:
            return ""
        index, offset = 0, 0
        while index < len(reply.tokens) and offset + len(reply.tokens[index].text) <= at:
            offset += len(reply.tokens[index].text)
            index += 1
        largest = max(reply.steps)
        for step in reply.steps:
            if index < step:
                last = index == step - 1
                return "" if largest == 1 else "draft_bonus" if last and step == largest else "rejected_draft"
            index -= step
        return ""


@dataclass
class Audit:
    """What all checks share: who asks, what is asked, and what is configured."""

    asker: Asker
    comparer: Comparer
    questions: list[Question]
    chat: bool
    tokens: int  # of a greedy answer, at most
    seed: int
    config: AuditConfig
    timings: list["Timed"] = field(default_factory=list)


class Timed(NamedTuple):
    """Answers of a server, `in_flight` at a time, and the seconds that all of them took."""

    side: str
    in_flight: int
    replies: list[Reply]
    wall_s: float


def judged(
    audit: Audit,
    check: str,
    answers: Iterable[tuple[Question, Reply]],
    fault: str = "",
    before: Mapping[str, tuple[Question, ...]] | None = None,
    in_flight: int = 1,
) -> Finding:
    """Return the finding on the audited server's answers; `fault` is what a failure here looks like by itself.

    Answers are judged as far as they come before the audit ends. `before` are the questions that were asked before, by
    the question's id.
    """
    pairs = audit.asker.taken(answers)
    answered = [pair for pair in pairs if not audit.comparer.fails(pair[0])]
    if not answered:
        error = audit.comparer.answers[pairs[0][0].content][0].error if pairs else "no such questions"
        return Finding(check, NOT_OFFERED, f"the baseline does not answer: {error}")
    differences = []
    for question, reply in answered:
        if (difference := audit.comparer.difference(question, reply)) is not None:
            telling = (*TELLING, "leak") if in_flight > 1 else TELLING
            look = difference.fault if difference.fault in telling else fault
            earlier = (before or {}).get(question.id, ())
            differences.append(
                difference._replace(fault=look or difference.fault, before=earlier, in_flight=in_flight)
                if difference.kind == FAULT
                else difference
            )
    counts = Counter(difference.kind for difference in differences)
    varied = audit.comparer.varied({question.id: question for question, _ in answered}.values())
    kinds = {FAULT: "differ", NEAR_TIE: "differ at a near tie", UNEXPLAINED: "differ, and nothing says how nearly"}
    shown = [f"{counts[kind]} {words}" for kind, words in kinds.items() if counts[kind]]
    summary = "; ".join([f"{len(answered) - len(differences)} of {len(answered)} answers are the baseline's", *shown])
    if varied:
        summary += f"; the baseline itself answered {varied} of them in several ways"
    return Finding(check, status_of(counts), summary, differences, {"answers": len(answered)})


def status_of(counts: Mapping[str, int]) -> str:
    """Return a check's status, given how many differences there are of each kind."""
    return FAILED if counts.get(FAULT) else UNDECIDED if counts.get(UNEXPLAINED) else PASSED


def breach(question: Question, ours: str, theirs: str, fault: str, note: str) -> Difference:
    """Return a fault that a note says, in an answer of the audited server."""
    return Difference(question, ours, theirs, first_difference(ours, theirs), None, FAULT, fault, note=note[:SHOWN])


def kind_of(gap: float | None, near_tie: float) -> str:
    """Return what a difference is, given by how many nats the baseline's choice was likelier."""
    if gap is not None and gap > near_tie:
        return FAULT
    return UNEXPLAINED if gap is None or isinstance(gap, Bound) else NEAR_TIE


def with_logprobs(question: Question) -> Question:
    """Return the same question, asked with logprobs."""
    fields = {"logprobs": True, "top_logprobs": LOGPROBS} if question.chat else {"logprobs": LOGPROBS}
    return question.having("with logprobs", **fields)


def unstreamed(question: Question) -> Question:
    """Return the same question, answered as a whole."""
    return question.having("whole", stream=False)


def first_difference(one: str, other: str) -> int:
    """Return the first byte in which two texts differ; the length of the shorter where it begins the other."""
    return shared_length(one.encode(), other.encode())


def gap_at(theirs: Reply, ours: str, body: Mapping[str, Any]) -> tuple[int, float | None]:
    """Return where a text leaves an answer with logprobs, and by how many nats the answer's token is likelier there.

    Of a token that is not among the most probable it is a Bound, since it lies below the last of them. None where the
    tokens are not those of the text, or end before.
    """
    text, other = theirs.text.encode(), ours.encode()
    at, offset = first_difference(theirs.text, ours), 0
    for token, (logprob, top) in zip(theirs.tokens, penalized(theirs.tokens, body), strict=True):
        if offset == len(text) and offset == at:  # the token that ended the answer
            return at, lead(logprob, top, token.text, other[offset:])
        if not text.startswith(token.text, offset):
            return at, None
        if offset + len(token.text) > at:
            return at, lead(logprob, top, token.text, other[offset:])
        offset += len(token.text)
    return at, None


def lead(logprob: float, top: Mapping[bytes, float], chosen: bytes, rest: bytes) -> float | None:
    """Return a token's lead over the one with which `rest` goes on, or over the next one where nothing goes on."""
    others = {text: value for text, value in top.items() if text != chosen}
    if not others:
        return None
    if not rest:
        return logprob - max(others.values())
    going_on = [text for text in others if text and rest.startswith(text)]
    return logprob - others[max(going_on, key=len)] if going_on else Bound(logprob - min(others.values()))


def penalized(tokens: Sequence[Token], body: Mapping[str, Any]) -> list[tuple[float, dict[bytes, float]]]:
    """Return the logprobs, of each token and of the most probable there, after presence and frequency penalties.

    Some engines report those before; there the choice is not always the most probable.
    """
    raw = [(token.logprob, token.top) for token in tokens]
    presence, frequency = (body.get(f"{key}_penalty", 0.0) for key in ("presence", "frequency"))
    if not (presence or frequency) or all(value >= max(top.values(), default=value) for value, top in raw):
        return raw
    counts: Counter[bytes] = Counter()
    adjusted = []
    for token in tokens:
        less = {text: presence * (counts[text] > 0) + frequency * counts[text] for text in [*token.top, token.text]}
        top = {text: value - less[text] for text, value in token.top.items()}
        adjusted.append((token.logprob - less[token.text], top))
        counts[token.text] += 1
    return adjusted


ISSUES = {"vllm": "vllm-project/vllm", "sglang": "sgl-project/sglang", "llama.cpp": "ggml-org/llama.cpp",
          "ik_llama.cpp": "ikawrakow/ik_llama.cpp", "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
          "transformers": "huggingface/transformers", "mistral.rs": "EricLBuehler/mistral.rs"}  # fmt: skip


class Fault(NamedTuple):
    """A fault: what it is in a clause, and public threads about it where there are, such as vllm#43559."""

    what: str
    incidents: tuple[str, ...]

    def links(self) -> list[tuple[str, str]]:
        """Return each thread and its address."""
        threads = [(thread, *thread.split("#")) for thread in self.incidents]
        return [(thread, f"https://github.com/{ISSUES[name]}/issues/{number}") for thread, name, number in threads]


FAULTS = {
    "wrong_token": Fault("a token that is not the target's choice", ("vllm#46834",)),
    "rejected_draft": Fault("a drafted token is kept that verification should have rejected", ("vllm#46834",)),
    "draft_bonus": Fault(
        "the token after a wholly accepted draft is the draft's and not the target's", ("vllm#3951", "vllm#8320")
    ),
    "lost_token": Fault("a token is missing in the text", ()),
    "early_stop": Fault("answers end before the target ends them", ("vllm#42781", "ik_llama.cpp#2358")),
    "leak": Fault("text of another request in an answer", ("vllm#9441",)),
    "stale_cache": Fault("the prefix cache holds what another request or the draft left there", ("vllm#43559",)),
    "history": Fault("conversations are answered as if earlier messages were others", ()),
    "prompt_chunk": Fault("prompts that are cut into chunks are read wrongly", ("vllm#53488",)),
    "batch": Fault("answers differ when requests run together", ("vllm#9441", "llama.cpp#27117")),
    "cancelled": Fault("a cancelled request changes its neighbours", ()),
    "streaming": Fault("a streamed answer and a whole one differ", ()),
    "penalty": Fault("penalties miss some of the tokens of a pass", ("sglang#33643", "vllm#18902")),
    "limit": Fault(
        "answers that cross max_tokens within a pass do not end there, or give another finish_reason",
        ("ik_llama.cpp#2358",),
    ),
    "stop_string": Fault("text after a stop string is delivered", ("sglang#31599", "vllm#47616")),
    "logprobs": Fault("logprobs are not the target's", ("llama.cpp#27972", "vllm#17876")),
    "usage": Fault("tokens are counted wrongly", ("sglang#39826", "ik_llama.cpp#2358")),
    "choices": Fault("several choices of one request are not what they are alone", ("TensorRT-LLM#19487",)),
    "tool_call": Fault("tool calls are cut off or malformed", ("vllm#35800", "vllm#41967")),
    "schema": Fault("the schema or grammar is not applied to all tokens of a pass", ("vllm#9423", "vllm#44006")),
    "seed": Fault("a request's seed is ignored", ("vllm#6038", "vllm#55005", "TensorRT-LLM#17599")),
    "top_p": Fault("top_p is applied to draft and target in different ways", ("transformers#47932",)),
    "distribution": Fault("sampled text is not the target's", ("vllm#55005", "transformers#47932", "mistral.rs#2424")),
    "crash": Fault("the server goes away under requests in flight that the baseline answers", ("sglang#4188",)),
    "error": Fault("the server fails where the baseline answers", ("vllm#20531",)),
}
# What the first failure looks like, or its check; another check with its status, which tells it apart; the fault then.
DISTINCTIONS = (
    ("identity", "streaming", PASSED, "streaming"),  # the same answers, not streamed
    ("tool_calls", "schemas", FAILED, "schema"),
    ("seed", "sampling", FAILED, "distribution"),
)


def diagnosed(findings: Sequence[Finding]) -> str:
    """Return the fault that the failed checks together look like, a key of FAULTS; empty if none failed.

    Checks come in the order in which a fault that one shows makes later ones fail too, so the first failure says it,
    but for those that another check tells from it. A server that fails is named so.
    """
    statuses = {finding.check: finding.status for finding in findings}
    first = next((finding for finding in findings if finding.status == FAILED), None)
    if first is None:
        return ""
    for look, other, status, fault in DISTINCTIONS if first.fault not in ("error", "crash") else ():
        distinct = look in (first.fault, first.check) and statuses.get(other) == status
        if distinct and (fault != "streaming" or _most(first)):
            return fault
    return first.fault or ("wrong_token" if first.check == "identity" else first.check)


def _most(finding: Finding) -> bool:
    """Whether most answers have a fault; whole replies may be without one that is rarer by chance."""
    return 2 * sum(d.kind == FAULT for d in finding.differences) > finding.figures.get("answers", 0)
