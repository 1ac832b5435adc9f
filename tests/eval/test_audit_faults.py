"""What the audit makes of servers that fail now and then, and which fault it names."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eval.audit.compare import (
    FAILED,
    FAULT,
    NEAR_TIE,
    NOT_OFFERED,
    PASSED,
    UNDECIDED,
    UNEXPLAINED,
    Audit,
    Comparer,
    Finding,
)  # fmt: skip
from eval.audit.greedy import borders
from eval.audit.properties import checked, limits
from eval.audit.run import difference_record, verdict_of
from eval.audit.sampling import CHUNK, sampling
from eval.audit.view import one_line
from eval.config import AuditorConfig
from eval.endpoint.questions import Question
from eval.endpoint.replies import Reply, Token
from tests.eval.test_audit import AUDITOR

Answer = Callable[[str, int], Reply]
UNAVAILABLE = Reply(error="http_503: overloaded")


class Asker:
    """Servers without a network: `answer` is given the side and how many requests the side had before."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.ended = answer, ""
        self.counts = {"audited": 0, "baseline": 0}

    def one(self, side: str, question: Question) -> Reply:
        self.counts[side] += 1
        return self.answer(side, self.counts[side] - 1)

    def all(self, side: str, questions: list[Question], in_flight: int) -> list[Reply]:
        return [self.one(side, question) for question in questions]

    def taken(self, items: Iterator[Any]) -> list[Any]:
        return list(items)


def audit_of(answer: Answer, prompts: int = 4, **auditor: Any) -> Audit:
    asker: Any = Asker(answer)
    comparer: Any = None
    questions = [Question(f"q{i}", "/completions", {"prompt": f"q{i}"}) for i in range(prompts)]
    return Audit(asker, comparer, questions, False, 16, 0, AuditorConfig(**{**AUDITOR, "samples": 16, **auditor}))


def sampled(failing: Callable[[str, int], bool], wrong: bool = False) -> Finding:
    """Sample answers of one of eight words, the audited ones always the same word if it is `wrong`."""

    def answer(side: str, number: int) -> Reply:
        word = 0 if wrong and side == "audited" else number * 5 % 8
        return UNAVAILABLE if failing(side, number) else Reply(text=f"w{word} and more")

    return sampling(audit_of(answer, alpha=0.01), "sampling")


def test_a_failed_reply_of_the_baseline_leaves_the_others_to_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.audit.sampling.MANY", CHUNK)
    finding = sampled(lambda side, number: side == "baseline" and number in (9, 79), wrong=True)
    assert (finding.status, finding.fault) == (FAILED, "distribution")
    assert "to each of 4 prompts (without 1 that failed: http_503: overloaded)" in finding.summary
    fine = sampled(lambda side, number: side == "baseline" and number == 9)
    assert fine.status == PASSED


@pytest.mark.parametrize(
    ("failing", "status", "summary"),
    [
        (lambda side, _: side == "baseline", NOT_OFFERED, "the baseline does not sample with these settings: http_503"),
        (lambda side, number: side == "baseline" and number % 4, UNDECIDED, "most requests fail: http_503: overloaded"),
        (lambda side, number: side == "audited" and number == 9, FAILED, "it fails: http_503: overloaded"),
        (lambda _, number: number % 16 == 9, PASSED, "(without 8 that failed: http_503"),
        (lambda side, number: number % 4 if side == "audited" else number % 16 == 9, FAILED, "it fails: http_503"),
    ],
)
def test_what_servers_that_fail_on_samples_come_to(failing: Any, status: str, summary: str) -> None:
    finding = sampled(failing)
    assert finding.status == status
    assert summary in finding.summary
    assert [difference.fault for difference in finding.differences] == (["error"] if status == FAILED else [])


def test_from_one_prompt_the_share_of_another_one_s_answers_is_not_known() -> None:
    def answer(_: str, number: int) -> Reply:
        return Reply(text=f"w{number * 5 % 8} and more")

    finding = sampling(audit_of(answer, prompts=1), "sampling")
    unknown = "not known from one prompt: another answer's beginning, another answer's words"
    assert finding.summary.endswith(unknown)
    assert set(finding.figures["smallest_shares"]) == {"lengths"}
    assert "not known" not in sampling(audit_of(answer, prompts=2), "sampling").summary


def test_without_borders_none_were_asked_for() -> None:
    finding = borders(audit_of(lambda _, __: Reply(), borders=[]))
    assert (finding.status, finding.summary) == (NOT_OFFERED, "no borders were to be tried: auditor.borders is empty")


def test_the_verdict_says_what_cannot_be_judged() -> None:
    findings = [Finding("identity", PASSED, ""), Finding("sampling", UNDECIDED, "most requests fail: http_503")]
    verdict = verdict_of([*findings, Finding("speed", PASSED, "", figures={"drafts": 1})], "", 0.5)
    assert verdict.status == UNDECIDED
    assert verdict.sentence == "no fault in 1 checks, but sampling cannot be judged: most requests fail: http_503"


@pytest.mark.parametrize(
    ("text", "kind", "shown"),
    [
        ("ax", NEAR_TIE, ", 0.10 nats less likely"),
        ("ay", FAULT, ", 3.00 nats less likely"),
        ("az", FAULT, ", at least 3.00 nats less likely"),
        ("bz", UNEXPLAINED, ", at least 0.20 nats less likely"),  # any token may lie as near as the last one listed
        ("bx", NEAR_TIE, ", 0.20 nats less likely"),
    ],
)
def test_a_token_that_is_not_listed_is_no_near_tie(text: str, kind: str, shown: str) -> None:
    tops = {"a": {b"x": -0.6, b"y": -3.5}, "b": {b"v": -0.6, b"x": -0.7}}
    tokens = (Token(text[0].encode(), 0.0, {}), Token(b"w", -0.5, {b"w": -0.5, **tops[text[0]]}))
    question = Question("q", "/completions", {"prompt": "q"})
    listed = Reply(f"{text[0]}w", tokens=tokens)
    comparer = Comparer(audit_of(lambda _, __: listed).asker, 0.5)
    comparer.learn(question, listed)
    difference = comparer.difference(question, Reply(text))
    assert difference is not None
    assert difference.kind == kind
    assert one_line(difference_record(difference)).endswith(f"{shown} to the baseline")


@pytest.mark.parametrize(
    ("theirs", "ours", "status", "summary"),
    [
        (
            ["no"],
            ["no"],
            NOT_OFFERED,
            "the baseline does not hold it: 0 of 8 replies hold; 8 breaches are the baseline's",
        ),
        (["no", "yes"], ["no", "yes"], PASSED, "4 of 8 replies hold; 4 breaches are the baseline's too"),
        (["yes"], ["yes", "no"], FAILED, "4 of 8 replies hold"),
    ],
)
def test_what_the_baseline_breaks_too_does_not_hold(
    theirs: list[str], ours: list[str], status: str, summary: str
) -> None:
    replies = {"baseline": theirs, "audited": ours}

    def answer(side: str, question: Question) -> Reply:
        return Reply(text=replies[side][int(question.id[1:]) % len(replies[side])])

    audit = audit_of(lambda _, __: Reply(), prompts=8)
    audit.asker.one = answer
    finding = checked(audit, "schemas", "schema", audit.questions, lambda _, r, __: None if r.text == "yes" else "not")
    assert finding.status == status
    assert finding.summary.startswith(summary)


@pytest.mark.parametrize(
    ("theirs", "ours", "status"),
    [
        ("length", "length", PASSED),
        ("length", "stop", FAILED),
        ("stop", "length", FAILED),
        ("length", None, FAILED),
        (None, "length", PASSED),  # the baseline gives none
    ],
)
def test_an_answer_cut_by_max_tokens_says_so_as_the_baseline_s_does(
    theirs: str | None, ours: str | None, status: str
) -> None:
    finishes = {"baseline": theirs, "audited": ours}
    audit = audit_of(lambda side, _: Reply(text="a b", completion_tokens=2, finish=finishes[side]))
    finding = limits(audit)
    assert (finding.status, finding.fault) == (status, "limit" if status == FAILED else "")
