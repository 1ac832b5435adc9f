"""The builder of results: counted passes and, where a clock ran, timed requests become a row of the report."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from eval.measures import metrics
from eval.measures.losslessness import UNCHECKED
from eval.measures.metrics import Pair, Pairs, Passes
from eval.measures.results import Part, Row, Session

UNTIMED = {"draft": 0.0, "verify": 0.0, "other": 0.0}  # seconds


class Source(NamedTuple):
    """Who drafted: the name, the rule that verified, the tree, and what it remembers from request to request."""

    drafter: str
    rule: str
    tree: str
    state: str = "none"


@dataclass(frozen=True)
class Request:
    """One measured request; None stands for what was not measured.

    Attributes:
        passes: its counts; None where a server counts all requests together.
        decoding: the tokens after the first, and the seconds that they took.
        end_to_end: all tokens, and the seconds from the beginning of the prefill on.
        prefill_s: seconds of the prefill.
        seconds: of its steps, by what they were spent on.
        waits: the seconds that its sender waits, by name: `latency_s` to the last token, `ttft_s` to the first one.
    """

    passes: Passes | None
    decoding: Pair | None = None
    end_to_end: Pair | None = None
    prefill_s: float | None = None
    seconds: Mapping[str, float] = field(default_factory=lambda: UNTIMED)
    waits: Mapping[str, float | None] = field(default_factory=dict)


def result(
    source: Source, session: Session, part: Part, requests: Sequence[Request], whole: Passes | None = None
) -> Row:
    """Return the result of a source on a part of a session, without a speedup, which `with_speedups` adds.

    Args:
        source: who drafted.
        session: what was measured.
        part: the requests that count.
        requests: these requests.
        whole: the sum of their counts, where that is known without those of each request, or better.
    """
    each = _passes(requests)
    found = metrics.pooled(each, whole)
    seconds = {key: sum(request.seconds[key] for request in requests) for key in UNTIMED}
    prefills = [request.prefill_s for request in requests if request.prefill_s is not None]
    latencies = [wait for request in requests if (wait := request.waits.get("latency_s")) is not None]
    return Row(
        drafter=source.drafter,
        rule=source.rule,
        tree=source.tree,
        workload=f"{session.workload}/{part.category}" if part.category else session.workload,
        temperature=session.temperature,
        batch_size=session.batch_size,
        steps=found.steps,
        tokens=found.tokens,
        tau=found.tau,
        tau_ci=metrics.pooled_interval(each, session.seed, part.groups),
        tau_request_mean=found.tau_request_mean,
        accepted_by_depth=found.accepted_by_depth,
        conditional_by_depth=found.conditional_by_depth,
        draft_tokens=found.draft_tokens,
        accepted_per_draft_token=found.accepted_per_draft_token,
        tokens_per_second=metrics.speed(_pairs(requests, "decoding")),
        speedup=None,
        speedup_ci=None,
        speedup_hf=None,
        overlap_headroom=metrics.overlap_headroom(seconds) if seconds["verify"] else None,
        seconds=seconds,
        latency_s=statistics.median(latencies) if latencies else None,
        memory_bytes=session.memory_bytes,
        lossless=UNCHECKED.counts(),
        category=part.category,
        prompts=len(requests),
        state=source.state,
        definitions=found.definitions,
        tau_within_depth=[metrics.tau_within(found, depth + 1) for depth in range(len(found.accepted_by_depth))],
        by_request=_by_request(requests, None),
        prefill_s=sum(prefills, 0.0) if len(prefills) == len(requests) else 0.0,
        whole_tokens_per_second=metrics.speed(_pairs(requests, "end_to_end")),
        agreement={} if part.category else session.agreement.get(source.drafter, {}),
        tier=session.tier,
        request_rate=session.request_rate,
    )


def with_speedups(
    row: Row,
    requests: Sequence[Request],
    base: Sequence[Request],
    part: Part,
    seed: int,
    hf: Sequence[Request] | None = None,
) -> Row:
    """Return a result with the columns that only a lossless drafter has.

    Args:
        row: the result.
        requests: what it was built from.
        base: the same requests by plain decoding.
        part: which they are.
        seed: of the intervals.
        hf: the same requests by HF generate.
    """
    ours, theirs = _pairs(requests, "end_to_end"), _pairs(base, "end_to_end")
    fast, slow = _pairs(requests, "decoding"), _pairs(base, "decoding")
    streamed = bool(fast and slow)  # else a prefill cannot be told from the rest
    return replace(
        row,
        by_request=_by_request(requests, base),
        whole_speedup=metrics.over(ours, theirs),
        whole_speedup_ci=metrics.paired_interval(ours, theirs, seed, part.groups),
        speedup=metrics.over(fast, slow) if streamed else None,
        speedup_ci=metrics.paired_interval(fast, slow, seed, part.groups) if streamed else None,
        speedup_hf=None if hf is None else metrics.over(fast, _pairs(hf, "decoding")),
    )


def text_results(source: Source, session: Session, texts: Sequence[Request]) -> list[Row]:
    """Return the results of a source along given texts, where no clock ran: all texts together, then each category."""
    parts = session.parts(len(texts))
    return [result(source, session, part, [texts[index] for index in part.indices]) for part in parts]


def _passes(requests: Sequence[Request]) -> list[Passes]:
    """Return the counts of each request; none where not all are known."""
    known = [request.passes for request in requests if request.passes is not None]
    return known if len(known) == len(requests) else []


def _pairs(requests: Sequence[Request], key: str) -> Pairs:
    """Return the tokens and seconds of each request; none where not all are known."""
    known = [pair for request in requests if (pair := getattr(request, key)) is not None]
    return known if len(known) == len(requests) else []


def _by_request(requests: Sequence[Request], base: Sequence[Request] | None) -> dict[str, dict[str, float]]:
    """Return the quantiles over the requests of τ, tokens per second, waits and, over `base`, the speedup."""
    values: dict[str, list[float | None]] = {
        "tau": [metrics.ratio(each.tokens, each.steps) for each in _passes(requests)],
        "tokens_per_second": [metrics.speed(_pairs([request], "decoding")) for request in requests],
    }
    for name in dict.fromkeys(name for request in requests for name in request.waits):
        values[name] = [request.waits.get(name) for request in requests]
    if base is not None:
        pairs = [
            (_pairs([request], "decoding"), _pairs([plain], "decoding"))
            for request, plain in zip(requests, base, strict=True)
        ]
        values["speedup"] = [metrics.over(fast, slow) if fast and slow else None for fast, slow in pairs]
    return {name: found for name, each in values.items() if (found := metrics.quantiles(each))}
