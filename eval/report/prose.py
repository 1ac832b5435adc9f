"""The texts of a report: on its sections, and notes on how to read the numbers."""

NODES = (
    "Each node with the share of the target passes that accepted it: the fuller the node and the thicker its line, "
    "the greater the share. Siblings stand in the order in which they were drafted."
)
TAU = (
    "τ is the number of tokens that one pass of {} commits on average. Without drafts it is 1; the speedup is less "
    "than τ, since drafting and checking take time."
)
TIERS = (
    "One τ, measured twice: live by decoding; teacher forced by one pass of target and head over the text. What they "
    "count differs only where the text does, or the rule. The intervals resample the prompts. The second counts a "
    "chain that is sampled token by token: block verification, the rule of decoding unless asked otherwise, accepts as "
    "much or more."
)
CHECKED = "Greedy output against the baseline's, token for token, in the gate's dtype."
SAMPLED = (
    "Under coupled noise every drafter must emit the baseline's tokens. The chi-square test draws next tokens "
    "after fixed texts with the rule in use, as often as it takes to reject a distribution that is off by the total "
    "variation TV with the power that is named. The control, a rule known to be broken, must be rejected each time."
)
TIES = (
    "The gap is the baseline's between its two best tokens where the other first differs. What is timed is not "
    "checked: rounding decides there, and from there on two texts differ."
)
LOAD = (
    "Requests come at random, so many a second on average, and wait in a queue while as many are being answered as "
    "the capacity says. TTFT and latency count from the arrival to the first and to the last token. The latency "
    "ratio is the baseline's mean over the drafter's: above 1 the drafter's requests end sooner."
)
USERS = (
    "What a device gives all its users in a second against what one of them sees: a batch or a rate of requests trades "
    "one for the other. At the speed that a user is to see, the highest curve serves the most users. A user's "
    "tokens a second are those after the first, by the clock; prefills are in the tokens a second of all."
)
END_TO_END = (
    "End to end counts all tokens over prefill and decoding together. A source whose memory is warm drafts from "
    "the requests before, in their order, and begins every round of measurement with nothing; cold, it forgets "
    "before every request; none, nothing outlives a request."
)
WITHIN = (
    "τ, had every draft ended at that depth: the sum of P(a≥d) up to it and the bonus token, from the passes that "
    "were made; a pass whose draft ends the answer commits no bonus token. `budget=K` measures it: "
    "then no source drafts deeper than K."
)
BREAKDOWN = (
    "The breakdown leads from τ to the speedup: what would be left if only the dearer pass counted, then the draft "
    "too, then all; a cost below the baseline's by less than the speedup's interval is noise, and shown as none. The "
    "oracle has the same acceptance, its drafts and its wider passes for nothing. What would help most is the loss "
    "that gives back most if it were a tenth smaller: the rejected share at each depth (more acceptance), the draft, "
    "what a pass costs beyond a plain step (a smaller tree), or the rest. A smaller tree accepts less too: tune=true "
    "weighs one against the other."
)
SIMULATED = (
    "Every tree is simulated along the target's own answers and priced with what its parts cost on this device: a step "
    "of the baseline, passes of every size, the head's drafts, uncompiled. The tree is chosen on half of the answers; "
    "what is said of it is predicted for the others. Nothing was decoded with it: tune=true does, and writes the best "
    "one."
)
FORCED = (
    "The share of the text's tokens by depth and by rank among the head's guesses, given the text's own tokens before "
    "it. n-alpha is the acceptance after n drafted states, n = depth - 1: the first column at temperature 0, the mass "
    "that both distributions share above. P(a≥k) is of a chain after every token; decoding begins only some of them."
)
NOTES = (
    "τ is what a target pass commits on average, its bonus token included: the tokens after the prefill's over the "
    "passes, pooled over all prompts. Intervals come from resampling the prompts, all turns of a "
    "conversation and all copies of a prompt at once; distinct prompts among the settings counts those that differ.",
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
ABOVE_0 = (
    "At temperatures above 0 lossless counts the prompts whose tokens are the baseline's under coupled noise, "
    "at batch size 1 and at every one asked for; the distribution of tokens sampled with the rule in use is tested "
    "too. That rules keep it, exact enumeration proves in the tests. A lossy rule has no such count. What is timed is "
    "verified by the rule in use: where that samples anew after a rejection, its text is another, of the same "
    "distribution."
)
AT_A_RATE = (
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
