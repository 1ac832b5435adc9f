"""How many tokens an engine should draft at which batch size, by measured acceptance and speed.

speculative_config.json is what vLLM takes as --speculative-config beside method and model: the tokens to draft by
batch size, in ranges that include both ends; beyond the last one vLLM goes on with its value. A head that vLLM does not
serve has none.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eval.measures.results import LIVE, ResultRow
from heads import HEADS
from heads.formats.published.export import FORMATS

CONFIG = "speculative_config.json"
Times = Mapping[int, float]  # seconds of a plain step by sequences in it
Range = tuple[int, int, int]  # first and last batch size, tokens to draft


class Pass(NamedTuple):
    """What a pass with a draft costs at a batch size, in the terms of plain steps.

    `wider` is the share that it takes of what a plain step with as many sequences takes beyond one of the batch size,
    and `draft` the seconds of one drafted token.
    """

    wider: float
    draft: float


def is_chain(row: ResultRow) -> bool:
    """Say whether a row measured lossless greedy chains of one length, as engines draft."""
    chained = row.tree.startswith(("chain", "served")) and bool(row.accepted_by_depth)
    return chained and is_decoded(row) and not row.lossless.get("failed")


def is_decoded(row: ResultRow) -> bool:
    """Say whether a row is of greedy decoding of a whole workload, requests one behind the other, of one report."""
    other = row.temperature or row.category or row.request_rate is not None or row.report
    return row.tier == LIVE and not other


def is_served(drafter: str) -> bool:
    """Say whether vLLM has a way to serve a drafter: heads of some kinds have none."""
    kind = drafter.partition(" ")[0]
    return kind not in HEADS or kind in FORMATS["vllm"]


def rates(row: ResultRow) -> list[float]:
    """Return the marginal acceptance of a row of chains, by every position that was drafted.

    A row's own end at the deepest position that was ever accepted, its tree says how deep the chain is; of positions
    that are never reached it is 0.
    """
    limits = [int(number) for number in re.findall(r"(?:chain-|depth )(\d+)", row.tree)]
    return [*row.accepted_by_depth, *[0.0] * (min(limits, default=0) - len(row.accepted_by_depth))]


def step_seconds(times: Times, sequences: int) -> float:
    """Return the seconds of a plain step with so many sequences, at most the largest measured.

    Between two measured sizes it lies on the lines through those before or those after, whichever is higher: a step
    reads the weights until computing takes longer. The chord of both bounds it from above.
    """
    sizes = sorted(times)
    at = bisect_left(sizes, sequences)
    if at in (0, len(sizes)) or sizes[at] == sequences:
        return times[sizes[min(at, len(sizes) - 1)]]

    def line(one: int, other: int) -> float:
        slope = (times[other] - times[one]) / (other - one)
        return times[one] + slope * (sequences - one)

    before = line(sizes[at - 2], sizes[at - 1]) if at > 1 else times[sizes[0]]
    chord = line(sizes[at - 1], sizes[at])
    after = line(sizes[at], sizes[at + 1]) if at + 1 < len(sizes) else chord
    return min(chord, max(before, after))


def lengths(times: Times, marginal: Sequence[float], passes: Mapping[int, Pass]) -> list[Range]:
    """Return the number of tokens to draft that is fastest at each measured batch size.

    A pass that verifies K tokens in each of b sequences is priced by a plain step with b (K + 1) sequences. 0 tokens
    where the target alone is faster. Batch sizes whose widest pass is wider than the last size but one are left out,
    where prices are too rough; so there may be none.
    """
    counts, widest = range(len(marginal) + 1), sorted(times)[-2:][0]
    priced = [batch for batch in passes if batch * len(counts) <= widest]
    return ranges(
        {batch: max(counts, key=lambda k: _rate(times, marginal, passes[batch], batch, k)) for batch in priced}
    )


def ranges(best: Mapping[int, int]) -> list[Range]:
    """Return the tokens to draft by measured batch size as vLLM's ranges, each up to the next one's first size."""
    sizes = sorted(best)
    if not sizes:
        return []
    starts = [size for i, size in enumerate(sizes) if not i or best[size] != best[sizes[i - 1]]]
    ends = [*(size - 1 for size in starts[1:]), sizes[-1]]
    return [(size if i else 1, end, best[size]) for i, (size, end) in enumerate(zip(starts, ends, strict=True))]


def _rate(times: Times, marginal: Sequence[float], price: Pass, batch: int, k: int) -> float:
    wider = step_seconds(times, batch * (k + 1)) - times[batch]
    return (1 + math.fsum(marginal[:k])) / (times[batch] + price.wider * wider + k * price.draft)


def config_of(ranges: Sequence[Range]) -> dict[str, Any]:
    """Return what vLLM takes of a schedule; nothing to draft at any size leaves one token, which it never drafts."""
    most = max(k for *_, k in ranges)
    return {"num_speculative_tokens": max(most, 1), "num_speculative_tokens_per_batch_size": [list(r) for r in ranges]}


def prices(plain: Mapping[int, ResultRow], drafted: Mapping[int, ResultRow]) -> tuple[Times, dict[int, Pass]]:
    """Return the seconds of plain steps, and the prices of passes with a draft, of a server and its baseline.

    What a measured pass takes beyond a plain step as wide is the draft's. One that takes less has its tokens cheaper
    than as many sequences are.
    """
    times = {batch: batch / row.tokens_per_second for batch, row in plain.items() if row.tokens_per_second}
    passes = {}
    for batch, row in drafted.items():
        if row.tokens_per_second and row.tau and batch in times:
            tokens = len(rates(row))
            whole = batch * row.tau / row.tokens_per_second
            wide = step_seconds(times, batch * (tokens + 1))
            wider = min(1.0, max(whole - times[batch], 0.0) / (wide - times[batch])) if wide > times[batch] else 1.0
            passes[batch] = Pass(wider, max(whole - wide, 0.0) / tokens)
    return times, passes


def schedule_of(rows: Sequence[ResultRow]) -> dict[str, Any] | None:
    """Return what vLLM takes of a report with one chain, measured in batches; None of another."""
    chains = [row for row in rows if is_chain(row)]
    if len({(row.drafter, row.tree, row.workload, row.state) for row in chains}) != 1:
        return None
    drafted = {row.batch_size: row for row in chains}
    plain = {row.batch_size: row for row in rows if row.rule == "none" and is_decoded(row)}
    first = drafted[min(drafted)]
    times, passes = prices(plain, drafted)
    if len(passes) < 2 or not is_served(first.drafter):
        return None
    schedule = lengths(times, rates(first), passes)
    return config_of(schedule) if schedule else None
