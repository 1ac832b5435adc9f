"""Single checks of the audit on replies without a network: both outcomes of each."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.answers.client import EndpointError
from heads.common.typed import from_yaml
from ops.audit import ENVIRONMENT, cut, difference_record, speed, verdict_of
from ops.audits.checks import checked, identity, limits, logprobs_hold, schemas, stop_in, stop_strings, usage
from ops.audits.compare import SIDES, Audit, AuditConfig, Difference, Finding, diagnosed, gap_at, penalized, violation
from ops.audits.sampling import OPENING, p_value, sampling
from ops.served import Question, Reply, Token, read_replies, read_tokens
from tests.ops.test_audit import SMALL

Answer = Callable[[str, int], Reply]
URLS = {"url": "http://h:1", "baseline": "http://h:2"}
UNAVAILABLE = Reply(error="http_503: overloaded")


class Asker:
    """Servers without a network: `answer` is given the side and how many requests the side had before."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.ended = answer, ""
        self.counts = {"audited": 0, "baseline": 0}
        self.sides = {side: SimpleNamespace(url=f"http://h:{i}") for i, side in enumerate(SIDES)}

    def one(self, side: str, question: Question) -> Reply:
        self.counts[side] += 1
        return self.answer(side, self.counts[side] - 1)

    def all(self, side: str, questions: list[Question], in_flight: int) -> list[Reply]:
        return [self.one(side, question) for question in questions]


def audit_of(answer: Answer, prompts: int = 4, **values: Any) -> Audit:
    asker: Any = Asker(answer)
    questions = [Question(f"q{i}", "/completions", {"prompt": f"q{i}"}) for i in range(prompts)]
    config = from_yaml(AuditConfig, "ops/audit", **(URLS | SMALL | {"samples": 16} | values))
    return Audit(asker, questions, config)


@pytest.mark.parametrize(
    ("failing", "wrong", "status", "fault"),
    [
        (lambda *_: False, False, "passed", ""),
        (lambda *_: False, True, "failed", "distribution"),
        (lambda side, _: side == "baseline", False, "not_offered", ""),
        (lambda side, number: side == "baseline" and number % 4, True, "undecided", ""),
        (lambda side, number: side == "audited" and number == 9, False, "failed", "error"),
    ],
)
def test_samples_of_another_distribution_and_failures_are_told_apart(
    failing: Any, wrong: bool, status: str, fault: str
) -> None:

    def answer(side: str, number: int) -> Reply:
        word = 0 if wrong and side == "audited" else number * 5 % 8
        return UNAVAILABLE if failing(side, number) else Reply(text=f"w{word} and more")

    finding = sampling(audit_of(answer, alpha=0.01), "sampling")
    assert (finding.status, finding.fault) == (status, fault)


def test_samples_of_one_distribution_pass_and_others_do_not() -> None:
    rng = np.random.default_rng(1)
    words = np.array([f"{a} {b}" for a in "uvwxyz" for b in "stuv"])

    def p_of(ours: list[str], theirs: list[str]) -> float:
        return p_value([(ours, theirs)], 1e-4, rng)

    def sampled(count: int, shift: float) -> list[str]:
        weights = np.ones(len(words))
        weights[0] += shift
        return [str(text) for text in rng.choice(words, count, p=weights / weights.sum())]

    ps = [p_of(sampled(40, 0), sampled(40, 0)) for _ in range(60)]
    assert sum(p <= 0.1 for p in ps) <= 15
    assert min(ps) > 1e-3
    assert p_of(sampled(80, 40), sampled(80, 0)) < 1e-4
    assert p_of(["a b c"] * 30, ["a b"] * 30) < 1e-4
    same = "a " * OPENING
    assert p_of([same + "b c d e"] * 30, [same + "e d c b"] * 30) < 1e-4, "in another order they are other answers"
    assert p_of(["a b"] * 8, ["a b"] * 8) == 1


FAILING = violation(Question("q", "/completions", {}), "a", "b", "usage", "counted wrongly")
DIFFERING = FAILING._replace(kind="unexplained", fault="")
NO_DRAFTS = "no fault in 2 checks, but the server counts no drafts: does it speculate?"
UNCLEAR = "answers differ in usage, and no logprobs say whether at near ties"


@pytest.mark.parametrize(
    ("status", "differences", "drafts", "ended", "near_tie", "expected", "sentence"),
    [
        ("passed", [], 1, "", 4.0, "passed", "no fault in 2 checks"),
        ("passed", [], None, "", 0.5, "passed", "no fault in 2 checks"),
        ("passed", [], 0, "", 0.5, "undecided", NO_DRAFTS),
        ("passed", [], 1, "", 4.1, "undecided", "the baseline left its own answers across 2.0 nats: is it greedy?"),
        ("passed", [], 1, "interrupted", 0.5, "undecided", "no fault in 2 checks, then interrupted"),
        ("not_offered", [], 1, "", 0.5, "passed", "no fault in 1 checks"),
        ("undecided", [], 1, "", 0.5, "undecided", "no fault in 1 checks, but usage cannot be judged: why"),
        ("undecided", [DIFFERING], 1, "", 0.5, "undecided", UNCLEAR),
        ("failed", [FAILING], 0, "", 4.1, "failed", "not lossless: usage failed"),
        ("failed", [FAILING], 1, "interrupted", 0.5, "failed", "not lossless: usage failed, then interrupted"),
    ],
)
def test_the_verdict_of_findings(
    status: str, differences: list[Difference], drafts: int | None, ended: str, near_tie: float, expected: str,
    sentence: str,
) -> None:  # fmt: skip
    findings = [Finding("passed", "", check="identity"), Finding(status, "why", differences, check="usage")]
    verdict = verdict_of([*findings, Finding("passed", "", figures={"drafts": drafts}, check="speed")], ended, near_tie)
    assert (verdict.status, verdict.sentence) == (expected, sentence)
    assert verdict.fault == ("usage" if expected == "failed" else "")


def test_the_diagnosis_is_of_the_first_failure_but_for_telling_ones() -> None:
    def finding(check: str, status: str = "failed", look: str = "", differing: int = 0) -> Finding:
        wrong = [FAILING._replace(fault=look)] * differing
        return Finding(status, "", wrong, {"answers": 16}, check)

    passed = finding("streaming", "passed")
    for findings, fault in (
        ([finding("identity", "passed")], ""),
        ([finding("identity"), finding("streaming")], "wrong_token"),
        ([finding("identity", "failed", "", 9), passed], "streaming"),
        ([finding("identity", "failed", "limit", 9), passed], "streaming"),
        ([finding("identity", "failed", "", 1), passed], "wrong_token"),
        ([finding("identity", "failed", "error", 9), passed], "error"),
        (
            [passed, finding("sampling", "failed", "distribution", 1), finding("seeds", "failed", "seed", 1)],
            "distribution",
        ),
    ):
        assert diagnosed(findings) == fault


@pytest.mark.parametrize(
    ("text", "kind", "shown"),
    [
        ("ax", "near_tie", ", 0.10 nats less likely"),
        ("ay", "fault", ", 3.00 nats less likely"),
        ("az", "fault", ", at least 3.00 nats less likely"),
        ("bz", "unexplained", ", at least 0.20 nats less likely"),  # any token may be as near as the last one listed
        ("bx", "near_tie", ", 0.20 nats less likely"),
    ],
)
def test_a_token_that_is_not_listed_is_no_near_tie(text: str, kind: str, shown: str) -> None:
    tops = {"a": {b"x": -0.6, b"y": -3.5}, "b": {b"v": -0.6, b"x": -0.7}}
    tokens = (Token(text[0].encode(), 0.0, {}), Token(b"w", -0.5, {b"w": -0.5, **tops[text[0]]}))
    question = Question("q", "/completions", {"prompt": "q"})
    reply = Reply(f"{text[0]}w", tokens=tokens)
    audit = audit_of(lambda _, __: reply)
    audit.add_reference(question, reply)
    difference = audit.difference(question, Reply(text))
    assert difference.kind == kind
    words: Any = ENVIRONMENT.get_template("words.j2").module
    assert words.gap_of(difference_record(difference)).startswith(shown)


@pytest.mark.parametrize(
    ("theirs", "ours", "status", "summary"),
    [
        (["no"], ["no"], "not_offered", "the baseline does not hold it: 0 of 8 replies hold; 8 violations are the"),
        (["no", "yes"], ["no", "yes"], "passed", "4 of 8 replies hold; 4 violations are the baseline's too"),
        (["yes"], ["yes", "no"], "failed", "4 of 8 replies hold"),
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
    finding = checked(audit, "schema", audit.questions, lambda _, r, __: None if r.text == "yes" else "not")
    assert finding.status == status
    assert finding.summary.startswith(summary)


ONE = Reply(text="a b", completion_tokens=1, finish_reason="length", prompt_tokens=3)
STOPPED = Reply(text="one two", finish_reason="stop", completion_tokens=2)


@pytest.mark.parametrize(
    ("check", "theirs", "ours", "note"),
    [
        (
            limits,
            ONE,
            ONE._replace(finish_reason="stop"),
            "the baseline's text of 1 tokens, finish_reason stop and not length",
        ),
        (limits, ONE._replace(finish_reason=None), ONE, None),  # the baseline gives none
        (limits, ONE, ONE._replace(text="a c"), None),  # another token of as many
        (limits, ONE, ONE._replace(text="a", completion_tokens=0, finish_reason="stop"), None),
        (limits, ONE, ONE._replace(text="a"), "1 tokens: 'a' is cut short"),
        (limits, ONE, ONE._replace(text="a b c", completion_tokens=2), "2 tokens where max_tokens is 1, finish_reason"),
        (limits, ONE, ONE._replace(text="a", completion_tokens=0), "0 tokens where max_tokens is 1, finish_reason"),
        (limits, ONE, ONE._replace(text="a b c", completion_tokens=None), None),
        (stop_strings, STOPPED, STOPPED, None),
        (stop_strings, STOPPED, STOPPED._replace(text="one two three"), "the stop string ' three' is in the text"),
        (
            stop_strings,
            STOPPED,
            STOPPED._replace(finish_reason="length"),
            "finish_reason length where the baseline stops at",
        ),
        (stop_strings, STOPPED, STOPPED._replace(text="one", finish_reason="length"), None),  # another answer
        (stop_strings, STOPPED._replace(finish_reason="length"), STOPPED._replace(finish_reason="length"), None),
        (usage, ONE, ONE, None),
        (usage, ONE, ONE._replace(prompt_tokens=4), "4 tokens of the prompt, the baseline counts 3"),
        (usage, ONE, ONE._replace(completion_tokens=2), "2 tokens of the same text, the baseline counts 1"),
        (usage, ONE, ONE._replace(text="c", completion_tokens=2), None),
    ],
)
def test_both_outcomes_of_what_a_reply_must_hold(
    check: Callable[[Audit], Finding], theirs: Reply, ours: Reply, note: str | None
) -> None:
    audit = audit_of(lambda side, _: ours if side == "audited" else theirs, prompts=1)
    audit.answers.update({question.content: [Reply(text="one two three four")] for question in audit.questions})
    finding = check(audit)
    assert finding.status == ("failed" if note else "passed")
    assert not note or finding.differences[0].note.startswith(note)


def listed(*tokens: str, also: str = "wxyz", **values: float) -> Reply:
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


def third(also: str = "wxyz", **values: float) -> Reply:
    """Return FIVE with another list of its third token."""
    return at(FIVE, 2, listed(*"abcde", also=also, **values))


FIVE = listed(*"abcde")  # lists of five, the token's own entry among them


@pytest.mark.parametrize(
    ("theirs", "ours", "note"),
    [
        (FIVE, FIVE, None),
        (FIVE, listed(*"abcde", b=-0.9), None),
        (FIVE, listed(*"abcde", b=0.1), "token 1 has 0.100 where the baseline has -0.500"),
        (FIVE, listed(*"abcde", **dict.fromkeys("abcde", -0.38)), None),
        (FIVE, listed(*"abcde", **dict.fromkeys("abcde", -0.36)), "token 0 has -0.360 where"),
        (FIVE, third(z=-4.9), None),
        (FIVE, third(z=-5.1), "an alternative to token 2 has -5.100 where"),
        (FIVE, third("wxyu", u=-3.1), None),  # as the last one any may be listed
        (FIVE, third("wxyu", u=-2.9), "an alternative to token 2 has -2.900 where"),
        (FIVE, third("xyzu", x=-2.0, y=-3.0, z=-4.0, u=-4.5), "an alternative to token 2 has -4.500 where the base"),
        (FIVE, listed(*"abcde", also="wxy"), "token 0 lists 4 alternatives where the baseline lists 5"),
        (FIVE, third("wxy"), None),  # two of the same text are one
        (FIVE, third("wx"), "token 2 lists 3 alternatives where the baseline lists 5"),
        (third("wxyzv"), FIVE, None),  # the token in addition to the five asked for
        (FIVE, listed("a", "x", "c", c=-3.0), None),  # behind a near tie nothing is compared
        (FIVE, Reply("abcde"), "no logprobs"),
    ],
)
def test_logprobs_are_the_baseline_s_with_their_alternatives(theirs: Reply, ours: Reply, note: str | None) -> None:
    finding = logprobs_hold(audit_of(lambda side, _: ours if side == "audited" else theirs))
    assert finding.status == ("failed" if note else "passed")
    assert not note or finding.differences[0].note.startswith(note)
    assert finding.summary == f"{0 if note else 8} of 8 replies hold"


def test_a_baseline_without_logprobs_offers_none() -> None:
    assert logprobs_hold(audit_of(lambda _, __: Reply("a"))).status == "not_offered"


def token(text: str, logprob: float, **top: float) -> Token:
    return Token(text.encode(), logprob, {key.encode(): value for key, value in {text: logprob, **top}.items()})


def test_penalties_are_taken_off_logprobs_from_before_them() -> None:
    tokens = (token("a", -0.1, b=-2.0), token("b", -1.0, a=-0.5))
    body = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
    assert penalized(tokens, {}) == [*tokens]
    second = penalized(tokens, body)[1]
    assert (second.logprob, second.top[b"a"]) == (-1.0, pytest.approx(-1.5))
    after = [token("a", -0.1, b=-2.0), token("b", -0.4, a=-0.5)]
    assert penalized(after, body) == after  # the choice is the most probable one: they are after


def test_the_gap_is_that_of_the_token_at_the_first_difference() -> None:
    tokens = (token("a", -0.1, b=-3.0), token("bc", -0.2, bd=-0.5, x=-4.0), token("e", -0.1, f=-2.0))
    theirs = Reply("abce", tokens=tokens)
    assert gap_at(theirs, "abde", {}) == (2, pytest.approx(0.3))
    assert gap_at(theirs, "abze", {}) == (2, pytest.approx(3.8))  # at least: the token is not listed
    assert gap_at(theirs, "abc", {}) == (3, pytest.approx(1.9))  # an end
    assert gap_at(theirs, "abcef", {}) == (4, None)  # the baseline ended, and does not say how surely
    assert gap_at(Reply("abce"), "abde", {}) == (2, None)
    assert gap_at(Reply("zbce", tokens=tokens), "zbde", {}) == (2, None)  # the tokens are not the text's
    ended = Reply("abce", tokens=(*tokens, token("</s>", -0.4, g=-0.6)))
    assert gap_at(ended, "abceg", {}) == (4, pytest.approx(0.2))


def test_replies_are_assembled_from_their_events() -> None:
    first = {"logprobs": {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}}
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a"'}}
    more = {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}, "finish_reason": "tool_calls"}
    choices: list[list[dict[str, Any]]] = [
        [{"index": 0, "delta": {"content": "a"}, **first}],
        [{"index": 1, "delta": {"tool_calls": [call]}}],
        [{"index": 1, **more}],
        [],
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": True}
    events = [(0.1 + i, {"model": "m", "choices": one, "usage": usage}) for i, one in enumerate(choices)]
    one, other = read_replies(events, "m")
    assert (one.text, one.tokens, one.ttft_s) == ("a", (Token(b"a", -0.5, {}),), 0.1)
    assert (other.calls, other.finish_reason) == ((("f", '{"a": 1}'),), "tool_calls")
    assert (other.prompt_tokens, other.completion_tokens) == (3, None)
    with pytest.raises(EndpointError, match="choices"):
        read_replies([(0.1, {"choices": [{"delta": {"tool_calls": ["f"]}}], "model": "m"})], "m")
    for logprobs, tokens in (
        ({"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None]}, []),
        ({"content": [{"token": "a", "bytes": 10**12, "logprob": -math.inf}]}, [Token(b"a", -9999.0, {})]),
        ({"content": [{"token": "a", "logprob": math.nan}]}, [Token(b"a", -9999.0, {})]),
        ({"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"b": -2}]}, [Token(b"a", -1.0, {b"b": -2.0})]),
    ):
        assert read_tokens(logprobs) == tokens


@pytest.mark.parametrize(
    ("text", "finish", "held"),
    [
        ('{"city": "Oslo", "degrees": 3}', "stop", True),
        ('{"city": "Oslo", "degrees": true}', "stop", False),
        ('{"city": "Os', "stop", False),
        ('{"city": "Os', "length", True),
        ("The weather in Oslo is", "length", False),  # free text up to the limit
        ("[" * 100_000, "stop", False),
        ("[]", "stop", False),
    ],
)
def test_a_schema_holds_or_was_cut_off_by_the_limit(text: str, finish: str, held: bool) -> None:
    right = Reply('{"degrees": -1, "city": "Oslo"}', finish_reason="stop")
    finding = schemas(audit_of(lambda side, _: right if side == "baseline" else Reply(text, finish_reason=finish)))
    assert finding.status == ("passed" if held else "failed")


def test_stop_strings_and_shown_texts() -> None:
    assert stop_in("one two three one two four") == " one"
    assert stop_in("a") is None
    assert cut("é" * 300, 500)[0].startswith("…")


def test_speculation_loses_from_a_load_on_only_if_no_larger_one_wins() -> None:
    audit = audit_of(lambda _, __: Reply())
    assert speed(audit, None, None).status == "not_run"
    for load, gain, losing in ((1, 0.5, 1), (4, 2.0, None), (8, 0.8, 8), (16, 0.7, 8)):
        for side, seconds in (("baseline", 1.0), ("audited", 1 / gain)):
            audit.time(side, load, [Reply(completion_tokens=9)] * 4, seconds)
        assert speed(audit, None, None).figures["loses_from"] == losing
    assert speed(audit, None, None).figures["speedup"] == pytest.approx({1: 0.5, 4: 2.0, 8: 0.8, 16: 0.7})


def test_both_servers_come_first_as_often() -> None:
    asked: list[str] = []
    audit = audit_of(lambda side, _: asked.append(side) or Reply(text="a", latency_s=1.0, completion_tokens=1))
    assert identity(audit).status == "passed"
    firsts = asked[2::2]
    assert (len(firsts), firsts.count("audited")) == (8, 4)
    assert not any(map(str.__eq__, firsts[:4], firsts[4:]))
