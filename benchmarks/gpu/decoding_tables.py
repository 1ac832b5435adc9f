"""What decoding.py measured, as tables and figures: pure functions of its numbers, however many of them are there."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.common import Figure, Table

Numbers = Mapping[str, Any]
PLAIN_GOAL, VERIFY_GOAL, GOAL_NODES = 1.25, 1.15, "64"
TAUS = (2, 3, 4, 5)
OURS = "here, compiled"
PARTS = ("verify", "draft", "rest")


def bounds(numbers: Numbers, cell: Numbers) -> tuple[float, float]:
    """Return the seconds that it takes to read the weights once, and the weights and all committed rows."""
    limits = numbers["limits"]
    rows = cell["batch"] * cell["context"] * limits["row_bytes"]
    return limits["weight_bytes"] / limits["bandwidth"], (limits["weight_bytes"] + rows) / limits["bandwidth"]


def speedup(cell: Numbers, head: str, tau: float) -> float:
    """Return what a head of such an acceptance length is worth: plain steps for as many tokens, over its own step."""
    return tau * cell["plain"]["step"] / cell["heads"][head]["step"]


def goals(numbers: Numbers, cell: Numbers) -> list[dict[str, Any]]:
    """Return the goals of a cell with passes of all sizes, what was measured, and whether they are met.

    A toy has no pass of as many nodes as the goal speaks of; its largest stands in.
    """
    nodes = GOAL_NODES if GOAL_NODES in cell["nodes"] else max(cell["nodes"], key=int)
    plain = cell["plain"]["step"]
    measured = {
        "plain step / (weight bytes / bandwidth)": (plain / bounds(numbers, cell)[0], PLAIN_GOAL),
        f"pass of {nodes} nodes / plain step": (cell["nodes"][nodes]["verify"] / plain, VERIFY_GOAL),
    }
    return [
        {"goal": name, "at_most": most, "measured": value, "met": value <= most}
        for name, (value, most) in measured.items()
    ]


def tables(numbers: Numbers, wanted: Sequence[str]) -> list[Table]:
    """Return the tables.

    Args:
        numbers: of decoding.py.
        wanted: the names of all that is to be measured, a cell, the same eager, the others; what is missing is told.
    """
    whole = [numbers[name] for name in wanted[:2] if "nodes" in numbers.get(name, {})]
    found = [_goals(numbers, wanted[0]), _plain(numbers, wanted)]
    if whole:
        found += [_nodes(whole), _heads(whole)]
    return [*found, _grid(numbers, wanted), _rates(numbers)]


def _goals(numbers: Numbers, name: str) -> Table:
    cell = numbers.get(name, {})
    rows = [["all", _missing(cell), "", "not judged"]]
    if "nodes" in cell:
        rows = [
            [each["goal"], f"{each['measured']:.2f}", f"≤ {each['at_most']}", "met" if each["met"] else "missed"]
            for each in goals(numbers, cell)
        ]
    return Table(f"Goals of compiled decoding at {name}, sequences x context", ["what", "measured", "goal", ""], rows)


def _plain(numbers: Numbers, wanted: Sequence[str]) -> Table:
    rows = []
    for name in _cells(wanted):
        cell = numbers.get(name, {})
        if "plain" not in cell:
            rows.append([name, *[_missing(cell)] * 5])
            continue
        step, (weights, both) = cell["plain"]["step"], bounds(numbers, cell)
        cells = [_ms(step), _ms(cell["plain"]["verify"]), _ms(weights), f"{step / weights:.2f}", f"{step / both:.2f}"]
        rows.append([_told(cell), *cells])
    caption = "The baseline beside the time that it takes to read the weights, and weights and cache; milliseconds"
    header = ["sequences x context", "step", "its pass", "weights", f"step / weights, goal {PLAIN_GOAL}",
              "step / (weights + cache)"]  # fmt: skip
    return Table(caption, header, rows)


def _nodes(whole: Sequence[Numbers]) -> Table:
    rows = []
    for cell in whole:
        for nodes, parts in cell["nodes"].items():
            over = [f"{parts['verify'] / cell['plain'][key]:.2f}" for key in ("step", "verify")]
            rows.append([_told(cell), nodes, _ms(parts["verify"]), *over])
    header = ["sequences x context", "nodes", "pass", f"pass / plain step, goal {VERIFY_GOAL}", "pass / plain pass"]
    return Table("Verification passes, the root among their nodes; milliseconds", header, rows)


def _heads(whole: Sequence[Numbers]) -> Table:
    rows = [
        [_told(cell), name, *[_ms(parts[key]) for key in ("draft", "verify", "rest", "step")],
         f"{parts['draft'] / parts['step']:.0%}"]
        for cell in whole
        for name, parts in cell["heads"].items()
    ]  # fmt: skip
    header = ["sequences x context", "head", "draft", "verify", "rest", "step", "the draft's share"]
    return Table("A step with a dynamic tree, by head; milliseconds", header, rows)


def _grid(numbers: Numbers, wanted: Sequence[str]) -> Table:
    rows = []
    for name in _compiled(wanted):
        cell = numbers.get(name, {})
        if "heads" not in cell:
            rows.append([name, "", *[_missing(cell)] * (4 + len(TAUS))])
            continue
        head, parts = next(iter(cell["heads"].items()))
        gains = [f"{speedup(cell, head, tau):.2f}" for tau in TAUS]
        rows.append([_told(cell), head, _ms(cell["plain"]["step"]), *[_ms(parts[key]) for key in PARTS], *gains])
    header = ["sequences x context", "head", "plain step", *PARTS, *(f"τ = {tau}" for tau in TAUS)]
    caption = (
        f"What a step costs, in milliseconds, and the speedup over the baseline that τ gives; tree "
        f"{numbers['limits']['tree']}"
    )
    return Table(caption, header, rows)


def _rates(numbers: Numbers) -> Table:
    found = numbers.get("generate", {})
    rates = found.get("rates", {})
    rows = [[name, f"{rate:.1f}", f"{rates[OURS] / rate:.2f}"] for name, rate in rates.items()]
    size = f" of {found['tokens']} after a prompt of {found['prompt']}" if rows else ""
    return Table(
        "The baseline here and in HF generate, one sequence, prefill included",
        ["how", f"tokens/s{size}", "compiled here / this"],
        rows or [["all", *[_missing(found)] * 2]],
    )


def figures(numbers: Numbers, wanted: Sequence[str]) -> list[Figure]:
    """Return the figures: speedup by acceptance length, and a step's parts by context, both by batch."""
    cells = [numbers[name] for name in _compiled(wanted) if "heads" in numbers.get(name, {})]
    gains, spent = [], []
    for cell in cells:
        head, parts = next(iter(cell["heads"].items()))
        at = {"batch": cell["batch"], "context": cell["context"]}
        gains += [{**at, "tau": tau, "speedup": speedup(cell, head, tau)} for tau in (1, *TAUS)]
        spent.append({**at, "step": "plain", "part": "plain", "order": 0, "ms": 1e3 * cell["plain"]["step"]})
        spent += [
            {**at, "step": "tree", "part": part, "order": i + 1, "ms": 1e3 * parts[part]}
            for i, part in enumerate(PARTS)
        ]
    return [
        Figure("speedup_by_tau", "Speedup over the baseline by acceptance length", _gains(gains)),
        Figure("step_by_context", "A plain step, and the parts of one with a tree", _spent(spent)),
    ]


def _gains(data: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "data": {"values": data},
        "facet": {"column": {"field": "context", "title": "tokens of context"}},
        "spec": {
            "width": 180,
            "height": 200,
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {"field": "tau", "type": "quantitative", "title": "τ"},
                "y": {"field": "speedup", "type": "quantitative", "title": "speedup"},
                "color": {"field": "batch", "type": "nominal", "title": "sequences"},
            },
        },
    }


def _spent(data: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "data": {"values": data},
        "facet": {"column": {"field": "batch", "title": "sequences"}},
        "resolve": {"scale": {"y": "independent"}},
        "spec": {
            "width": 150,
            "height": 200,
            "mark": "bar",
            "encoding": {
                "x": {"field": "context", "type": "ordinal", "title": "tokens of context"},
                "xOffset": {"field": "step"},
                "y": {"field": "ms", "type": "quantitative", "title": "ms a step", "stack": "zero"},
                "color": {"field": "part", "type": "nominal", "sort": ["plain", *PARTS], "title": None},
                "order": {"field": "order", "type": "quantitative"},
            },
        },
    }


def _cells(wanted: Sequence[str]) -> list[str]:
    """Return the names of what is a batch at a context."""
    return [name for name in wanted if " x " in name]


def _compiled(wanted: Sequence[str]) -> list[str]:
    return [name for name in _cells(wanted) if "eager" not in name]


def _told(cell: Numbers) -> str:
    return f"{cell['batch']} x {cell['context']}{'' if cell['compiled'] else ', eager'}"


def _missing(found: Numbers) -> str:
    return found.get("failed", "not measured")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
