"""Two-sample tests of sampled answers: the audited server's against the baseline's, and the fault that they reveal.

Every test is a permutation test of a quadratic form s' K s: s is 1 for one server's answers and -1 for the other's, K a
kernel of two answers to the same prompt. That is the maximum mean discrepancy of the kernel (Gretton et al. 2012,
https://jmlr.org/papers/v13/gretton12a.html), and the energy distance where K is the negative distance (Szekely and
Rizzo 2013). Labels are exchanged within a prompt, so p-values are exact whatever the distributions.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainccinv

from ops.audits.ask import AUDITED, BASELINE, EndedError
from ops.audits.compare import (
    FAILED,
    FAULT,
    NOT_OFFERED,
    NOT_RUN,
    PASSED,
    UNDECIDED,
    Audit,
    Difference,
    Finding,
    breach,
)  # fmt: skip
from ops.served.exchange import Question, Reply

Array = NDArray[Any]

PROMPTS = 4
OPENING = 8  # words of an answer whose beginnings are compared
NGRAM = 3  # words of the longest n-grams that are counted
IN_FLIGHT = 8
FEW, MANY = 2_000, 200_000  # permutations: the first look, and what decides where it is extreme
CHUNK = 10_000
SUSPECT = 0.05  # a p-value after which more is sampled
AGAIN = 4  # times as much
POWER = 0.9
SHARES = (0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.5)
SIMULATIONS = 40
NOTHING = 1e-9  # of a form, but for rounding
SETTINGS = {"sampling": {"temperature": 1.0}, "sampling_top_p": {"temperature": 1.0, "top_p": 0.4}}
TESTS = {  # each with the fault whose smallest share is said
    "beginnings": "another answer's beginning",
    "lengths": "half the length",
    "words": "another answer's words",
}


class Sampled(NamedTuple):
    """A question, and both servers' replies to it, one a seed."""

    question: Question
    ours: list[Reply]
    theirs: list[Reply]

    @property
    def texts(self) -> tuple[list[str], list[str]]:
        """As many answers of either server, without the requests that failed."""
        ours, theirs = ([reply.text for reply in side if not reply.error] for side in (self.ours, self.theirs))
        count = min(len(ours), len(theirs))
        return ours[:count], theirs[:count]

    @property
    def whole(self) -> bool:
        """Whether at least half of the requests were answered by both servers."""
        return 2 * len(self.texts[0]) >= len(self.ours)

    @property
    def errors(self) -> tuple[list[str], list[str]]:
        """Either server's errors."""
        ours, theirs = ([reply.error for reply in side if reply.error] for side in (self.ours, self.theirs))
        return ours, theirs


def sampling(audit: Audit, check: str) -> Finding:
    """Sample both servers' answers to a few prompts, each with a seed of its own, and test that they agree.

    Where they look as if they did not, AGAIN times as many are sampled, and those alone decide.
    """
    settings = {**SETTINGS[check], "max_tokens": audit.config.sample_tokens}
    questions = [question.having("sampled", **settings) for question in audit.questions[:PROMPTS]]
    rng = np.random.default_rng(audit.seed)
    bound = audit.config.alpha / (len(TESTS) * len(SETTINGS))
    rounds: list[tuple[list[Sampled], dict[str, float]]] = []
    shares: dict[str, float | None] = {}
    compared: list[Sampled] = []
    for first, count in ((0, audit.config.samples), (2 * audit.config.samples, AGAIN * audit.config.samples)):
        sampled = audit.asker.taken(_sampled(audit, questions, first, count))
        if not sampled:
            break
        if (failing := _failing(check, sampled)) is not None:
            return failing
        compared = [one for one in sampled if one.whole]
        rounds.append((sampled, _tested(compared, rng, bound if rounds else 1.0)))
        shares = shares or smallest_shares([one.texts for one in compared], bound, rng)
        if min(rounds[-1][1].values()) > SUSPECT:
            break
    if not rounds:
        return Finding(check, NOT_RUN, "no answers")
    ps = rounds[-1][1]
    figures = {"p": [values for _, values in rounds], "smallest_shares": shares}
    summary = _summary(rounds, shares)
    if len(rounds) == 1 or min(ps.values()) > bound:
        return Finding(check, PASSED, summary, [], figures)
    kernels = kernels_of([one.texts for one in compared])[min(ps, key=lambda test: ps[test])]
    clearest = compared[int(np.argmax([_form(kernel) for kernel in kernels]))]
    ours, theirs = (_common(side) for side in clearest.texts)
    fault = "distribution" if check == "sampling" else "top_p"
    return Finding(
        check, FAILED, summary, [Difference(clearest.question, ours, theirs, 0, None, FAULT, fault)], figures
    )


def _failing(check: str, sampled: Sequence[Sampled]) -> Finding | None:
    """Return the finding on servers that fail, None where enough is answered by both to be compared."""
    for one in sampled:
        ours, theirs = one.errors
        if ours and (not theirs or len(theirs) < len(one.theirs) / 2 < len(ours)):
            note = f"it fails: {ours[0]}"
            return Finding(check, FAILED, note, [breach(one.question, "", "", "error", note)])
    if 2 * sum(one.whole for one in sampled) >= len(sampled):
        return None
    error = next(error for one in sampled for error in one.errors[1])
    if all(reply.error for one in sampled for reply in one.theirs):
        return Finding(check, NOT_OFFERED, f"the baseline does not sample with these settings: {error}")
    return Finding(check, UNDECIDED, f"most requests fail: {error}")


def _tested(sampled: Sequence[Sampled], rng: np.random.Generator, bound: float) -> dict[str, float]:
    """Return the p-value of each test, no finer than needed once one is at the bound."""
    ps: dict[str, float] = {}
    for test, kernels in kernels_of([one.texts for one in sampled]).items():
        ps[test] = p_value(kernels, rng, MANY if min(ps.values(), default=1.0) > bound else 0)
    return ps


def _summary(rounds: Sequence[tuple[list[Sampled], dict[str, float]]], shares: dict[str, float | None]) -> str:
    texts = []
    for sampled, ps in rounds:
        count, prompts = len(sampled[0].ours), sum(one.whole for one in sampled)
        tested = ", ".join(f"{test} p = {p:.2g}" for test, p in ps.items())
        errors = [error for one in sampled for side in one.errors for error in side]
        failed = f" (without {len(errors)} that failed: {errors[0]})" if errors else ""
        texts.append(f"{count} answers of each server to each of {prompts} prompts{failed}: {tested}")
    least = [
        f"{fault} in {f'more than {SHARES[-1]:.0%}' if shares[test] is None else f'{shares[test]:.0%}'}"
        for test, fault in TESTS.items()
        if test in shares
    ]
    seen = f"with probability {POWER} it sees {', '.join(least)} of the answers"
    unknown = [fault for test, fault in TESTS.items() if test not in shares]
    seen += f"; not known from one prompt: {', '.join(unknown)}" if unknown else ""
    return "; ".join([*texts, seen])


def _sampled(audit: Audit, questions: Sequence[Question], first: int, count: int) -> Iterator[Sampled]:
    """Yield both servers' replies to each question, `count` of either; `first` is added to the seed."""

    def replies(side: str, question: Question, seed: int) -> list[Reply]:
        several = [question.having(f"sample {seed + i}", seed=seed + i) for i in range(count)]
        answers = audit.asker.all(side, several, min(IN_FLIGHT, max(audit.config.concurrency)))
        whole = [reply for reply in answers if reply is not None]
        if len(whole) < count:
            raise EndedError(audit.asker.ended)
        return whole

    seed = audit.seed + first
    for question in questions:
        yield Sampled(question, replies(AUDITED, question, seed), replies(BASELINE, question, seed + count))


def words_of(text: str) -> list[str]:
    """Return a text's words and signs, each with the space before it."""
    return re.findall(r"\s*(?:\w+|[^\w\s])", text)


def kernels_of(answers: Sequence[tuple[list[str], list[str]]]) -> dict[str, list[Array]]:
    """Return the kernel of every test and prompt, over the audited server's answers and then the baseline's."""
    kernels: dict[str, list[Array]] = {test: [] for test in TESTS}
    for ours, theirs in answers:
        pieces = [words_of(text) for text in [*ours, *theirs]]
        kernels["beginnings"].append(beginnings(pieces))
        lengths = np.array([float(len(p)) for p in pieces])
        kernels["lengths"].append(-np.abs(lengths[:, None] - lengths[None]))
        kernels["words"].append(ngrams(pieces))
    return kernels


def beginnings(pieces: Sequence[Sequence[str]]) -> Array:
    """Return the number of first words that two answers share, at most OPENING, of every two."""
    kernel = np.zeros((len(pieces), len(pieces)))
    for count in range(1, OPENING + 1):
        _, ids = np.unique(["".join(words[:count]) for words in pieces], return_inverse=True)
        kernel += ids[:, None] == ids[None]
    return kernel


def ngrams(pieces: Sequence[Sequence[str]]) -> Array:
    """Return the product of every two answers' counts of n-grams of 1 to NGRAM words; frequent n-grams weigh less."""
    numbers: dict[tuple[str, ...], int] = {}
    numbered = [
        [
            numbers.setdefault(tuple(words[i : i + size]), len(numbers))
            for size in range(1, NGRAM + 1)
            for i in range(len(words) - size + 1)
        ]
        for words in pieces
    ]
    counts = np.zeros((len(pieces), max(1, len(numbers))))
    for row, ids in enumerate(numbered):
        np.add.at(counts[row], ids, 1)
    scaled = counts / np.sqrt(np.maximum(counts.sum(0), 1.0))
    kernel: Array = scaled @ scaled.T
    return kernel


def p_value(kernels: Sequence[Array], rng: np.random.Generator, most: int = MANY) -> float:
    """Return the p-value of the hypothesis that both halves of every kernel's rows are of one distribution.

    Where FEW permutations show it to be extreme, `most` are tried, a multiple of CHUNK.
    """
    observed = sum(_form(kernel) for kernel in kernels)
    bound = observed - NOTHING * abs(observed)

    def p_among(*chunks: int) -> float:
        return float(1 + sum((permuted(kernels, count, rng) >= bound).sum() for count in chunks)) / (1 + sum(chunks))

    p = p_among(FEW)
    return p if p > 2 / (1 + FEW) or not most else p_among(*[CHUNK] * (most // CHUNK))


def permuted(kernels: Sequence[Array], count: int, rng: np.random.Generator) -> Array:
    """Return the statistic under so many exchanges of labels."""
    totals = np.zeros(count)
    for kernel in kernels:
        labels = rng.permuted(np.tile(_labels(len(kernel)), (count, 1)), axis=1)
        totals += np.einsum("ij,ij->i", labels @ kernel, labels)
    return totals


def _labels(count: int) -> Array:
    return np.where(np.arange(count) < count // 2, 1.0, -1.0)


def _form(kernel: Array) -> float:
    labels = _labels(len(kernel))
    return float(labels @ kernel @ labels)


def smallest_shares(
    answers: Sequence[tuple[list[str], list[str]]], bound: float, rng: np.random.Generator
) -> dict[str, float | None]:
    """Return the smallest share of wrong answers that each test shows by itself with POWER; None for none of SHARES.

    Both servers' answers are sampled anew from the baseline's, and a share of the audited one's is replaced: in the
    test of lengths by their first halves, in the others, left out of a single prompt's, by answers to another prompt.
    """
    size = min(len(theirs) for _, theirs in answers)
    right = [theirs[:size] for _, theirs in answers]
    halves = [["".join(words[: len(words) // 2]) for words in map(words_of, texts)] for texts in right]
    other, half = (kernels_of(list(zip(right, wrong, strict=True))) for wrong in ([*right[1:], right[0]], halves))
    replaced = {test: half if test == "lengths" else other for test in TESTS if test == "lengths" or len(right) > 1}
    return {test: _smallest_share(kernels[test], bound, rng) for test, kernels in replaced.items()}


def _smallest_share(both: Sequence[Array], bound: float, rng: np.random.Generator) -> float | None:
    """Return that of one test, given kernels over right answers and then over what replaces each."""
    size = len(both[0]) // 2

    def seen(share: float, count: int, level: float) -> bool:
        total, counts = 0.0, []
        for kernel in both:
            ours = rng.integers(size, size=count) + size * (rng.random(count) < share)
            one, other = (np.bincount(p, minlength=2 * size) for p in (ours, rng.integers(size, size=count)))
            total += float((one - other) @ kernel @ (one - other))
            counts.append(one + other)
        return bool(total > critical(both, counts, level))

    def shown(share: float) -> bool:
        both = (seen(share, size, SUSPECT) and seen(share, AGAIN * size, bound) for _ in range(SIMULATIONS))
        return sum(both) >= POWER * SIMULATIONS

    at = bisect_left(SHARES, True, key=shown)
    return SHARES[at] if at < len(SHARES) else None


def critical(kernels: Sequence[Array], counts: Sequence[Array], level: float) -> float:
    """Return the value that a form of these kernels exceeds with probability `level` if all labels are exchangeable.

    `counts` are how often each row of a kernel is there. The value is that of a gamma distribution with its mean and
    variance.
    """
    mean = variance = NOTHING
    for kernel, count in zip(kernels, counts, strict=True):
        total = count.sum()
        rows = kernel @ count / total
        centred = kernel - rows - rows[:, None] + rows @ count / total
        diagonal = np.diagonal(centred)
        mean += float(diagonal @ count) * total / (total - 1)
        variance += 2 * float(count @ centred**2 @ count - diagonal**2 @ count)
    scale = variance / mean
    return max(NOTHING, scale * float(gammainccinv(mean / scale, level)))  # answers that are all alike


def _common(texts: Sequence[str]) -> str:
    """Return the most frequent beginnings of answers with their counts."""
    begins, counts = np.unique(["".join(words_of(text)[:4]) for text in texts], return_counts=True)
    order = np.argsort(-counts)[:5]
    return "\n".join(f"{counts[i]} of {len(texts)}: {begins[i]}" for i in order)
