"""What served engines count of their drafts, in the repository's terms: pure functions of a metrics page or a reply.

vLLM has counters of passes that verified a draft (`vllm:spec_decode_num_drafts`), of drafted and of accepted tokens,
and of passes that accepted each position; a pass without a draft is not among them. SGLang counts every pass
(`sglang:spec_verify_calls`) and tells the width of its tree, root included. Both report more of each request if they
are asked to: vLLM under `--per-request-spec-decode-metrics`, SGLang as `meta_info`.

Here a pass is any target pass after the prefill, with or without a draft; what it commits is what it accepted and one
token of the target's own. Engines count a draft that was accepted beyond the end of an answer as accepted; so do these.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

VLLM, SGLANG = ENGINES = ("vllm", "sglang")
LINE = re.compile(r"^((?:vllm|sglang|process)[:_]\w+?)(?:_total)?(?:\{(.*)\})?\s+([^\s}]+)(?:\s+-?\d+)?$")
LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
DRAFTS = {VLLM: "vllm:spec_decode_num_drafts", SGLANG: "sglang:spec_verify_calls"}
FINISHED = {VLLM: "vllm:request_success", SGLANG: "sglang:num_requests"}
EXACT = 2**53  # from here on a float counts no longer one by one
DIGITS = 3  # of the deepest place in a draft that a server may tell of
START = "process_start_time_seconds"


class Sample(NamedTuple):
    """A line of a metrics page: the name without `_total`, its labels, its value."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Counters:
    """What a server has counted since its start; None stands for what it does not count.

    Attributes:
        engine: one of ENGINES.
        drafts: passes that verified a draft; SGLang's, all passes. None: there is no speculation, or not yet.
        draft_tokens, accepted: drafted tokens, and those of them that were accepted.
        by_depth: passes that accepted one token or more, two or more, and so on.
        width: tokens that a pass verifies, its root among them, where that is a setting.
        finished: requests that ended.
        started: when the process did, in seconds.
    """

    engine: str
    drafts: float | None
    draft_tokens: float | None
    accepted: float | None
    by_depth: tuple[float, ...]
    width: float | None
    finished: float | None
    started: float | None

    @property
    def depth(self) -> int:
        """How deep a draft can be, as far as the counters tell; 0: they do not."""
        return len(self.by_depth)


@dataclass(frozen=True)
class Verified:
    """What became of the drafts of some requests.

    Attributes:
        passes: of the target after the prefill.
        accepted: drafted tokens that it accepted.
        drafted: drafted tokens; None where nothing tells.
        by_depth: passes that accepted one token or more, two or more, and so on; empty where nothing tells.
    """

    passes: int
    accepted: int
    drafted: int | None
    by_depth: tuple[int, ...]

    @property
    def tau(self) -> float | None:
        """Tokens that a pass commits, its bonus token included."""
        return 1 + self.accepted / self.passes if self.passes else None


def samples(page: str) -> Iterator[Sample]:
    """Yield the samples of a page in Prometheus's text format that are an engine's; what is none is left out."""
    for line in page.splitlines():
        if found := LINE.match(line.strip()):
            name, labels, value = found.groups()
            try:
                number = float(value)
            except ValueError:
                continue
            if abs(number) < EXACT:
                yield Sample(re.sub(r"^(vllm|sglang)_", r"\1:", name), dict(LABEL.findall(labels or "")), number)


def read_counters(page: str) -> Counters | None:
    """Return what a metrics page has of speculation, summed over engines and ranks; None: it is neither engine's."""
    found = list(samples(page))
    engine = next((name for name in ENGINES if any(each.name.startswith(f"{name}:") for each in found)), None)
    if engine is None:
        return None
    positions: dict[int, float] = {}
    for each in found:
        told = each.labels.get("position", "")
        if each.name == "vllm:spec_decode_num_accepted_tokens_per_pos" and told.isdecimal() and len(told) <= DIGITS:
            positions[int(told)] = positions.get(int(told), 0.0) + each.value
    width = [each.value for each in found if each.name == "sglang:spec_num_draft_tokens" and each.value > 0]
    return Counters(
        engine=engine,
        drafts=_total(found, DRAFTS[engine]),
        draft_tokens=_total(found, "vllm:spec_decode_num_draft_tokens"),
        accepted=_total(found, "vllm:spec_decode_num_accepted_tokens"),
        by_depth=tuple(positions.get(place, 0.0) for place in range(max(positions, default=-1) + 1)),
        width=width[0] if len(set(width)) == 1 else None,
        finished=_total(found, FINISHED[engine]),
        started=next((each.value for each in found if each.name == START), None),
    )


def _total(found: Sequence[Sample], name: str) -> float | None:
    values = [each.value for each in found if each.name == name]
    return sum(values) if values else None


def restarted(before: Counters, after: Counters) -> bool:
    """Whether the counters began anew in between: one fell, one is gone, or the process is another."""
    pairs = [(getattr(before, key), getattr(after, key)) for key in ("drafts", "draft_tokens", "accepted", "finished")]
    pairs += zip(before.by_depth, (*after.by_depth, *[None] * before.depth), strict=False)
    fell = any(old is not None and (new is None or new < old) for old, new in pairs)
    return fell or before.engine != after.engine or before.started != after.started


def between(before: Counters, after: Counters, decoded: int) -> Verified:
    """Return what was verified between two readings of one server's counters.

    Args:
        before, after: the readings; `after.drafts` is there.
        decoded: tokens after the prefill's of all requests in between. Where these are more than vLLM's passes with a
            draft account for, there were passes without one.
    """
    assert after.drafts is not None
    passes = round(after.drafts - (before.drafts or 0))
    if after.engine == SGLANG:
        drafted = None if after.width is None else passes * (round(after.width) - 1)
        return Verified(passes, max(decoded - passes, 0), drafted, ())
    accepted = round((after.accepted or 0) - (before.accepted or 0))
    old = (*before.by_depth, *[0.0] * after.depth)
    return Verified(
        passes=max(passes, decoded - accepted),
        accepted=accepted,
        drafted=round((after.draft_tokens or 0) - (before.draft_tokens or 0)),
        by_depth=tuple(round(new - was) for new, was in zip(after.by_depth, old, strict=False)),
    )


def of_reply(reply: Mapping[str, Any], decoded: int) -> Verified | None:
    """Return what a reply, or a part of it, says of its own drafts; None where it says nothing that adds up.

    Args:
        reply: with vLLM's `metrics.speculative_decoding`, or SGLang's `meta_info` in its one choice.
        decoded: its tokens after the first.
    """
    metrics, choices = reply.get("metrics"), reply.get("choices")
    told = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if isinstance(told, dict):
        keys = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "acceptance_histogram")
        return _verified(told, keys, decoded)
    choice = choices[0] if isinstance(choices, list) and choices else None
    told = choice.get("meta_info") if isinstance(choice, dict) else None
    if isinstance(told, dict):
        keys = (
            "spec_verify_ct",
            "spec_num_correct_drafts",
            "spec_num_proposed_drafts",
            "spec_correct_drafts_histogram",
        )
        return _verified(told, keys, decoded)
    return None


def _verified(told: Mapping[str, Any], keys: tuple[str, ...], decoded: int) -> Verified | None:
    """Return what is told under the keys of passes, accepted and drafted tokens, and of the passes by accepted ones."""
    numbers: list[Any] = [told.get(key) for key in keys[:3]]
    if not all(map(_count, numbers)):
        return None
    passes, accepted, drafted = numbers
    if accepted > drafted or (accepted and not passes):
        return None
    histogram = told.get(keys[3])
    counts = histogram[: 10**DIGITS] if isinstance(histogram, list) else []
    whole = (
        all(map(_count, counts))
        and sum(counts) == passes
        and sum(depth * count for depth, count in enumerate(counts)) == accepted
    )
    return Verified(
        passes=max(passes, decoded - accepted),
        accepted=accepted,
        drafted=drafted,
        by_depth=tuple(reversed(list(accumulate(reversed(counts[1:]))))) if whole else (),
    )


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < EXACT


def together(parts: Iterable[Verified]) -> Verified:
    """Return the sum of what was verified; what one part does not tell, the sum does not."""
    found = list(parts)
    depth = max((len(each.by_depth) for each in found), default=0)
    known = all(each.by_depth or not each.accepted for each in found)
    padded = [(*each.by_depth, *[0] * (depth - len(each.by_depth))) for each in found]
    drafted = [each.drafted for each in found if each.drafted is not None]
    return Verified(
        passes=sum(each.passes for each in found),
        accepted=sum(each.accepted for each in found),
        drafted=sum(drafted) if len(drafted) == len(found) else None,
        by_depth=tuple(sum(column) for column in zip(*padded, strict=True)) if known else (),
    )
