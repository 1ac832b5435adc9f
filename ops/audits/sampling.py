"""Two-sample tests above temperature 0: sampled answers, seeds, and several choices of one request.

Samples are compared by a permutation test of the quadratic form s' K s: s is 1 for one server's answers and -1 for the
other's, K the products of two answers' features. That is the maximum mean discrepancy of the kernel (Gretton et al.
2012, https://jmlr.org/papers/v13/gretton12a.html). Labels are exchanged within a prompt, so p-values are exact whatever
the distributions. Whether a seed gives an answer again is compared by Fisher's exact test.
"""

import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.audits.ask import AUDITED, BASELINE, SIDES, EndedError
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
)
from ops.served import Question, Reply

Array = NDArray[Any]

PROMPTS = 4
OPENING = 8  # words of an answer whose beginnings are compared
NGRAM = 3  # words of the longest n-grams that are counted
IN_FLIGHT = 8
FEW, CHUNK, CHUNKS = 2_000, 10_000, 20  # permutations: the first look; those that decide where it is extreme
SUSPECT = 0.05  # a p-value after which more is sampled
AGAIN = 4  # times as much
ROUNDING = 1e-9  # of a form, relative
SETTINGS = {"sampling": {"temperature": 1.0}, "sampling_top_p": {"temperature": 1.0, "top_p": 0.4}}
ENOUGH = 4  # words in which two answers of one seed agree: rounding parts longer ones
SEEDS = 48
SURE = 0.005  # p-value at which the baseline is said to take seeds


def sampling(audit: Audit, check: str) -> Finding:
    """Sample both servers' answers to a few prompts, each with a seed of its own, and test that they agree.

    Where they look as if they did not, AGAIN times as many are sampled, and only those decide.
    """
    settings = {**SETTINGS[check], "max_tokens": audit.config.sample_tokens}
    questions = [question.having("sampled", **settings) for question in audit.questions[:PROMPTS]]
    rng, samples = np.random.default_rng(audit.config.seed), audit.config.samples
    ps, texts, p, summaries = list[float](), list[list[list[str]]](), 1.0, list[str]()
    for first, count in ((0, samples), (2 * samples, AGAIN * samples)):
        sides = audit.asker.taken(_sampled(audit, questions, first, count))
        if not sides:
            break
        ours, theirs = ([reply.error for side in sides for reply in side[i] if reply.error] for i in range(2))
        if theirs:
            status = NOT_OFFERED if len(theirs) == count * len(sides) else UNDECIDED
            return Finding(check, status, f"the baseline fails with these settings: {theirs[0]}")
        if ours:
            note = f"it fails: {ours[0]}"
            return Finding(check, FAILED, note, [breach(questions[0], "", "", "error", note)])
        texts = [[[reply.text for reply in replies] for replies in side] for side in sides]
        p = p_value([kernel_of(*pair) for pair in texts], rng)
        ps.append(p)
        summaries.append(f"{count} answers of each server to each of {len(sides)} prompts: p = {p:.2g}")
        if p > SUSPECT:
            break
    summary, figures = "; ".join(summaries), {"p": ps}
    if len(ps) < 2 or p > audit.config.alpha / len(SETTINGS):
        return Finding(check, PASSED if ps else NOT_RUN, summary, [], figures)
    clearest = int(np.argmax([_form(kernel_of(*pair)) for pair in texts]))
    shown = ["\n".join(side[:5]) for side in texts[clearest]]
    fault = "distribution" if check == "sampling" else "top_p"
    difference = Difference(questions[clearest], shown[0], shown[1], 0, None, FAULT, fault)
    return Finding(check, FAILED, summary, [difference], figures)


def _sampled(audit: Audit, questions: Sequence[Question], first: int, count: int) -> Iterator[list[list[Reply]]]:
    """Yield both servers' replies to each question, `count` of either; `first` is added to the seed."""
    for question in questions:
        sides = []
        for begin, side in ((first, AUDITED), (first + count, BASELINE)):
            seeds = range(audit.config.seed + begin, audit.config.seed + begin + count)
            several = [question.having(f"sample {seed}", seed=seed) for seed in seeds]
            answers = audit.asker.all(side, several, min(IN_FLIGHT, max(audit.config.concurrency)))
            sides.append([reply for reply in answers if reply is not None])
            if len(sides[-1]) < count:
                raise EndedError
        yield sides


def words_of(text: str) -> list[str]:
    """Return a text's words and signs, each with the space before it."""
    return re.findall(r"\s*(?:\w+|[^\w\s])", text)


def features_of(text: str) -> list[Hashable]:
    """Return the features by which answers are compared: beginnings, n-grams, and the numbers below the length."""
    words = words_of(text)
    begins = [("begins", *words[:size]) for size in range(1, OPENING + 1)]
    ngrams = [tuple(words[i : i + size]) for size in range(1, NGRAM + 1) for i in range(len(words) - size + 1)]
    return [*begins, *ngrams, *range(len(words))]


def kernel_of(ours: Sequence[str], theirs: Sequence[str]) -> Array:
    """Return the kernel of answers to one prompt, the audited server's and then as many of the baseline's."""
    features = [features_of(text) for text in (*ours, *theirs)]
    columns = {key: i for i, key in enumerate(dict.fromkeys(key for keys in features for key in keys))}
    counts = np.zeros((len(features), len(columns)))
    for row, keys in zip(counts, features, strict=True):
        np.add.at(row, [columns[key] for key in keys], 1)
    counts /= np.sqrt(counts.sum(0))  # frequent features weigh less
    return np.asarray(counts @ counts.T)


def p_value(kernels: Sequence[Array], rng: np.random.Generator) -> float:
    """Return the p-value of the hypothesis that both halves of every kernel's rows are of one distribution."""
    bound = (1 - ROUNDING) * sum(map(_form, kernels))
    p = (1 + (permuted(kernels, FEW, rng) >= bound).sum()) / (1 + FEW)
    if p <= 2 / (1 + FEW):
        more = sum((permuted(kernels, CHUNK, rng) >= bound).sum() for _ in range(CHUNKS))
        p = (1 + more) / (1 + CHUNK * CHUNKS)
    return float(p)


def permuted(kernels: Sequence[Array], count: int, rng: np.random.Generator) -> Array:
    """Return the statistic under `count` exchanges of labels."""
    totals = np.zeros(count)
    for kernel in kernels:
        labels = rng.permuted(np.tile(_labels(kernel), (count, 1)), axis=1)
        totals += np.einsum("ij,ij->i", labels @ kernel, labels)
    return totals


def _labels(kernel: Array) -> Array:
    return np.repeat([1.0, -1.0], len(kernel) // 2)


def _form(kernel: Array) -> float:
    return float(_labels(kernel) @ kernel @ _labels(kernel))


def _seeded(audit: Audit, number: int, **fields: Any) -> Question:
    """Return a question with a seed; every prompt has two seeds or more."""
    prompts = audit.questions[: SEEDS // 2]
    fields |= {"temperature": 1.0, "seed": audit.config.seed + number, "max_tokens": 2 * ENOUGH}
    return prompts[number % len(prompts)].having(f"with seed {number}", **fields)


def seeds(audit: Audit) -> Finding:
    """Ask twice with the same seed at temperature 1: the answers begin alike, as the baseline's do."""
    replies: dict[str, list[list[Reply]]] = {side: [] for side in SIDES}

    def ask(number: int) -> None:
        for side in SIDES:
            replies[side].append([audit.asker.one(side, _seeded(audit, number)) for _ in range(2)])

    audit.asker.taken(map(ask, range(SEEDS)))
    ours, theirs = ([_alike(*pair) for pair in replies[side]] for side in SIDES)
    firsts = [one for one, _ in replies[BASELINE]]
    others = [_alike(*pair) for pair in zip(firsts, firsts[len(audit.questions[: SEEDS // 2]) :], strict=False)]
    if fewer(others, theirs) > SURE:
        text = f"the baseline's answers begin alike in {sum(theirs)} of {len(theirs)} pairs with one seed, in "
        return Finding("seeds", NOT_OFFERED, f"{text}{sum(others)} of {len(others)} with two: it takes no seed")
    summary = (
        f"asked again with their seed, {sum(ours)} of {len(ours)} answers begin alike, {sum(theirs)} of the baseline's"
    )
    if fewer(ours, theirs) > audit.config.alpha / 10:
        return Finding("seeds", PASSED, summary)
    number = ours.index(False)
    one, other = replies[AUDITED][number]
    error = one.error or other.error
    look, note = ("error", f"it fails: {error}") if error else ("seed", "the same seed, asked again")
    return Finding("seeds", FAILED, summary, [breach(_seeded(audit, number), other.content, one.content, look, note)])


def _alike(one: Reply, other: Reply) -> bool:
    """Whether two answers begin with the same ENOUGH words."""
    return not (one.error or other.error) and words_of(one.text)[:ENOUGH] == words_of(other.text)[:ENOUGH]


def fewer(ones: Sequence[bool], others: Sequence[bool]) -> float:
    """Return the p-value that the first are true as often as the others, against less often."""
    from scipy.stats import fisher_exact  # late: half a second that a refusal would wait for

    table = [[sum(values), len(values) - sum(values)] for values in (ones, others)]
    return float(fisher_exact(table, "less").pvalue)


def choices(audit: Audit) -> Finding:
    """Ask for two choices with a seed at temperature 1: both come, are counted and differ.

    The second choices are those of the baseline's distribution, by the same test as samples.
    """
    trials: list[tuple[Question, list[Reply], list[Reply]]] = []

    def ask(number: int) -> None:
        question = _seeded(audit, number, n=2)
        trials.append((question, audit.asker.ask(AUDITED, question), audit.asker.ask(BASELINE, question)))

    audit.asker.taken(map(ask, range(SEEDS)))
    if not trials or any(len(theirs) != 2 for _, _, theirs in trials):
        return Finding("choices", NOT_OFFERED, "the baseline does not answer n=2")
    differences = [difference for trial in trials if (difference := wrong_choices(*trial)) is not None]
    if not differences:
        same = [
            all(one.text == other.text for one, other in side)
            for side in ([ours for _, ours, _ in trials], [theirs for _, _, theirs in trials])
        ]
        seconds: dict[str, tuple[list[str], list[str]]] = {}
        for question, *sides in trials:
            for texts, (_, second) in zip(seconds.setdefault(question.prompt, ([], [])), sides, strict=True):
                texts.append(second.content)
        p = p_value([kernel_of(*pair) for pair in seconds.values()], np.random.default_rng(audit.config.seed))
        note = "the second choices are not the baseline's" if p <= audit.config.alpha / 10 else ""
        note = "both choices are the same text, always" if same == [True, False] else note
        differences += [_of_choices(*trials[0], "choices", note)] if note else []
    summary = f"two choices to each of {len(trials)} requests: {differences[0].note if differences else 'they hold'}"
    return Finding("choices", FAILED if differences else PASSED, summary, differences[:3])


def wrong_choices(question: Question, ours: list[Reply], theirs: list[Reply]) -> Difference | None:
    """Return the breach of two choices by themselves: an error, their number, or the count of their tokens."""
    if ours[0].error:
        return _of_choices(question, ours, theirs, "error", f"it fails: {ours[0].error}")
    if len(ours) != 2:
        return _of_choices(question, ours, theirs, "choices", f"{len(ours)} choices where n is 2")
    counts = [replies[0].completion_tokens for replies in (ours, theirs)]
    alike = [reply.text for reply in ours] == [reply.text for reply in theirs]
    whole = all(reply.finish == "length" for reply in (*ours, *theirs))  # all have max_tokens
    if None in counts or counts[0] == counts[1] or not (alike or whole):
        return None
    note = f"{counts[0]} tokens of two choices, the baseline counts {counts[1]}"
    return _of_choices(question, ours, theirs, "usage", note)


def _of_choices(question: Question, ours: list[Reply], theirs: list[Reply], fault: str, note: str) -> Difference:
    shown = ["\n".join(reply.content for reply in replies) for replies in (ours, theirs)]
    return breach(question, shown[0], shown[1], fault, note)
