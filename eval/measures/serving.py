"""vLLM's schedule: the number of tokens to draft at each batch size, from measured acceptance and speed.

speculative_config.json has the keys of vLLM's --speculative-config without method and model: the tokens to draft by
batch size, in inclusive ranges; vLLM uses the last value beyond them. A head that vLLM does not serve has no file.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from eval.measures.results import LIVE, ResultRow
from heads import HEADS
from heads.formats.published.export import FORMATS

CONFIG = "speculative_config.json"
Range = tuple[int, int, int]  # first and last batch size, tokens to draft


def is_chain(row: ResultRow) -> bool:
    """Return whether a row measured lossless greedy chains of one length, as engines draft, on a whole workload."""
    other = row.temperature or row.category or row.request_rate is not None or row.tier != LIVE
    chained = row.tree.startswith(("chain", "served")) and bool(row.accepted_by_depth)
    return chained and not other and not row.lossless.get("failed")


def is_served(drafter: str) -> bool:
    """Return whether vLLM can serve a drafter."""
    kind = drafter.partition(" ")[0]
    return kind not in HEADS or kind in FORMATS["vllm"]


def ranges(best: Mapping[int, int]) -> list[Range]:
    """Return the tokens to draft by measured batch size as vLLM's ranges, each up to the next one's first size."""
    sizes = sorted(best)
    if not sizes:
        return []
    starts = [size for i, size in enumerate(sizes) if not i or best[size] != best[sizes[i - 1]]]
    ends = [*(size - 1 for size in starts[1:]), sizes[-1]]
    return [(size if i else 1, end, best[size]) for i, (size, end) in enumerate(zip(starts, ends, strict=True))]


def config_of(ranges: Sequence[Range]) -> dict[str, Any]:
    """Return vLLM's config of a schedule; if no size drafts, one token that is never drafted."""
    most = max(k for *_, k in ranges)
    return {"num_speculative_tokens": max(most, 1), "num_speculative_tokens_per_batch_size": [list(r) for r in ranges]}


def schedule_of(rows: Sequence[ResultRow]) -> dict[str, Any] | None:
    """Return vLLM's config of a report with one chain at several batch sizes, if it pays; else None."""
    chains = [row for row in rows if is_chain(row)]
    if len({(row.drafter, row.tree, row.workload) for row in chains}) != 1 or not is_served(chains[0].drafter):
        return None
    limits = [int(number) for number in re.findall(r"(?:chain-|depth )(\d+)", chains[0].tree)]
    depth = min(limits, default=len(chains[0].accepted_by_depth))
    best = {row.batch_size: depth if row.speedup > 1 else 0 for row in chains if row.speedup}
    return config_of(ranges(best)) if len(best) > 1 else None
