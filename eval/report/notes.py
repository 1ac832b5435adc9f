"""Notes on how to read the numbers that occur in a report."""

from eval.report.view import Record

NOTES = (
    "τ is what a target pass commits on average, its bonus token included: the tokens after the prefill's over the "
    "passes, pooled over all prompts. Intervals come from resampling the prompts, all turns of a "
    "conversation and all copies of a prompt at once; distinct_prompts among the settings counts those that differ.",
    "Speed is that of decoding alone, without the prefill. Each prompt counts with its median repeat. The baseline, "
    "every drafter and HF generate take turns on each prompt in random order.",
    "P(a≥d) is the share of target passes in which d drafted tokens or more were accepted.",
    "speedup is over the baseline, autoregressive decoding in the same engine, dtype and session at the same batch "
    "size; vs HF is over `generate` of transformers, at batch size 1.",
    "Times and drafted tokens are per step, a step being one target pass with the draft before it. τ is what a step "
    "gains, its time over that of the baseline's step is what it costs, and the quotient is the speedup: a verify "
    "time far above the baseline's says that the tree is wide for this device, a long draft time, a slow head.",
    "x4 behind a name is a batch of 4: sequences that share target passes, and that the next prompts replace "
    "as they end. A pass counts as a step of each sequence in it, with an even share of its time; tok/s is that of all "
    "sequences together, and latency what one request waits, its prefill included.",
    "A drafter that is slower than the baseline is marked so.",
    "Overlap headroom: how many times faster the steps would be if a second device drafted the next tree while this "
    "one verifies (Mirror-SD, arXiv 2510.13161), all of the shorter of the two times hidden: an upper bound.",
    "rule is how drafts were verified: greedy at temperature 0, where all lossless rules are one. A rule marked lossy "
    "changes the target's distribution; it fails the check by choice and is given no speedup.",
    "lossless counts the prompts whose greedy output is the baseline's token for token, in the gate's dtype. A near "
    "tie first differs where rounding decides between the two best tokens. A drafter that fails is given no speedup.",
    "Memory is the peak of the whole session on an accelerator, else of the whole process, all drafters together.",
)
SAMPLED = (
    "At temperatures above 0 lossless counts the prompts whose tokens are the baseline's under coupled noise, "
    "at batch size 1 and at every one asked for; the distribution of tokens sampled with the rule in use is tested "
    "too. That rules keep it, exact enumeration proves in the tests."
)
LOADED = (
    "2 req/s behind a name: requests came at random (Poisson), so many a second on average, at the same moments for "
    "the baseline and every drafter, and waited where as many were being answered as the batch holds. Arrivals bound "
    "tokens per second, so speedup there is the baseline's mean latency over the drafter's, both from the arrival."
)
SERVED = (
    "Served endpoints: seconds are those of this side's clock, from the request to the first token (prefill) and from "
    "there to the last, and all of a step's are under other. x4 is four requests in flight, and a request counts with "
    "its share of the time that passed. Passes and tokens are those of all repeats. τ is one and the accepted over the "
    "passes, with a draft or without, by the server's counts, which go on to the end of the last draft. lossless "
    "compares greedy texts with the baseline's, and a difference is a near tie only from where the baseline's own "
    "repeats differ on."
)


def notes_of(report: Record) -> tuple[str, ...]:
    """Return the notes that a report.json needs."""
    rows = report["rows"]
    if report["device"].get("type") == "endpoint":
        return (NOTES[0], NOTES[2], SERVED)
    loaded = any(row["request_rate"] is not None for row in rows)
    return NOTES + (SAMPLED,) * any(row["temperature"] > 0 for row in rows) + (LOADED,) * loaded
