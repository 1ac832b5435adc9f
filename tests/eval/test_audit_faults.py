"""What the audit makes of servers that fail now and then, and which fault it names."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eval.audit.compare import FAILED, NOT_OFFERED, PASSED, UNDECIDED, Audit, Finding
from eval.audit.run import verdict_of
from eval.audit.sampling import CHUNK, sampling
from eval.config import AuditorConfig
from eval.endpoint.questions import Question
from eval.endpoint.replies import Reply
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


def test_the_verdict_says_what_cannot_be_judged() -> None:
    findings = [Finding("identity", PASSED, ""), Finding("sampling", UNDECIDED, "most requests fail: http_503")]
    verdict = verdict_of([*findings, Finding("speed", PASSED, "", figures={"drafts": 1})], "", 0.5)
    assert verdict.status == UNDECIDED
    assert verdict.sentence == "no fault in 1 checks, but sampling cannot be judged: most requests fail: http_503"
