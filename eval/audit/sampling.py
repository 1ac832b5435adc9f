"""Two-sample tests of sampled answers: the audited server's against the baseline's, and the fault that they reveal.

Every test is a permutation test of a quadratic form s' K s: s is 1 for one server's answers and -1 for the other's, K a
kernel of two answers to the same prompt. That is the maximum mean discrepancy of the kernel (Gretton et al. 2012,
https://jmlr.org/papers/v13/gretton12a.html), and the energy distance where K is the negative distance (Szekely and
Rizzo 2013). Labels are exchanged within a prompt, so p-values are exact whatever the distributions.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.audit.ask import AUDITED, BASELINE, Question
from eval.audit.compare import FAILED, FAULT, NOT_OFFERED, PASSED, Audit, Difference, Finding

Array = NDArray[Any]

PROMPTS = 4
OPENING = 8  # words of an answer whose beginnings are compared
IN_FLIGHT = 8
FEW, MANY = 2_000, 200_000  # permutations: the first look, and what decides where it is extreme
CHUNK = 10_000
SUSPECT = 0.05  # a p-value after which more is sampled
AGAIN = 4  # times as much
POWER = 0.9
SHARES = (0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.5)
SIMULATIONS = 40
SETTINGS = {"sampling": {"temperature": 1.0}, "sampling_top_p": {"temperature": 1.0, "top_p": 0.7}}
TESTS = ("beginnings", "lengths", "words")


def sampling(audit: Audit, check: str) -> Finding:
    """Sample both servers' answers to a few prompts, each with a seed of its own, and test that they agree.

    Where they look as if they did not, AGAIN times as many are sampled, and those alone decide.
    """
    settings = {**SETTINGS[check], "max_tokens": audit.auditor.sample_tokens}
    prompts = audit.questions[:PROMPTS]
    rng = np.random.default_rng(audit.seed)
    bound = audit.auditor.alpha / (len(TESTS) * len(SETTINGS))
    answers = _sampled(audit, prompts, settings, 0, audit.auditor.samples)
    ps = _tested(answers, rng)
    rounds = [ps]
    share = smallest_share(answers, bound, rng) if ps else None
    if ps and min(ps.values()) <= SUSPECT:
        answers = _sampled(audit, prompts, settings, 2 * audit.auditor.samples, AGAIN * audit.auditor.samples)
        ps = _tested(answers, rng)
        rounds.append(ps)
    if not ps:
        return _failing(check, [question.having("sampled", **settings) for question in prompts], answers)
    figures = {"p": rounds, "smallest_share": share}
    summary = _summary(rounds, share, audit.auditor.samples, len(prompts))
    if len(rounds) == 1 or min(ps.values()) > bound:
        return Finding(check, PASSED, summary, [], figures)
    kernels = kernels_of(answers)[min(ps, key=lambda test: ps[test])]
    clearest = int(np.argmax([_form(kernel) for kernel in kernels]))
    ours, theirs = (_common(side) for side in answers[clearest])
    fault = "distribution" if check == "sampling" else "top_p"
    difference = Difference(prompts[clearest].having("sampled", **settings), ours, theirs, 0, None, FAULT, fault)
    return Finding(check, FAILED, summary, [difference], figures)


def _failing(check: str, questions: Sequence[Question], answers: Sequence[tuple[list[str], list[str]]]) -> Finding:
    """Return the finding on servers of which one does not answer."""
    for question, (ours, theirs) in zip(questions, answers, strict=True):
        if theirs and not ours:
            note = "the server fails where the baseline answers"
            return Finding(check, FAILED, note, [Difference(question, "", "", 0, None, FAULT, "error", note=note)])
    return Finding(check, NOT_OFFERED, "the baseline does not sample with these settings")


def _tested(answers: Sequence[tuple[list[str], list[str]]], rng: np.random.Generator) -> dict[str, float]:
    """Return the p-value of each test; none where a server failed."""
    if any(not ours or not theirs for ours, theirs in answers):
        return {}
    return {test: p_value(kernels, rng) for test, kernels in kernels_of(answers).items()}


def _summary(rounds: Sequence[dict[str, float]], share: float | None, samples: int, prompts: int) -> str:
    counts = (samples, AGAIN * samples)
    texts = [
        f"{count} answers of each server to each of {prompts} prompts: "
        + ", ".join(f"{test} p = {p:.2g}" for test, p in ps.items())
        for count, ps in zip(counts, rounds, strict=False)
    ]
    least = (
        "too few to show a server that answers otherwise in half of the cases"
        if share is None
        else f"a server that answers otherwise in {share:.0%} of the cases would be seen with probability {POWER}"
    )
    return "; ".join([*texts, least])


def _sampled(
    audit: Audit, prompts: Sequence[Question], settings: dict[str, Any], first: int, count: int
) -> list[tuple[list[str], list[str]]]:
    """Return both servers' answers to each prompt, none where one fails; `first` is added to the seed."""

    def answers(side: str, question: Question, seed: int) -> list[str]:
        questions = [question.having(f"sample {seed + i}", seed=seed + i, **settings) for i in range(count)]
        replies = audit.asker.all(side, questions, min(IN_FLIGHT, max(audit.auditor.concurrency)))
        return [] if any(reply.error for reply in replies) else [reply.text for reply in replies]

    seed = audit.seed + first
    return [(answers(AUDITED, question, seed), answers(BASELINE, question, seed + count)) for question in prompts]


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
        vocabulary = {word: i for i, word in enumerate(sorted({word for p in pieces for word in p}))}
        counts = np.zeros((len(pieces), max(1, len(vocabulary))))
        for row, p in enumerate(pieces):
            for word in p:
                counts[row, vocabulary[word]] += 1
        scaled = counts / np.sqrt(np.maximum(counts.sum(0), 1.0))
        kernels["words"].append(scaled @ scaled.T)
    return kernels


def beginnings(pieces: Sequence[Sequence[str]]) -> Array:
    """Return the number of first words that two answers share, at most OPENING, of every two."""
    kernel = np.zeros((len(pieces), len(pieces)))
    for count in range(1, OPENING + 1):
        numbers: dict[tuple[str, ...], int] = {}
        ids = np.array(
            [numbers.setdefault((*words[:count], *[""] * (count - len(words))), len(numbers)) for words in pieces]
        )
        kernel += ids[:, None] == ids[None]
    return kernel


def p_value(kernels: Sequence[Array], rng: np.random.Generator) -> float:
    """Return the p-value of the hypothesis that both halves of every kernel's rows are of one distribution."""
    observed = sum(_form(kernel) for kernel in kernels)
    bound = observed - 1e-9 * abs(observed)
    few = int((permuted(kernels, FEW, rng) >= bound).sum())
    if few > 1:
        return (1 + few) / (1 + FEW)
    many = sum(int((permuted(kernels, CHUNK, rng) >= bound).sum()) for _ in range(MANY // CHUNK))
    return (1 + many) / (1 + MANY)


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


def smallest_share(
    answers: Sequence[tuple[list[str], list[str]]], bound: float, rng: np.random.Generator
) -> float | None:
    """Return the smallest share of wrong answers that the test of beginnings shows with POWER; None for none of SHARES.

    Both servers' answers are sampled anew from the baseline's, and a share of the audited one's is replaced by answers
    to another prompt.
    """
    texts = [text for _, theirs in answers for text in theirs]
    kernel = beginnings([words_of(text) for text in texts])
    size = len(texts) // len(answers)

    def seen(share: float, count: int, level: float) -> bool:
        picks = rng.integers(size, size=(len(answers), 2 * count)) + size * np.arange(len(answers))[:, None]
        wrong = rng.random((len(answers), count)) < share
        picks[:, :count] = np.where(wrong, (picks[:, :count] + size) % len(texts), picks[:, :count])
        kernels = [kernel[np.ix_(pick, pick)] for pick in picks]
        return sum(map(_form, kernels)) > critical(kernels, level)

    def shown(share: float) -> bool:
        both = (seen(share, size, SUSPECT) and seen(share, AGAIN * size, bound) for _ in range(SIMULATIONS))
        return sum(both) >= POWER * SIMULATIONS

    at = bisect_left(SHARES, True, key=shown)
    return SHARES[at] if at < len(SHARES) else None


def critical(kernels: Sequence[Array], level: float) -> float:
    """Return the value that a form of these kernels exceeds with probability `level` if all labels are exchangeable.

    That of a gamma distribution with its mean and variance, by Wilson and Hilferty's cube root (1931).
    """
    mean = variance = 1e-12
    for kernel in kernels:
        rows = kernel.mean(0)
        centred = kernel - rows - rows[:, None] + rows.mean()
        diagonal = np.diagonal(centred)
        mean += float(diagonal.sum()) * len(kernel) / (len(kernel) - 1)
        variance += 2 * float((centred**2).sum() - (diagonal**2).sum())
    shape = mean * mean / variance
    z = NormalDist().inv_cdf(1 - level)
    return mean * float(1 - 1 / (9 * shape) + z / (3 * shape**0.5)) ** 3


def _common(texts: Sequence[str]) -> str:
    """Return the most frequent beginnings of answers with their counts."""
    begins, counts = np.unique(["".join(words_of(text)[:4]) for text in texts], return_counts=True)
    order = np.argsort(-counts)[:5]
    return "\n".join(f"{counts[i]} of {len(texts)}: {begins[i]}" for i in order)
