"""Seeds, and several choices of one request: asked again with its seed, an answer comes again."""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from eval.measures.losslessness import shared_length
from ops.audits.ask import AUDITED, BASELINE
from ops.audits.compare import FAILED, NOT_OFFERED, PASSED, Audit, Difference, Finding, breach, judged
from ops.audits.greedy import asked_with
from ops.audits.sampling import AGAIN, CHUNK, MANY, SUSPECT, Array, kernels_of, p_value, words_of
from ops.served.exchange import Question, Reply

FEW = 6  # questions that are asked for two choices at temperature 0
ENOUGH = 4  # words in which two answers of one seed agree
TRIALS = 24  # of a seed
TOKENS = 2 * ENOUGH  # of an answer with a seed, at most
SURE = 0.005  # p-value at which the baseline is said to take seeds


class Trial(NamedTuple):
    """A question with a seed, and the choices that either server gave to it, asked twice."""

    question: Question
    theirs: tuple[list[Reply], list[Reply]]
    ours: tuple[list[Reply], list[Reply]]

    def texts(self, side: str) -> list[str]:
        """Return a server's first answer, one text a choice."""
        return [reply.content for reply in (self.ours if side == AUDITED else self.theirs)[0]]


def seeds(audit: Audit) -> Finding:
    """Ask twice with the same seed at temperature 1: the answers begin alike, as the baseline's do.

    Where they look as if they did not, AGAIN times as many seeds are tried, and those alone decide.
    """
    rng = np.random.default_rng(audit.seed)
    trials = audit.asker.taken(asked_twice(audit, range(TRIALS)))
    if (refusal := not_taken(trials, rng)) is not None:
        return Finding("seeds", NOT_OFFERED, refusal)
    p = obeyed_less(trials, rng)
    decided = False
    if p <= SUSPECT and (more := audit.asker.taken(asked_twice(audit, range(TRIALS, (1 + AGAIN) * TRIALS)))):
        decided, trials = True, more
        p = obeyed_less(trials, rng)
    failed = decided and p <= audit.config.alpha / 10
    ours, theirs = (sum(agreements(trials, side)) / len(trials) for side in (AUDITED, BASELINE))
    summary = (
        f"asked again with their seed, answers agree in {ours:.1f} of the first {ENOUGH} words, the baseline's in "
        f"{theirs:.1f}"
    )
    differences = changed(trials)[:1] if failed else []
    return Finding("seeds", FAILED if failed else PASSED, summary, differences, {"p": p})


def choices(audit: Audit) -> Finding:
    """Ask for two choices at temperature 0: both are the baseline's answer; where it refuses, `seeded_choices`."""
    pairs: list[tuple[Question, Reply]] = []
    breaches: list[Difference] = []
    for question in audit.questions[:FEW]:
        twice = question.having("twice", n=2)
        both = audit.asker.taken(audit.asker.ask(side, twice) for side in (BASELINE, AUDITED))
        if len(both) < 2:
            break
        theirs, ours = both
        if len(theirs) != 2:
            return seeded_choices(audit)
        if (wrong := wrong_choices(twice, ours, (theirs,))) is not None:
            breaches.append(wrong)
            continue
        for reply in theirs:
            audit.comparer.learn(question, reply)
        pairs += [(question, reply) for reply in ours]
    finding = judged(audit, "choices", pairs, "choices")
    if breaches:
        finding = Finding("choices", FAILED, breaches[0].note, breaches + finding.differences)
    return asked_with(finding, n=2)


def seeded_choices(audit: Audit) -> Finding:
    """Ask twice for two choices with a seed at temperature 1: both come, are counted, differ, and come again.

    The second choices are those of the baseline's distribution: a permutation test of how they begin.
    """
    rng = np.random.default_rng(audit.seed)
    trials = audit.asker.taken(asked_twice(audit, range(TRIALS), n=2))
    if not trials or any(len(replies) != 2 for trial in trials for replies in trial.theirs):
        return Finding("choices", NOT_OFFERED, "the baseline does not answer n=2")
    wrong = [wrong_choices(trial.question, ours, trial.theirs) for trial in trials for ours in trial.ours]
    differences = [difference for difference in wrong if difference is not None]
    if not differences:
        bound = audit.config.alpha / 10
        ours, theirs = ("\n".join(trials[0].texts(side)) for side in (AUDITED, BASELINE))
        notes = {
            "both choices are the same text, always": repeats(trials, AUDITED) and not repeats(trials, BASELINE),
            "the second choices do not begin as the baseline's do": second_p(trials, rng) <= bound,
        }
        differences = [
            breach(trials[0].question, ours, theirs, "choices", note) for note, broken in notes.items() if broken
        ]
        if not_taken(trials, rng) is None and obeyed_less(trials, rng) <= bound:
            differences += changed(trials)[:1]
    summary = f"the baseline takes n=2 with a temperature alone: two choices to each of {2 * len(trials)} requests"
    summary += f"; {differences[0].note}" if differences else ", counted, and their own"
    return Finding("choices", FAILED if differences else PASSED, summary, differences[:3])


def asked_twice(audit: Audit, numbers: range, **fields: Any) -> Iterator[Trial]:
    """Yield answers to questions with seeds, each asked twice; a baseline that refuses the first is asked no more."""
    prompts = audit.questions[: TRIALS // 2]  # so that each has several seeds
    for number in numbers:
        question = prompts[number % len(prompts)].having(
            f"with seed {number}", temperature=1.0, seed=audit.seed + number, max_tokens=TOKENS, **fields
        )
        theirs = audit.asker.ask(BASELINE, question), audit.asker.ask(BASELINE, question)
        if not any(reply.error for reply in chain(*theirs)):
            yield Trial(question, theirs, (audit.asker.ask(AUDITED, question), audit.asker.ask(AUDITED, question)))
        elif number == numbers[0]:
            return


def agreeing(one: Sequence[Reply], other: Sequence[Reply]) -> int:
    """Return in how many first words, at most ENOUGH, all choices of two answers agree: rounding parts longer ones."""
    if len(one) != len(other) or any(reply.error for reply in (*one, *other)):
        return 0
    texts = zip(one, other, strict=True)
    return min(ENOUGH, *(shared_length(words_of(first.text), words_of(second.text)) for first, second in texts))


def agreements(trials: Sequence[Trial], side: str) -> list[int]:
    """Return in how many first words a server's two answers with a seed agree."""
    return [agreeing(*(trial.ours if side == AUDITED else trial.theirs)) for trial in trials]


def not_taken(trials: Sequence[Trial], rng: np.random.Generator) -> str | None:
    """Return why the baseline's answers say nothing about seeds; None where they agree more with one than with two."""
    if not trials:
        return "the baseline does not take a seed"
    by_prompt: dict[str, list[list[Reply]]] = {}
    for trial in trials:
        by_prompt.setdefault(trial.question.prompt, []).append(trial.theirs[0])
    apart = [agreeing(*pair) for answers in by_prompt.values() for pair in pairwise(answers)]
    together = agreements(trials, BASELINE)
    if apart and fewer(apart, together, rng) <= SURE:
        return None
    with_one, with_two = (sum(counts) / max(1, len(counts)) for counts in (together, apart))
    return (
        f"the baseline's own answers agree in {with_one:.1f} of the first {ENOUGH} words with one seed, in "
        f"{with_two:.1f} with two: it does not take a seed, or its text does not depend on it"
    )


def obeyed_less(trials: Sequence[Trial], rng: np.random.Generator) -> float:
    """Return the p-value that the audited server gives its answers again as well as the baseline does."""
    return fewer(agreements(trials, AUDITED), agreements(trials, BASELINE), rng)


def changed(trials: Sequence[Trial]) -> list[Difference]:
    """Return the audited server's answers that did not come again, or failed."""
    differences = []
    for question, _, (one, other) in trials:
        error = next((reply.error for reply in (*one, *other) if reply.error), "")
        first, second = ("\n".join(reply.content for reply in replies) for replies in (one, other))
        if error or first != second:
            look, note = ("error", f"it fails: {error}") if error else ("seed", "the same seed, asked again")
            differences.append(breach(question, second, first, look, note))
    return differences


def wrong_choices(question: Question, ours: Sequence[Reply], theirs: Sequence[Sequence[Reply]]) -> Difference | None:
    """Return what is wrong with two choices by themselves: an error, their number, or the count of their tokens."""
    shown = ["\n".join(reply.content for reply in replies) for replies in (ours, theirs[0])]
    if ours[0].error:
        return breach(question, shown[0], shown[1], "error", f"it fails: {ours[0].error}")
    if len(ours) != 2:
        return breach(question, shown[0], shown[1], "choices", f"{len(ours)} choices where n is 2")
    if miscounted(question, ours) and not any(miscounted(question, replies) for replies in theirs):
        note = f"{ours[0].completion_tokens} tokens of two choices of {question.body.get('max_tokens')} each"
        return breach(question, shown[0], shown[1], "usage", note)
    for replies in theirs:
        alike = [reply.text for reply in replies] == [reply.text for reply in ours]
        counts = replies[0].completion_tokens, ours[0].completion_tokens
        if alike and None not in counts and counts[0] != counts[1]:
            note = f"{counts[1]} tokens of two choices, the baseline counts {counts[0]} of the same"
            return breach(question, shown[0], shown[1], "usage", note)
    return None


def miscounted(question: Question, replies: Sequence[Reply]) -> bool:
    """Whether choices that all ended at max_tokens are counted as other than so many tokens."""
    limit, count = question.body.get("max_tokens"), replies[0].completion_tokens
    ended = all(reply.finish == "length" for reply in replies)
    return limit is not None and count is not None and ended and count != len(replies) * limit


def repeats(trials: Sequence[Trial], side: str) -> bool:
    """Whether the choices of every answer of a server are the same text."""
    return all(len(set(trial.texts(side))) == 1 for trial in trials)


def second_p(trials: Sequence[Trial], rng: np.random.Generator) -> float:
    """Return the p-value that the second choices of both servers begin alike."""
    answers: dict[str, tuple[list[str], list[str]]] = {}
    for trial in trials:
        ours, theirs = answers.setdefault(trial.question.prompt, ([], []))
        ours.append(trial.texts(AUDITED)[1])
        theirs.append(trial.texts(BASELINE)[1])
    return p_value(kernels_of(list(answers.values()))["beginnings"], rng)


def fewer(ones: Sequence[int], others: Sequence[int], rng: np.random.Generator) -> float:
    """Return the p-value that the first numbers are no smaller than the others, by exchanging them."""
    from scipy.stats import permutation_test  # late: half a second that a refusal would wait for

    def difference(first: Array, second: Array, axis: int) -> Array:
        return first.mean(axis) - second.mean(axis)

    how: dict[str, Any] = {"vectorized": True, "alternative": "less", "n_resamples": MANY, "batch": CHUNK}
    return float(permutation_test((ones, others), difference, rng=rng, **how).pvalue)
