"""What the audit makes of servers that fail now and then, and which fault it names."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from heads.common.typed import from_yaml
from ops.audits.ask import AuditConfig
from ops.audits.compare import (
    FAILED,
    FAULT,
    NEAR_TIE,
    NOT_OFFERED,
    NOT_RUN,
    PASSED,
    UNDECIDED,
    UNEXPLAINED,
    Audit,
    Comparer,
    Difference,
    Finding,
    breach,
    penalized,
)  # fmt: skip
from ops.audits.greedy import borders
from ops.audits.output import one_line
from ops.audits.properties import checked, limits, logprobs_hold, stop_strings, usage
from ops.audits.run import difference_record, verdict_of
from ops.audits.sampling import AGAIN, CHUNK, sampling
from ops.served.exchange import Question, Reply, Token
from tests.ops.test_audit import SMALL, token

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


def audit_of(answer: Answer, prompts: int = 4, **values: Any) -> Audit:
    asker: Any = Asker(answer)
    comparer: Any = None
    questions = [Question(f"q{i}", "/completions", {"prompt": f"q{i}"}) for i in range(prompts)]
    urls = {"url": "http://h:1", "baseline": "http://h:2"}
    config = from_yaml(AuditConfig, "ops/audit", **(urls | SMALL | {"samples": 16} | values))
    return Audit(asker, comparer, questions, False, 16, 0, config)


def sampled(failing: Callable[[str, int], bool], wrong: bool = False) -> Finding:
    """Sample answers of one of eight words, the audited ones always the same word if it is `wrong`."""

    def answer(side: str, number: int) -> Reply:
        word = 0 if wrong and side == "audited" else number * 5 % 8
        return UNAVAILABLE if failing(side, number) else Reply(text=f"w{word} and more")

    return sampling(audit_of(answer, alpha=0.01), "sampling")


def test_a_failed_reply_of_the_baseline_leaves_the_others_to_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.audits.sampling.MANY", CHUNK)
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
    assert (finding.status, finding.summary) == (NOT_OFFERED, "no borders were to be tried: borders is empty")


def test_the_second_round_of_samples_has_seeds_of_its_own_on_either_side() -> None:
    seeds: list[tuple[str, int]] = []

    def one(side: str, question: Question) -> Reply:
        seeds.append((side, question.body["seed"]))
        return Reply(text="w0 and more" if side == "audited" else f"w{len(seeds) * 5 % 8} and more")

    audit = audit_of(lambda _, __: Reply(), prompts=1, alpha=0.01)
    audit.asker.one = one
    assert sampling(audit, "sampling").status == FAILED
    assert len(seeds) == 2 * audit.config.samples * (1 + AGAIN)
    assert len({seed for _, seed in seeds}) == len(seeds)


FAILING = breach(Question("q", "/completions", {}), "a", "b", "usage", "counted wrongly")
DIFFERING = FAILING._replace(kind=UNEXPLAINED, fault="")


@pytest.mark.parametrize(
    ("status", "differences", "drafts", "ended", "near_tie", "expected", "sentence"),
    [
        (PASSED, [], 1, "", 4.0, PASSED, "no fault in 2 checks"),
        (PASSED, [], None, "", 0.5, PASSED, "no fault in 2 checks"),
        (
            PASSED, [], 0, "", 0.5, UNDECIDED,
            "no fault in 2 checks, but the server counts no drafts: does it speculate?",
        ),
        (PASSED, [], 1, "", 4.1, UNDECIDED, "the baseline left its own answers across 2.0 nats: is it greedy?"),
        (PASSED, [], 1, "interrupted", 0.5, UNDECIDED, "no fault in 2 checks, then interrupted"),
        (NOT_OFFERED, [], 1, "", 0.5, PASSED, "no fault in 1 checks"),
        (UNDECIDED, [], 1, "", 0.5, UNDECIDED, "no fault in 1 checks, but usage cannot be judged: why"),
        (
            UNDECIDED, [DIFFERING], 1, "", 0.5, UNDECIDED,
            "answers differ in usage, and no logprobs say whether at near ties",
        ),
        (FAILED, [FAILING], 0, "", 4.1, FAILED, "not lossless: usage failed"),
        (FAILED, [FAILING], 1, "interrupted", 0.5, FAILED, "not lossless: usage failed, then interrupted"),
    ],
)  # fmt: skip
def test_the_verdict_of_findings(
    status: str, differences: list[Difference], drafts: int | None, ended: str, near_tie: float, expected: str,
    sentence: str,
) -> None:  # fmt: skip
    findings = [Finding("identity", PASSED, ""), Finding("usage", status, "why", differences)]
    verdict = verdict_of([*findings, Finding("speed", PASSED, "", figures={"drafts": drafts})], ended, near_tie)
    assert (verdict.status, verdict.sentence) == (expected, sentence)
    assert verdict.fault == ("usage" if expected == FAILED else "")
    first = verdict_of(
        [Finding("identity", NOT_OFFERED, "http_400"), Finding("speed", NOT_RUN, "", figures={"drafts": 1})], "", 0.5
    )
    assert first[:2] == (UNDECIDED, "nothing could be compared: http_400")


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


ONE = Reply(text="a b", completion_tokens=1, finish="length", prompt_tokens=3, total_tokens=4)
STOPPED = Reply(text="one two", finish="stop", completion_tokens=2)


@pytest.mark.parametrize(
    ("check", "theirs", "ours", "note"),
    [
        (limits, ONE, ONE._replace(text="a c"), None),  # another token of as many
        (limits, ONE, ONE._replace(text="a", completion_tokens=0, finish="stop"), None),
        (limits, ONE, ONE._replace(text="a"), "1 tokens: 'a' is cut short"),
        (limits, ONE, ONE._replace(text="a b c", completion_tokens=2), "2 tokens where max_tokens is 1, finish_reason"),
        (limits, ONE, ONE._replace(text="a", completion_tokens=0), "0 tokens where max_tokens is 1, finish_reason"),
        (limits, ONE, ONE._replace(text="a b c", completion_tokens=None), None),
        (stop_strings, STOPPED, STOPPED, None),
        (stop_strings, STOPPED, STOPPED._replace(text="one two three"), "the stop string ' three' is in the text"),
        (stop_strings, STOPPED, STOPPED._replace(finish="length"), "finish_reason length where the baseline stops at"),
        (stop_strings, STOPPED, STOPPED._replace(text="one", finish="length"), None),  # another answer
        (stop_strings, STOPPED._replace(finish="length"), STOPPED._replace(finish="length"), None),
        (usage, ONE, ONE, None),
        (usage, ONE, ONE._replace(prompt_tokens=4), "4 tokens of the prompt, the baseline counts 3"),
        (usage, ONE, ONE._replace(completion_tokens=2), "2 tokens of the same text, the baseline counts 1"),
        (usage, ONE, ONE._replace(text="c", completion_tokens=2, total_tokens=5), None),
        (usage, ONE, ONE._replace(text="c", completion_tokens=2), "3 and 2 tokens add up to 4"),
        (usage, ONE, ONE._replace(total_tokens=5), "3 and 1 tokens add up to 5"),
        (usage, ONE, ONE._replace(total_tokens=None), None),
    ],
)
def test_both_outcomes_of_what_a_reply_must_hold(
    check: Callable[[Audit], Finding], theirs: Reply, ours: Reply, note: str | None
) -> None:
    audit = audit_of(lambda side, _: ours if side == "audited" else theirs, prompts=1)
    answers = {question.content: [Reply(text="one two three four")] for question in audit.questions}
    audit.comparer = Comparer(audit.asker, 0.5)
    audit.comparer.answers = answers
    finding = check(audit)
    assert finding.status == (FAILED if note else PASSED)
    assert not note or finding.differences[0].note.startswith(note)


def listed(*tokens: str, also: str = "vwxyz", **values: float) -> Reply:
    """Return a reply whose tokens' lists hold each token at -0.5 and others from -1 on, but for the `values`."""
    tops = [{token: -0.5, **{other: -1.0 - i for i, other in enumerate(also) if other != token}} for token in tokens]
    for top in tops:
        top.update((key, value) for key, value in values.items() if key in top)
    made = [
        Token(token.encode(), values.get(token, -0.5), {key.encode(): value for key, value in top.items()})
        for token, top in zip(tokens, tops, strict=True)
    ]
    return Reply("".join(tokens), tokens=tuple(made))


def at(reply: Reply, index: int, other: Reply) -> Reply:
    """Return a reply with the list of another one's token at an index."""
    tokens = list(reply.tokens)
    tokens[index] = tokens[index]._replace(top=other.tokens[index].top)
    return reply._replace(tokens=tuple(tokens))


FIVE = listed(*"abcde", also="wxyz")  # lists of five, the token's own entry among them
LOW = listed("a", also="wxyz", a=-3.0)  # the token is not the most probable


@pytest.mark.parametrize(
    ("theirs", "ours", "note"),
    [
        (FIVE, FIVE, None),
        (FIVE, listed(*"abcde", also="wxyz", b=-0.9), None),
        (FIVE, listed(*"abcde", also="wxyz", b=0.1), "token 1 has 0.100 where the baseline has -0.500"),
        (FIVE, listed(*"abcde", also="wxyz", **dict.fromkeys("abcde", -0.38)), None),
        (FIVE, listed(*"abcde", also="wxyz", **dict.fromkeys("abcde", -0.36)), "token 0 has -0.360 where"),
        (FIVE, at(FIVE, 2, listed(*"abcde", also="wxyz", z=-4.9)), None),
        (FIVE, at(FIVE, 2, listed(*"abcde", also="wxyz", z=-5.1)), "an alternative to token 2 has -5.100 where"),
        (FIVE, at(FIVE, 2, listed(*"abcde", also="wxyu", u=-3.1)), None),  # as the last one any may be listed
        (FIVE, at(FIVE, 2, listed(*"abcde", also="wxyu", u=-2.9)), "an alternative to token 2 has -2.900 where"),
        (
            FIVE,
            at(FIVE, 2, listed(*"abcde", also="xyzu", x=-2.0, y=-3.0, z=-4.0, u=-4.5)),
            "an alternative to token 2 has -4.500 where the baseline has -1.000",
        ),
        (FIVE, listed(*"abcde", also="wxy"), "token 0 lists 4 alternatives where the baseline lists 5"),
        (FIVE, at(FIVE, 2, listed(*"abcde", also="wxy")), None),  # two of the same text are one
        (FIVE, at(FIVE, 2, listed(*"abcde", also="wx")), "token 2 lists 3 alternatives where the baseline lists 5"),
        (FIVE, listed(*"abcde", also=""), "token 0 lists 1 alternatives where the baseline lists 5"),
        (at(FIVE, 2, listed(*"abcde", also="wxyzv")), FIVE, None),  # the token in addition to the five asked for
        (FIVE, listed("a", "x", "c", also="wxyz", c=-3.0), "token 2 is not the first of its alternatives"),
        (FIVE, listed("a", "x", "c", also="wxyz", c=-1.4), None),  # behind a near tie nothing is compared
        (FIVE, at(FIVE, 1, listed("a", "q", *"cde", also="wxyz")), "an alternative to token 1 has"),
        (FIVE, Reply("abcde"), "no logprobs"),
        (FIVE, FIVE._replace(text="other"), "the tokens of the logprobs are not those of the text"),
    ],
)
def test_logprobs_are_the_baseline_s_with_their_alternatives(theirs: Reply, ours: Reply, note: str | None) -> None:
    audit = audit_of(lambda side, _: ours if side == "audited" else theirs)
    audit.comparer = SimpleNamespace(near_tie=0.5)
    finding = logprobs_hold(audit)
    assert finding.status == (FAILED if note else PASSED)
    assert not note or finding.differences[0].note.startswith(note)
    assert finding.summary == f"{0 if note else 8} of 8 replies hold"


@pytest.mark.parametrize(
    ("theirs", "ours", "summary"),
    [
        (LOW, LOW, "8 of 8 replies hold; of the baseline itself token 0 is not the first of its alternatives"),
        (
            listed("a", also="vw"),
            listed("a"),
            "8 of 8 replies hold; of the baseline itself token 0 lists 3 alternatives where 5 were asked for",
        ),
        (
            Reply("a", tokens=(Token(b"a", -0.5, {}),)),
            listed("a"),
            "8 of 8 replies hold; of the baseline itself token 0",
        ),
        (Reply("a"), listed("a"), "the baseline gives no logprobs"),
    ],
)
def test_alternatives_that_the_baseline_breaks_are_said(theirs: Reply, ours: Reply, summary: str) -> None:
    audit = audit_of(lambda side, _: ours if side == "audited" else theirs)
    audit.comparer = SimpleNamespace(near_tie=0.5)
    finding = logprobs_hold(audit)
    assert finding.status == (PASSED if theirs.tokens else NOT_OFFERED)
    assert finding.summary.startswith(summary)


def test_penalties_are_taken_off_logprobs_from_before_them() -> None:
    tokens = (token("a", -0.1, b=-2.0), token("b", -1.0, a=-0.5))
    body = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
    assert penalized(tokens, {}) == [(-0.1, tokens[0].top), (-1.0, tokens[1].top)]
    second, top = penalized(tokens, body)[1]
    assert (second, top[b"a"]) == (-1.0, pytest.approx(-1.5))
    after = (token("a", -0.1, b=-2.0), token("b", -0.4, a=-0.5))
    assert penalized(after, body)[1] == (-0.4, after[1].top)  # the choice is the most probable one: they are after
