"""How often the forecast's interval holds what came out later, on recorded learning curves of heads on small targets.

    python benchmarks/forecast.py [benchmarks/forecast_curves.jsonl]

A line of the file has the tokens and passes of every prompt at every length of one head's training: greedy chains to
depth 5, each length a whole training that branches off at a constant rate. The later points are forecast from the first
three and more. The prompts are halved at random, six times: one half measures the earlier points, the other says what
came out.
"""

import itertools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np

from ops.budget import LEVEL, predict

LEAST = 3  # points that a forecast is made from
HALVINGS = 6


CURVES = ROOT / "benchmarks" / "forecast_curves.jsonl"


def forecasts(file: Path, halvings: int) -> dict[str, list[tuple[float, float, float, float]]]:
    """Return by target and seed the forecast, the ends of its interval and what came out."""
    groups: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in map(json.loads, file.read_text().splitlines()):
        tokens = [float(point["tokens"]) for point in row["points"]]
        counts = np.array(
            [point["counts"] for point in row["points"]], dtype=float
        )  # points, prompts, (tokens, passes)
        for halving, seen in itertools.product(range(halvings), range(LEAST, len(tokens))):
            order = np.random.default_rng(halving).permutation(counts.shape[1])
            mine, others = counts[:seen, order[: len(order) // 2]], counts[:, order[len(order) // 2 :]].sum(1)
            tau = mine[..., 0].sum(1) / mine[..., 1].sum(1)
            residual = mine[..., 0] - tau[:, None] * mine[..., 1]
            error = np.sqrt((residual**2).sum(1) * mine.shape[1] / (mine.shape[1] - 1)) / mine[..., 1].sum(1)
            for at in range(seen, len(tokens)):
                told = predict(tokens[:seen], list(tau), list(error), tokens[at], float(row["bound"]))
                case = (*told, others[at, 0] / others[at, 1])
                groups.setdefault(f"{row['target']}, seed {row['seed']}", []).append(case)
    return groups


def main() -> None:
    """Print by target and seed how often the interval holds what came out, its width and the forecast's error."""
    groups = forecasts(Path(sys.argv[1]) if sys.argv[1:] else CURVES, HALVINGS)
    print(f"| curves | forecasts | within the {LEVEL:.0%} interval | above it | below it | width / τ | forecast / τ |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, cases in {**groups, "all": list(itertools.chain(*groups.values()))}.items():
        middle, low, high, came = np.array(cases).T
        above, below = np.mean(came > high), np.mean(came < low)
        width, ratio = np.mean((high - low) / came), np.mean(middle / came)
        shares = f"{1 - above - below:.0%} | {above:.0%} | {below:.0%}"
        print(f"| {name} | {len(cases)} | {shares} | {width:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
