"""Where a training step's time goes, and whether its memory stays flat.

    python benchmarks/steps.py [--steps 1000] [head=… trainer.…=…]

1. Seconds by part on the default run of the bundled target, and on a larger one: a random target of 110M parameters.
2. Memory of the process, sampled while it takes tiny steps: its slope after the first hundred, and over the last half.
   At first it grows, since oneDNN keeps what it has made for the last 1,024 shapes, and the heap finds its size.

Every run is `train/run.py` in a process of its own; what it writes to metrics.jsonl is read.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch

from benchmarks.engine import random_target
from eval.measures.machine import device_facts
from train.step import PARTS

STEP = ("data", "target", "head", "optimiser")
PAGE = 4096
TINY = ["data.length=64", "trainer.batch_tokens=128", "trainer.micro_tokens=128", "data.limit=400"]
QUIET = ["trainer.eval_prompts=0", "eval.prompts=0"]
LARGE = ["trainer.batch_tokens=1024", "trainer.micro_tokens=1024", "trainer.steps=12"]


def started(out: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start a run."""
    words = [sys.executable, str(ROOT / "train" / "run.py"), f"out={out}", *QUIET, *overrides]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finished(job: subprocess.Popen[str]) -> None:
    """Wait for a run that must succeed."""
    _, said = job.communicate()
    if job.returncode != 0:
        sys.exit(said)


def records(out: Path) -> list[dict[str, Any]]:
    """Return the records of the steps, without the first ones, in which operations are counted and memory is new."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [each for each in found if "loss" in each][3:]


def show(title: str, found: list[dict[str, Any]]) -> None:
    """Print the medians of a run's parts."""
    step = statistics.median(each["step_seconds"] for each in found)
    print(f"\n{title}: {1e3 * step:.1f} ms a step, median of {len(found)}")
    for part in PARTS:
        spent = statistics.median(each["seconds"][part] for each in found)
        print(f"  {part:10s} {1e3 * spent:8.2f} ms  {spent / step:6.1%}")
    rest = statistics.median(1 - sum(each["seconds"][part] for part in STEP) / each["step_seconds"] for each in found)
    print(f"  outside data, target, head and optimiser: {rest:.1%}")


def resident(process: int) -> int:
    """Return the bytes of memory that a process holds."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE


def memory(out: Path, steps: int, overrides: list[str]) -> None:
    """Take many tiny steps and print how memory grew."""
    job = started(out, *TINY, f"trainer.steps={steps}", f"trainer.save_every={steps}", *overrides)
    found: list[tuple[int, int]] = []
    while job.poll() is None:
        time.sleep(0.1)
        file = out / "metrics.jsonl"
        done = file.read_bytes().count(b"\n") if file.exists() else 0
        if 100 < done < steps:
            found.append((done, resident(job.pid)))
    finished(job)
    print(f"\nmemory over {steps} tiny steps")
    for start in (100, steps // 2):
        xs, ys = zip(*[(x, y / 2**20) for x, y in found if x > start], strict=True)
        slope = 1e3 * statistics.linear_regression(xs, ys).slope
        print(f"  from step {xs[0]}, {ys[0]:.1f} MiB, to {xs[-1]}, {ys[-1]:.1f} MiB: {slope:.2f} MiB in 1,000 steps")
    peaks = [each["memory_bytes"] / 2**20 for each in records(out)]
    print(f"  peak: {peaks[97]:.1f} MiB at step 101, {peaks[-1]:.1f} MiB at the end")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Where a training step's time goes, and whether its memory stays flat."
    )
    parser.add_argument("--steps", type=int, default=1000, help="of the run whose memory is watched")
    parser.add_argument("overrides", nargs="*", help="of every run")
    asked = parser.parse_args()
    print(device_facts(torch.device("cpu"), torch.float32))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finished(started(folder / "default", "trainer.steps=60", *asked.overrides))
        show("the default run, tiny target", records(folder / "default"))
        target = random_target("float32")
        target.model.save_pretrained(folder / "target")
        target.tokenizer.save_pretrained(folder / "target")
        finished(started(folder / "large", f"model.path={folder / 'target'}", *LARGE, *asked.overrides))
        show("a random target of 110M parameters", records(folder / "large"))
        memory(folder / "flat", asked.steps, asked.overrides)


if __name__ == "__main__":
    main()
