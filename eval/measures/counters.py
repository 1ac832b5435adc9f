"""Engines' counters of speculative decoding, in our definitions: pure functions of a metrics page or a reply.

vLLM counts forward passes that verified a draft (`vllm:spec_decode_num_drafts`), drafted and accepted tokens, and
passes that accepted each position; passes without a draft are not counted. SGLang counts every forward pass
(`sglang:spec_verify_calls`) and reports the width of its tree, root included. Both can report on each request: vLLM
under `--per-request-spec-decode-metrics`, SGLang under `return_spec_tokens_details`. llama.cpp (`--metrics`) counts as
vLLM does, under its own prefix, but only finished requests.

Here a pass is any forward pass of the target after the prefill, with or without a draft; it commits the accepted tokens
and a bonus token. Engines count accepted tokens beyond an answer's end as accepted, and so do these functions.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

from data.text.streams import at
from eval.measures.metrics import SpecDecodingStats

VLLM, SGLANG, LLAMA = ENGINES = ("vllm", "sglang", "llamacpp")
LINE = re.compile(r"^((?:vllm|sglang|llamacpp|process)[:_]\w+?)(?:_total)?(?:\{(.*)\})?\s+([^\s}]+)(?:\s+-?\d+)?$")
LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
DRAFTS = {VLLM: "vllm:spec_decode_num_drafts", SGLANG: "sglang:spec_verify_calls",
          LLAMA: "llamacpp:spec_decode_num_drafts"}  # fmt: skip
FINISHED = {VLLM: "vllm:request_success", SGLANG: "sglang:num_requests", LLAMA: ""}
EXACT = 2**53  # floats below this are exact integers
DIGITS = 3  # maximum digits of a draft position
START = "process_start_time_seconds"
# Keys of a reply: passes, accepted tokens, drafted tokens, histogram of passes over accepted tokens.
VLLM_KEYS = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "acceptance_histogram")
SGLANG_KEYS = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram")


@dataclass(frozen=True)
class Counters:
    """A server's counts since its start, None for missing counters."""

    engine: str  # one of ENGINES
    drafts: float | None  # passes that verified a draft (SGLang: all passes); None: no speculation, or none so far
    draft_tokens: float | None  # drafted tokens
    accepted: float | None  # accepted tokens among them
    by_depth: tuple[float, ...]  # number of passes that accepted at least 1, 2, … tokens
    width: float | None  # tokens verified per pass, root included, if the server reports it
    finished: float | None  # number of finished requests
    started: float | None  # start of the process, seconds since the epoch
    generated: float | None = None  # number of tokens in all answers


def samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the name without `_total`, the labels and the value of the relevant lines of a Prometheus page."""
    for line in page.splitlines():
        if match := LINE.match(line.strip()):
            name, labels, value = match.groups()
            try:
                number = float(value)
            except ValueError:
                continue
            if abs(number) < EXACT:
                yield re.sub(r"^(vllm|sglang|llamacpp)_", r"\1:", name), dict(LABEL.findall(labels or "")), number


def read_counters(page: str) -> Counters | None:
    """Read a metrics page's counters of speculation, summed over engines and ranks; None for other servers."""
    values: dict[str, list[float]] = {}
    positions = defaultdict[int, float](float)
    for name, labels, value in samples(page):
        values.setdefault(name, []).append(value)
        position = labels.get("position", "")
        if (
            name.endswith(":spec_decode_num_accepted_tokens_per_pos")
            and position.isdecimal()
            and len(position) <= DIGITS
        ):
            positions[int(position)] += value
    engine = next((name for name in ENGINES if any(key.startswith(f"{name}:") for key in values)), None)
    if engine is None:
        return None
    total = {name: sum(column) for name, column in values.items()}.get
    drafts = total(DRAFTS[engine])
    widths = {value for value in values.get("sglang:spec_num_draft_tokens", []) if value > 0}
    return Counters(
        engine=engine,
        drafts=None if engine == LLAMA and not drafts else drafts,  # llama.cpp reports 0 without speculation too
        draft_tokens=total(f"{engine}:spec_decode_num_draft_tokens"),
        accepted=total(f"{engine}:spec_decode_num_accepted_tokens"),
        by_depth=tuple(positions[position] for position in range(max(positions, default=-1) + 1)),
        width=widths.pop() if len(widths) == 1 else None,
        finished=total(FINISHED[engine]),
        started=values[START][0] if START in values else None,
        generated=total(f"{engine}:generation_tokens"),
    )


def restarted(before: Counters, after: Counters) -> bool:
    """Return whether the server restarted between two readings: a counter fell or is missing, or another process."""
    pairs = [(getattr(before, key), getattr(after, key)) for key in ("drafts", "draft_tokens", "accepted", "finished")]
    pairs += zip_longest(before.by_depth, after.by_depth)
    fell = any(old is not None and (new is None or new < old) for old, new in pairs)
    return fell or before.engine != after.engine or before.started != after.started


def between(before: Counters, after: Counters, decoded: int) -> SpecDecodingStats:
    """Return the counts between two readings of one server's counters.

    `decoded` counts the tokens after the prefill's of all requests in between. vLLM's passes with a draft account for
    some of them; the rest came from passes without a draft.
    """
    assert after.drafts is not None
    passes = round(after.drafts - (before.drafts or 0))
    if after.engine == SGLANG:
        drafted = None if after.width is None else passes * (round(after.width) - 1)
        return verified(passes, drafted, max(decoded - passes, 0), ())
    accepted = round((after.accepted or 0) - (before.accepted or 0))
    drafted = round((after.draft_tokens or 0) - (before.draft_tokens or 0))
    by_depth = tuple(round(new - old) for new, old in zip_longest(after.by_depth, before.by_depth, fillvalue=0.0))
    return verified(max(passes, decoded - accepted), drafted, accepted, by_depth)


def decoded_between(before: Counters, after: Counters) -> int:
    """Return the tokens after the first of each answer, needed for SGLang's counts; other engines count passes."""
    if after.engine != SGLANG:
        return 0
    if after.generated is None or after.finished is None:
        raise ValueError("the server's metrics have no sglang:generation_tokens and sglang:num_requests: update it")
    return round(after.generated - (before.generated or 0) - after.finished + (before.finished or 0))


def verified(passes: int, drafted: int | None, accepted: int, by_depth: tuple[int, ...]) -> SpecDecodingStats:
    """Return the counts of passes; each commits the accepted tokens and one bonus token."""
    return SpecDecodingStats(accepted + passes, passes, drafted, accepted, by_depth)


def of_reply(reply: Mapping[str, Any], decoded: int) -> SpecDecodingStats | None:
    """Return the counts in a reply or an event, given its tokens after the first; None if missing or inconsistent.

    vLLM has them in `metrics.speculative_decoding`, SGLang in `sglext.spec_tokens_details`, or in `meta_info` of the
    only choice, which it does not stream (0.5.23).
    """
    record, choices = at(reply, "metrics/speculative_decoding"), reply.get("choices")
    if isinstance(record, dict):
        return _read(record, VLLM_KEYS, decoded)
    record = at(reply, "sglext/spec_tokens_details")
    record = record or (at(choices[0], "meta_info") if isinstance(choices, list) and choices else None)
    return _read(record, SGLANG_KEYS, decoded) if isinstance(record, dict) else None


def _read(record: Mapping[str, Any], keys: tuple[str, ...], decoded: int) -> SpecDecodingStats | None:
    """Read passes, accepted tokens, drafted tokens, and the histogram of passes over accepted tokens."""
    numbers: list[Any] = [record.get(key) for key in keys[:3]]
    if not all(map(_is_count, numbers)):
        return None
    passes, accepted, drafted = numbers
    if accepted > drafted or (accepted and not passes):
        return None
    histogram = record.get(keys[3])
    counts = histogram[: 10**DIGITS] if isinstance(histogram, list) else []
    consistent = (
        all(map(_is_count, counts))
        and sum(counts) == passes
        and sum(depth * count for depth, count in enumerate(counts)) == accepted
    )
    by_depth = tuple(reversed(list(accumulate(reversed(counts[1:]))))) if consistent else ()
    return verified(max(passes, decoded - accepted), drafted, accepted, by_depth)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < EXACT
