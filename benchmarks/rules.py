"""Which verification rule accepts most: exactly on random laws, then on a trained head's. Justifies `rule=auto`.

    python benchmarks/rules.py [RUN]

The first table enumerates every outcome of a pass, on a vocabulary of three and to a depth of two: mean tokens per pass
over random instances of each family of laws. The second, given a run with a head, decodes real prompts with each rule
that fits each kind of draft, at several temperatures: tokens per pass, over all prompts and seeds. Trees have
as many nodes as each other; "greedy" drafts are the likeliest tokens, not drawn, and verified as point masses.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from eval.inputs.workloads import load_workload
from eval.measures.metrics import acceptance, tau_interval
from heads.formats.hub import resolve_head, target_path
from heads.formats.store import load_head, read_config
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from inference.verification.sample import Sampling
from tests.enumeration import EXACT, Tables, drafts, one_pass

INSTANCES = 20
FAMILIES = ("mild", "peaky", "close", "zeros")
TEMPERATURES = (0.5, 1.0)
PROMPTS, SEEDS, TOKENS = 8, 1, 64

SMALL = {
    "greedy chain": TreeConfig("static", 0, 0, 0, [[0], [0, 0]], []),
    "drawn chain": TreeConfig("chain", 2, 0, 0, [], []),
    "greedy tree": TreeConfig("static", 0, 0, 0, [[0], [1], [0, 0], [1, 0]], []),
    "drawn tree": TreeConfig("sampled", 0, 0, 0, [], [2, 1]),
}
LARGE = {
    "greedy chain": TreeConfig("static", 0, 0, 0, [[0] * depth for depth in range(1, 5)], []),
    "drawn chain": TreeConfig("chain", 4, 0, 0, [], []),
    "greedy tree": TreeConfig("dynamic", 4, 4, 21, [], []),
    "drawn tree": TreeConfig("sampled", 0, 0, 0, [], [3, 2, 1, 1]),
}
RULES = (
    ("greedy chain", "point_mass"),
    ("drawn chain", "match"),
    ("drawn chain", "token"),
    ("drawn chain", "block"),
    ("greedy tree", "point_mass"),
    ("drawn tree", "match"),
    ("drawn tree", "recursive"),
    ("drawn tree", "traversal"),
)
ORDER = (
    (("drawn chain", "match"), ("drawn chain", "token")),
    (("drawn chain", "token"), ("drawn chain", "block")),
    (("drawn tree", "recursive"), ("drawn tree", "traversal")),
    (("greedy chain", "point_mass"), ("drawn chain", "block")),
    (("greedy tree", "point_mass"), ("drawn tree", "traversal")),
)


def show(title: str, columns: list[str], cells: dict[tuple[str, str], list[str]]) -> None:
    """Print a table as Markdown."""
    print(f"\n{title}\n\n| drafts | rule | {' | '.join(columns)} |\n| --- | --- |{' --- |' * len(columns)}")
    for (kind, rule), row in cells.items():
        print(f"| {kind} | {rule} | {' | '.join(row)} |")


def enumerated(family: str) -> dict[tuple[str, str], list[float]]:
    """Return each rule's exact mean number of tokens per pass, in each instance of a family."""
    sampling = Sampling(1.0, 0, 1.0)
    tokens: dict[tuple[str, str], list[float]] = {case: [] for case in RULES}
    for seed in range(INSTANCES):
        tables = Tables(seed, family)
        found = {kind: drafts(tables, config, sampling) for kind, config in SMALL.items()}
        for kind, rule in RULES:
            tokens[kind, rule].append(one_pass(found[kind], sampling, rule).tokens)
    return tokens


def exact() -> None:
    """Print the first table, and how often one rule accepted at least as much as another."""
    tokens = {family: enumerated(family) for family in FAMILIES}
    cells = {case: [f"{sum(tokens[f][case]) / INSTANCES:.4f}" for f in FAMILIES] for case in RULES}
    show(f"Exact tokens per pass, mean of {INSTANCES} instances", list(FAMILIES), cells)
    print()
    for less, more in ORDER:
        pairs = [pair for family in FAMILIES for pair in zip(tokens[family][less], tokens[family][more], strict=True)]
        held = sum(low <= high + EXACT for low, high in pairs)
        print(f"{' / '.join(more)} >= {' / '.join(less)}: {held} of {len(pairs)} instances")


def measured(run: str) -> None:
    """Print the second table."""
    folder = resolve_head(run)
    target = Target.load(target_path(read_config(folder)["target"]["name"]))
    head: Any = load_head(folder, target.embeddings, target.spec).to(device=target.device, dtype=target.dtype).eval()
    prompts = load_workload("tiny", target, PROMPTS, truncate=True)
    cells = {}
    for kind, rule in RULES:
        row = []
        for temperature in TEMPERATURES:
            runs = [
                speculate(
                    target,
                    HeadDrafter(head, LARGE[kind], "head"),
                    prompt.token,
                    RequestParams(TOKENS, Sampling(temperature, 0, 1.0), seed=seed, rule=rule),
                )
                for prompt in prompts
                for seed in range(SEEDS)
            ]
            low, high = tau_interval(runs, 0) or (0.0, 0.0)
            row.append(f"{acceptance(runs).tau:.2f} [{low:.2f}, {high:.2f}]")
        cells[kind, rule] = row
    size = f"{PROMPTS} prompts x {SEEDS} seeds x {TOKENS} tokens"
    show(f"Tokens a pass of {run}, {size}", [f"T={temperature:g}" for temperature in TEMPERATURES], cells)


if __name__ == "__main__":
    exact()
    if len(sys.argv) > 1:
        measured(sys.argv[1])
