"""An estimate of a decoding step on an H100 at the shape of an 8B, from counted operations and bytes: nothing is timed.

    python benchmarks/h100_estimate.py

Operations are those of the static step on the embedded target, whose layers are as an 8B's (benchmarks/step_counts.py);
bytes are those of weights and caches that a step reads. Every other number is an assumption that stands below.
"""

import sys
from pathlib import Path
from typing import NamedTuple

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.step_counts import TREES, batch_of_size, counted, embedded, head_of
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Plain

BANDWIDTH, PRODUCTS = 2.85e12, 620e12  # bytes/s and bf16 operations/s that an H100 achieves
LAUNCH, KERNEL, READ = 5.5e-6, 2.0e-6, 12e-6  # seconds of a launch by the host, of a small kernel, of a read
LAYERS, WEIGHTS, ENTRY = 32, 15.0e9, 131_072  # Llama-3.1-8B in bf16, its lm_head in it; bytes, of an entry of the cache
HEAD, HEAD_LM = 2 * 243e6, 2 * 32_000 * 4_096  # an EAGLE-3 head and its lm_head, bytes
LARGE, FUSED = 8, 7  # a layer's products and its attention, priced by bytes; small kernels of a compiled layer
CONTEXT = 1024


class Cost(NamedTuple):
    """Counts of a step's stages, and how much they read."""

    draft: int
    layer: float
    verify: int
    other: int
    levels: int
    rows: int


def seconds(cost: Cost, batch: int, way: str) -> dict[str, float]:
    """Return the seconds of draft, pass and the rest: run by the host, captured, or captured and compiled."""
    small = LAYERS * (FUSED if way == "compiled" else cost.layer - LARGE) + cost.verify
    read = WEIGHTS + batch * (CONTEXT + cost.rows) * ENTRY
    products = 2 * (WEIGHTS / 2) * batch * cost.rows
    stages = {
        "draft": (cost.draft, cost.levels * (HEAD + HEAD_LM) / BANDWIDTH),
        "verify": (small, max(read / BANDWIDTH, products / PRODUCTS)),
        "other": (cost.other, 0.0),
    }
    spent = {name: kernels * KERNEL + work for name, (kernels, work) in stages.items()}
    if way == "eager":  # the host launches one kernel after another, products too
        launches = {name: kernels for name, (kernels, _) in stages.items()}
        launches["verify"] += LAYERS * LARGE
        spent = {name: max(launches[name] * LAUNCH, device) for name, device in spent.items()}
    return spent | {"other": spent["other"] + READ}


def main() -> None:
    """Count and print."""
    target = embedded()
    depth = target.config.num_hidden_layers
    head = head_of("eagle3", target)
    cases = [("plain", 1, None, 1.0), ("dynamic, depth 5, 60 nodes", 1, 61, 4.0), ("plain", 32, None, 1.0)]
    cases += [("chain of 4", 32, 5, 2.8)]
    print(f"{'':30}{'batch':>6}{'way':>10}{'draft':>8}{'verify':>8}{'other':>7}{'ms':>8}{'tokens/s':>10}{'at tau':>8}")
    for name, batch, rows, tau in cases:
        source = Plain(target.device) if rows is None else HeadDrafter(head, TREES[name], name)
        parts, _ = counted(batch_of_size(target, source, 1))
        layer = (parts["verify"] - 12) / depth  # 12 operations of a pass belong to no layer
        levels = 0 if rows is None else TREES[name].depth + 1
        cost = Cost(parts["draft"], layer, 12, parts["other"], levels, rows or 1)
        for way in ("eager", "captured", "compiled"):
            spent = seconds(cost, batch, way)
            whole = sum(spent.values())
            figures = "".join(
                f"{1e3 * spent[kind]:{width}.2f}" for kind, width in (("draft", 8), ("verify", 8), ("other", 7))
            )
            print(f"{name:30}{batch:6}{way:>10}{figures}{1e3 * whole:8.2f}{batch * tau / whole:10,.0f}{tau:8}")


if __name__ == "__main__":
    main()
