"""Whether the probe of a target tells a wrong mask from rounding: faults planted in trees' masks and positions.

    python benchmarks/masks.py [FOLDER …] [--families NAME …] [--dtypes float32 bfloat16] [--seeds N]

A row for each model of a folder and each toy of a family, in each dtype: the largest relative difference between the
hidden states of a tree's or a batch's pass and those of its sequences alone, as it is and with each planted fault, of
which the least is shown. The probe takes up to `TOLERANCE`. Further seeds draw other weights of a toy.
"""

import argparse
import itertools
import sys
from pathlib import Path
from unittest import mock

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import transformers
from transformers import AutoModelForCausalLM

from inference.target import probe
from inference.target.target import Target
from tests import families, masks, toys


def difference(target: Target) -> float:
    """Return the largest difference that the probe sees, in all of its comparisons of hidden states."""
    seen = [0.0]

    def note(actual: torch.Tensor, expected: torch.Tensor) -> bool:
        ratio = (actual.float() - expected.float()).norm(dim=-1) / expected.float().std(-1, False)
        seen.append(float(ratio.max()) / expected.shape[-1] ** 0.5)
        return True

    with mock.patch.object(probe, "_close", note), mock.patch.object(probe, "_check_logits"):
        probe.check(target)
    return max(seen)


def row(target: Target) -> str:
    """Return a target's cells: the difference as it is, and the least of those with a fault."""
    found = {}
    for fault in masks.faults_of(target):
        with masks.planted(fault):
            found[fault] = difference(target)
    refused = sum(value >= probe.TOLERANCE for value in found.values())
    least = min(found, key=found.__getitem__)
    return f"{difference(target):.3f} | {found[least]:.3f} ({least}) | {refused} of {len(found)}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Whether the probe tells a wrong mask from rounding.")
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--families", nargs="*", default=[])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print("| target | dtype | right | least of the faults | refused |\n| --- | --- | --- | --- | --- |")
    for dtype in asked.dtypes:
        for folder in asked.folders:
            print(f"| {Path(folder).name} | {dtype} | {row(Target.load(folder, dtype, 'cpu'))} |", flush=True)
        for name, seed in itertools.product(asked.families, range(asked.seeds)):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(families.config(name)).to(getattr(torch, dtype))
            print(f"| {name} {seed} | {dtype} | {row(Target(model, toys.tokenizer(), name))} |", flush=True)


if __name__ == "__main__":
    main()
