"""Two-sample tests above temperature 0: sampled answers, seeds, and several choices of one request.

Samples are compared by a permutation test of the quadratic form s' K s: s is 1 for one server's answers and -1 for the
other's, K holds the products of two answers' features. The form is the maximum mean discrepancy of the kernel (Gretton
et al. 2012, https://jmlr.org/papers/v13/gretton12a.html). Labels are exchanged within a prompt, so p-values are exact
for any distributions. Fisher's exact test compares how often a seed gives the same answer again.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.inputs.workloads import cycled
from ops.audits.compare import AUDITED, BASELINE, SIDES, Audit, Finding, violation
from ops.served import Question, Replies, Reply

Array = NDArray[Any]
Sides = Sequence[Sequence[str]]  # the audited server's answers to a prompt, and as many of the baseline's

PROMPTS = 4
OPENING = 8  # words at the start of an answer that are features
NGRAM = 3  # maximum words of n-gram features
IN_FLIGHT = 8
CHUNK, EXTREMES = 2_000, 100  # permutations at a time; the number of extreme ones after which the test ends
SUSPECT = 0.05  # p-value below which more samples are taken
AGAIN = 4  # factor of the second sample's size
ROUNDING = 1e-9  # relative rounding error of the statistic
SUSPECTED = {"sampling": "distribution", "sampling_top_p": "top_p"}  # check -> fault
ENOUGH = 4  # words in which two answers of one seed must agree: rounding changes longer ones
SEEDS = 48


def sampling(audit: Audit, check: str) -> Finding:
    """Sample both servers' answers to a few prompts, each with its own seed, and test that they agree.

    If they seem to differ, a new sample AGAIN times as large decides.
    """
    config = audit.config
    settings = {"temperature": 1.0, "max_tokens": config.sample_tokens}
    settings |= {"top_p": 0.4} if check == "sampling_top_p" else {}
    questions = [question.having("sampled", **settings) for question in audit.questions[:PROMPTS]]
    rng, level = np.random.default_rng(config.seed), config.alpha / len(SUSPECTED)
    in_flight, summaries = min(IN_FLIGHT, max(config.concurrency)), []
    for first, count in ((0, config.samples), (2 * config.samples, AGAIN * config.samples)):
        replies = []  # prompt -> server -> answers, each with its own seed
        for question in questions:
            seeded = [
                question.having(f"sample {seed}", seed=seed)
                for seed in range(config.seed + first, config.seed + first + 2 * count)
            ]
            replies.append([audit.asker.all(side, seeded[i::2], in_flight) for i, side in enumerate(SIDES)])
        ours, theirs = ([reply.error for sides in replies for reply in sides[i] if reply.error] for i in range(2))
        if theirs:
            note = f"the baseline fails with these settings: {theirs[0]}"
            return Finding("not_offered" if len(theirs) == count * len(replies) else "undecided", note)
        if ours:
            note = f"it fails: {ours[0]}"
            return Finding("failed", note, [violation(questions[0], "", "", "error", note)])
        texts = [[[reply.text for reply in side] for side in sides] for sides in replies]
        p = p_value(texts, level, rng)
        summaries.append(f"{count} answers of each server to each of {len(texts)} prompts: p = {p:.2g}")
        if p > SUSPECT:
            break
    if p > level:
        return Finding("passed", "; ".join(summaries))
    clearest = int(np.argmax([form_of(kernel_of(*pair)) for pair in texts]))
    shown = ["\n".join(side[:5]) for side in texts[clearest]]
    return Finding(
        "failed", "; ".join(summaries), [violation(questions[clearest], shown[0], shown[1], SUSPECTED[check], "")]
    )


def words_of(text: str) -> list[str]:
    """Split a text into words and punctuation, each with the space before it."""
    return re.findall(r"\s*(?:\w+|[^\w\s])", text)


def kernel_of(ours: Sequence[str], theirs: Sequence[str]) -> Array:
    """Return the kernel of the answers to one prompt: the audited server's, then as many of the baseline's.

    The features are first words, n-grams and the length (as unary counts).
    """
    features = []
    for words in map(words_of, (*ours, *theirs)):
        begins = [("begins", *words[:size]) for size in range(1, OPENING + 1)]
        ngrams = [tuple(words[i : i + size]) for size in range(1, NGRAM + 1) for i in range(len(words) - size + 1)]
        features.append(Counter([*begins, *ngrams, *range(len(words))]))
    columns = dict.fromkeys(key for counted in features for key in counted)
    counts = np.array([[counted[key] for key in columns] for counted in features], dtype=float)
    counts /= np.sqrt(counts.sum(0))  # frequent features weigh less
    return np.asarray(counts @ counts.T)


def form_of(kernel: Array) -> float:
    """Return the statistic of a kernel whose first half of rows is one server's."""
    labels = np.repeat([1.0, -1.0], len(kernel) // 2)
    return float(labels @ kernel @ labels)


def p_value(texts: Sequence[Sides], level: float, rng: np.random.Generator) -> float:
    """Return the p-value of the hypothesis that both servers' answers to each prompt have the same distribution.

    Permutations stop after EXTREMES statistics as large, or enough for `level` (Besag and Clifford 1991).
    """
    kernels = [kernel_of(*pair) for pair in texts]
    bound = (1 - ROUNDING) * sum(map(form_of, kernels))
    extreme = count = 0
    while extreme < EXTREMES and count < 2 / level:
        totals = np.zeros(CHUNK)
        for kernel in kernels:
            exchanged = rng.permuted(np.tile(np.repeat([1.0, -1.0], len(kernel) // 2), (CHUNK, 1)), axis=1)
            totals += np.einsum("ij,ij->i", exchanged @ kernel, exchanged)
        extreme, count = extreme + int((totals >= bound).sum()), count + CHUNK
    return (1 + extreme) / (1 + count)


def _seeded(audit: Audit, **fields: Any) -> list[Question]:
    fields |= {"temperature": 1.0, "max_tokens": 2 * ENOUGH}
    return [
        question.having(f"with seed {i}", seed=audit.config.seed + i, **fields)
        for i, question in enumerate(cycled(audit.questions, SEEDS))
    ]


def seeds(audit: Audit) -> Finding:
    """Ask twice with the same seed at temperature 1: the answers must agree as often as the baseline's."""
    from scipy.stats import fisher_exact  # late: the import takes half a second, also before a refusal

    questions = _seeded(audit)
    pairs = [[[audit.asker.one(side, question) for _ in range(2)] for side in SIDES] for question in questions]

    def alike(one: Reply, other: Reply) -> bool:
        """Return whether two answers begin with the same words."""
        return not (one.error or other.error) and words_of(one.text)[:ENOUGH] == words_of(other.text)[:ENOUGH]

    ours, theirs = ([alike(*answers) for answers in side] for side in zip(*pairs, strict=True))
    if not any(theirs):
        return Finding("not_offered", "the baseline takes no seed")
    summary = f"asked again with their seed, {sum(ours)} of {len(ours)} answers agree, {sum(theirs)} of the baseline's"
    table = [[sum(alike), SEEDS - sum(alike)] for alike in (ours, theirs)]
    if fisher_exact(table, "less").pvalue > audit.config.alpha / 10:
        return Finding("passed", summary)
    first = ours.index(False)
    one, other = pairs[first][0]
    error = one.error or other.error
    suspected, note = ("error", f"it fails: {error}") if error else ("seed", "the same seed, asked again")
    return Finding("failed", summary, [violation(questions[first], other.content, one.content, suspected, note)])


def choices(audit: Audit) -> Finding:
    """Ask for two choices with a seed at temperature 1: both must come, be counted, and differ."""
    trials = [
        (question, audit.asker.ask(AUDITED, question), audit.asker.ask(BASELINE, question))
        for question in _seeded(audit, n=2)
    ]
    if any(len(theirs) != 2 for *_, theirs in trials):
        return Finding("not_offered", "the baseline does not answer n=2")
    wrong = [(*trial, *broken) for trial in trials if (broken := wrong_choices(*trial[1:]))]
    copied = [
        all(len({reply.text for reply in replies}) == 1 for replies in side)
        for side in ([ours for _, ours, _ in trials], [theirs for *_, theirs in trials])
    ]
    if not wrong and copied == [True, False]:
        wrong = [(*trials[0], "choices", "both choices are the same text, always")]
    differences = [
        violation(question, "\n".join(r.content for r in ours), "\n".join(r.content for r in theirs), fault, note)
        for question, ours, theirs, fault, note in wrong[:3]
    ]
    summary = f"two choices to each of {len(trials)} requests: {wrong[0][-1] if wrong else 'they hold'}"
    return Finding("failed" if wrong else "passed", summary, differences)


def wrong_choices(ours: Replies, theirs: Replies) -> tuple[str, str] | None:
    """Return the fault of two choices and a note: an error, a wrong number of choices, or a wrong token count."""
    if ours[0].error:
        return "error", f"it fails: {ours[0].error}"
    if len(ours) != 2:
        return "choices", f"{len(ours)} choices where n is 2"
    counts = [replies[0].completion_tokens for replies in (ours, theirs)]
    whole = all(reply.finish_reason == "length" for reply in (*ours, *theirs))  # all have max_tokens
    if None in counts or counts[0] == counts[1] or not whole:
        return None
    return "usage", f"{counts[0]} tokens of two choices, the baseline counts {counts[1]}"
