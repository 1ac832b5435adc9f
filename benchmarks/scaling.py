"""Throughput of two processes over that of one, of one thread each, with the same global batch.

    python benchmarks/scaling.py [--steps 12] [--processes 2] [head=… trainer.…=…]

The target is a random one of 110M parameters, so that what is computed outweighs what the processes tell each other.
The runs are `train/run.py` by `launcher.num_processes`; medians of what metrics.jsonl says are compared. Each process
needs a core to itself: run it on an idle machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch

from benchmarks.engine import random_target
from benchmarks.steps import QUIET, records
from eval.measures.machine import device_facts
from train.step import PARTS

TOKENS = 2048
SAME = [f"trainer.batch_tokens={TOKENS}", "model.device=cpu", "model.dtype=float32", "trainer.precision=fp32", *QUIET]


def trained(out: Path, processes: int, overrides: list[str]) -> list[dict[str, Any]]:
    """Run and return the records of the steps."""
    words = [sys.executable, str(ROOT / "train" / "run.py"), f"out={out}", f"launcher.num_processes={processes}"]
    share = [f"trainer.micro_tokens={TOKENS // processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, *SAME, *share, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return records(out)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Throughput of several processes over that of one.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="of every run")
    asked = parser.parse_args()
    print(device_facts(torch.device("cpu"), torch.float32))
    rates = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = random_target("float32")
        target.model.save_pretrained(folder / "target")
        target.tokenizer.save_pretrained(folder / "target")
        overrides = [f"model.path={folder / 'target'}", f"trainer.steps={asked.steps}", *asked.overrides]
        for processes in (1, asked.processes):
            found = trained(folder / str(processes), processes, overrides)
            rates[processes] = statistics.median(each["tokens_per_second"] for each in found)
            parts = {part: statistics.median(each["seconds"][part] for each in found) for part in PARTS}
            told = ", ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in parts.items())
            print(f"{processes} processes: {rates[processes]:.0f} tokens/s, median of {len(found)} steps; ms in {told}")
    print(f"{asked.processes} over 1: {rates[asked.processes] / rates[1]:.2f}")


if __name__ == "__main__":
    main()
