"""The later parts of the Markdown report: categories, definitions, requests, end to end, load, depths, gates."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eval.measures.losslessness import Gate, SampledGate, labelled
from eval.measures.metrics import DEFINITIONS, LEVEL, QUANTILES
from eval.measures.results import LIVE, TIERS
from eval.report.breakdown import PLAIN
from eval.report.tables import grid, number, spread

INTERVAL = f"[{LEVEL:.0%}]"
NAMED = ("drafter", "workload", "T")
SHOWN = 5  # near ties, of each drafter
DRAWN_CHAINS = (
    "teacher_forced counts a chain that is drawn token by token: block verification, the rule of decoding unless asked "
    "otherwise, accepts as much or more."
)


def sections(
    rows: Sequence[Any], sampled: Sequence[SampledGate], gates: Mapping[str, Gate], red: Callable[[Any], bool]
) -> Iterator[str]:
    """Yield headings, tables and legends; of parts that have nothing to tell, nothing."""
    whole_rows = [row for row in rows if not row.category]
    clocked = [row for row in rows if row.tier == LIVE] or rows
    overall = [row for row in clocked if not row.category]
    parts = {
        "With and without a clock": tiers(whole_rows),
        "By category": categories(clocked, red),
        "What others call acceptance": definitions(overall),
        "End to end": whole(overall, red),
        "Under load": load(overall, red),
        "Over the requests": requests(overall),
        "At an equal depth of draft": depths(overall),
        "Sampled tokens": drawn(sampled),
        "Near ties": ties(overall, gates),
    }
    for heading, told in parts.items():
        if told:
            yield f"## {heading}"
            yield from told


def tiers(rows: Sequence[Any]) -> list[str]:
    """Return τ as each tier measured it, and whether the intervals meet."""
    alone = [row for row in rows if row.drafter != PLAIN and row.batch_size == 1]
    found: dict[tuple[str, str, float], dict[str, Any]] = {}
    for row in alone:
        named = labelled(row.drafter, 1, row.report)
        found.setdefault((named, row.workload, row.temperature), {}).setdefault(row.tier, row)
    body = [
        [name, workload, f"{temperature:g}", *(_tau(each.get(tier)) for tier in TIERS), _meet(list(each.values()))]
        for (name, workload, temperature), each in found.items()
    ]
    legend = (
        "live decodes; teacher_forced is one pass of target and head over the text; replay drafts along the text, "
        "without the target. One law, so one τ: what they count differs only where the text does, or the rule. "
        + DRAWN_CHAINS
    )
    several = len({row.tier for row in alone}) > 1
    return [grid((*NAMED, *(f"τ, {tier}" for tier in TIERS), "intervals meet"), body), legend] if several else []


def _tau(row: Any) -> str:
    return "-" if row is None else spread(row.tau, row.tau_ci)


def _meet(rows: Sequence[Any]) -> str:
    """Return whether the intervals meet; if not, whether the sources' texts are other ones, which near ties make."""
    known = [row.tau_ci for row in rows if row.tau_ci is not None]
    if len(known) < 2:
        return "-"
    if max(low for low, _ in known) <= min(high for _, high in known):
        return "yes"
    other = any(row.agreement.get("identical", row.prompts) < row.prompts for row in rows)
    return "NO, but the texts differ" if other else "NO"


def reports(extras: Mapping[str, Any]) -> list[str]:
    """Return, of reports side by side, what forbids to compare them, and what each was measured on and under."""
    if "reports" not in extras:
        return []
    warnings = [f"**Compare with care:** {warning}." for warning in extras["warnings"]]
    body = [
        [each["name"], *(str(value) for value in told_of(each).values()), f"`{each['file']}`"]
        for each in extras["reports"]
    ]
    return [*warnings, grid(("report", *told_of(extras["reports"][0]), "file"), body)]


def told_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to know first of a report that stands beside others: its target, device, settings and code."""
    target, device, settings, work = (report[part] for part in ("target", "device", "settings", "work"))
    code = settings.get("provenance", {})
    found = {"target": target.get("name"), "device": device.get("name"), "dtype": device.get("dtype")}
    found |= {key: settings.get(key) for key in ("max_new_tokens", "prompts", "engine")} | dict(work)
    found |= {"revision": (code.get("revision") or "-")[:12], "date": code.get("date")}
    return {key: "-" if value is None else value for key, value in found.items()}


def categories(rows: Sequence[Any], red: Callable[[Any], bool]) -> list[str]:
    """Return the rows of single categories."""
    header = ("drafter", "workload/category", "T", "prompts", f"τ {INTERVAL}", f"speedup {INTERVAL}")
    body = [
        [
            *(*_named(row), str(row.prompts), spread(row.tau, row.tau_ci)),
            "withheld" if red(row) else spread(row.speedup, row.speedup_ci),
        ]
        for row in rows
        if row.category
    ]
    return [grid(header, body)] if body else []


def definitions(rows: Sequence[Any]) -> list[str]:
    """Return the published definitions side by side, and their legend."""
    body = [
        [*_named(row), *(number(row.definitions.get(name), 3) for name in DEFINITIONS)]
        for row in rows
        if row.definitions
    ]
    legend = "\n".join(f"- `{name}`: {told}" for name, told in DEFINITIONS.items())
    return [grid((*NAMED, *DEFINITIONS), body), legend] if body else []


def whole(rows: Sequence[Any], red: Callable[[Any], bool]) -> list[str]:
    """Return the speeds with the prefill."""
    header = (*NAMED, "memory", "prefill s", "tok/s, end to end", f"speedup, end to end {INTERVAL}")
    body = [
        [
            *(*_named(row), row.state, number(row.prefill_s, 2), number(row.whole_tokens_per_second, 1)),
            "withheld" if red(row) else spread(row.whole_speedup, row.whole_speedup_ci),
        ]
        for row in rows
        if row.whole_tokens_per_second is not None
    ]
    legend = (
        "End to end counts all tokens over prefill and decoding together. A source whose memory is warm drafts from "
        "the requests before, in their order, and begins every round of measurement with nothing; cold, it forgets "
        "before every request; none, nothing outlives a request."
    )
    return [grid(header, body), legend] if body else []


def load(rows: Sequence[Any], red: Callable[[Any], bool]) -> list[str]:
    """Return what requests waited for, where they came at a rate."""
    parts = {"queue s": "queue_s", "TTFT s": "ttft_s", "latency s": "latency_s"}
    marks = [f"{title} {mark}" for title in parts for mark in ("p50", "p95")]
    body = [
        [
            *(labelled(row.drafter, 1, row.report), row.workload, f"{row.temperature:g}"),
            *(f"{row.request_rate:g}", str(row.batch_size)),
            *(number(row.by_request[key][mark], 3) for key in parts.values() for mark in ("p50", "p95")),
            number(row.tokens_per_second, 1),
            "withheld" if red(row) else spread(row.speedup, row.speedup_ci),
        ]
        for row in rows
        if row.request_rate is not None
    ]
    legend = (
        "Requests come at random, so many a second on average, and wait in a queue while as many are being answered as "
        "the capacity says. TTFT and latency count from the arrival to the first and to the last token. The latency "
        "ratio is plain decoding's mean over the drafter's: above 1 the drafter's requests end sooner."
    )
    header = (*NAMED, "req/s", "capacity", *marks, "tok/s", f"latency ratio {INTERVAL}")
    return [grid(header, body), legend] if body else []


def requests(rows: Sequence[Any]) -> list[str]:
    """Return the quantiles over the requests."""
    marks = [f"p{share * 100:g}" for share in QUANTILES]
    body = [
        [*_named(row), what, *(number(found[mark], 2) for mark in marks)]
        for row in rows
        for what, found in row.by_request.items()
        if what in ("tau", "speedup")  # the JSON has more
    ]
    return [grid((*NAMED, "of each request", *marks), body)] if body else []


def depths(rows: Sequence[Any]) -> list[str]:
    """Return what τ would be at equal depths of draft."""
    deepest = max((len(row.tau_within_depth) for row in rows), default=0)
    body = [
        [
            *_named(row),
            *(number(value, 2) for value in row.tau_within_depth + [None] * (deepest - len(row.tau_within_depth))),
        ]
        for row in rows
        if row.tau_within_depth
    ]
    legend = (
        "τ, had every draft ended at that depth: the sum of P(a≥d) up to it and the bonus token, from the passes that "
        "were made. `budget=K` measures it: then no source drafts deeper than K."
    )
    return [grid((*NAMED, *(f"depth {d + 1}" for d in range(deepest))), body), legend] if body else []


def drawn(sampled: Sequence[SampledGate]) -> list[str]:
    """Return the verdicts above temperature 0."""
    legend = (
        "Under coupled noise every drafter must emit plain decoding's tokens. The chi-square test draws next tokens "
        "after fixed texts with the rule in use, as often as it takes to reject a law that is off by the total "
        "variation TV with the power that is named. The control, a rule known to be broken, must be rejected each time."
    )
    lines = "\n".join(f"- {'' if each.passed else '**RED** '}{each}" for each in sampled)
    return [lines, legend] if sampled else []


def ties(rows: Sequence[Any], gates: Mapping[str, Gate]) -> list[str]:
    """Return the near ties of the gate, and where the timed tokens left plain decoding's, with their logit gaps."""
    lines = [f"- gate, {name}: {tie}" for name, gate in gates.items() for tie in gate.ties[:SHOWN]]
    for row in rows:
        if row.agreement.get("identical", row.prompts) < row.prompts:
            told, name = row.agreement, labelled(row.drafter, row.batch_size, row.report, row.request_rate)
            gaps = ", ".join(f"{gap:.3g}" for gap in told["gaps"][:SHOWN])
            lines.append(
                f"- timed in {told['dtype']}, {name} on {row.workload}: {told['identical']} of {told['checked']} "
                f"prompts identical, {told['near_tie']} near ties, {told['beyond']} beyond; top-2 logit gaps {gaps}"
            )
    legend = (
        "The gap is plain decoding's between its two best tokens where the other first differs. What is timed is not "
        "gated: rounding decides there, and from there on two texts differ."
    )
    return ["\n".join(lines), legend] if lines else []


def _named(row: Any) -> list[str]:
    name = labelled(row.drafter, row.batch_size, row.report, row.request_rate)
    return [name, row.workload, f"{row.temperature:g}"]
