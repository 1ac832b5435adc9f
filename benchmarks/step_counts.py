"""Operations and host reads of one decoding step, by part; they depend on no width and no device.

    python benchmarks/step_counts.py [--head eagle3] [--batches 1 8 32]

The device step in static shapes, as an accelerator runs it, on the bundled target with a head of random weights. An
operation is a call that launches something: views are none.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heads import HEADS, head_config
from inference.batch import Batch, batch_of
from inference.decode import RequestParams
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from inference.drafters.policy import TreeConfig
from inference.protocol import Drafter
from inference.request import PhaseTimer
from inference.target.target import Target
from inference.verification.sample import GREEDY

TREES = {
    "chain of 4": TreeConfig("chain", 4, 0, 0, [], []),
    "dynamic, depth 5, 60 nodes": TreeConfig("dynamic", 5, 10, 60, [], []),
    "best first, depth 5, 60 nodes": TreeConfig("best_first", 5, 0, 60, [], []),
}
READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero")


class Launches(TorchDispatchMode):
    """Counts the operations that launch something."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        self.total += not func.is_view
        return func(*args, **(kwargs or {}))


class Counting(PhaseTimer):
    """Counts operations where others count seconds."""

    def __init__(self, launches: Launches) -> None:
        super().__init__(torch.device("cpu"))
        self.launches, self.before, self.parts = launches, 0, Counter[str]()

    def mark(self, ended: str | None) -> None:
        """End a part."""
        self.parts[ended or ""] += self.launches.total - self.before
        self.before = self.launches.total


def counted(batch: Batch) -> tuple[Counter[str], int]:
    """Return the operations of one step by part, and how often the host reads."""
    step: Any = batch.device_step
    step.fixed_shapes = True
    batch.step()
    reads, original = Counter[str](), {name: getattr(Tensor, name) for name in READS}
    for name, function in original.items():
        setattr(Tensor, name, lambda *args, _f=function, _n=name, **kw: (reads.update([_n]), _f(*args, **kw))[1])
    launches = Launches()
    parts = Counting(launches)
    try:
        with patch("inference.step.PhaseTimer", lambda _: parts), launches:
            batch.step()
    finally:
        for name, function in original.items():
            setattr(Tensor, name, function)
    parts.mark("other")
    return parts.parts, reads.total()


def embedded() -> Target:
    """Return the bundled target in fp32, on the CPU."""
    return Target.load(str(ROOT / "examples" / "tiny"), dtype="float32", device="cpu")


def head_of(kind: str, target: Target) -> Any:
    """Return a head of random weights, as its YAML configures it."""
    values = yaml.safe_load((ROOT / "conf" / "head" / f"{kind}.yaml").read_text(encoding="utf-8"))
    values = {name: 512 if name == "length" else value for name, value in values.items() if name != "training"}
    return HEADS[kind](head_config(values), target.embeddings).eval()


def batch_of_size(target: Target, source: Drafter, size: int) -> Batch:
    """Return a full batch."""
    requests = [(list(range(1, 12 + slot)), RequestParams(64, GREEDY)) for slot in range(size)]
    batch = batch_of(target, source, size, requests)
    for number, request in enumerate(requests):
        batch.admit(number, *request)
    return batch


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description="Operations and host reads of one decoding step.")
    parser.add_argument("--head", default="eagle3", choices=list(HEADS))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    asked = parser.parse_args()
    target = embedded()
    head = head_of(asked.head, target)
    sources: dict[str, Drafter] = {"baseline": Baseline(target.device)}
    sources |= {name: HeadDrafter(head, tree, name) for name, tree in TREES.items()}
    print(f"{'':32}{'batch':>6}{'draft':>7}{'verify':>8}{'other':>7}{'all':>6}{'reads':>7}")
    for name, source in sources.items():
        for size in asked.batches:
            parts, reads = counted(batch_of_size(target, source, size))
            kinds = [parts[kind] for kind in ("draft", "verify", "other")]
            print(f"{name:32}{size:6}{kinds[0]:7}{kinds[1]:8}{kinds[2]:7}{sum(kinds):6}{reads:7}", flush=True)


if __name__ == "__main__":
    main()
