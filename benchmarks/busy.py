"""Training on a CPU alone and next to endless loops, by how OpenMP's threads wait, and with one thread.

    python benchmarks/busy.py [--loops 1] [--repeats 3] [trainer.steps=100 head=mtp …]

Every run is `train/run.py` on the bundled target in a process of its own. The variants take turns within a round, so
that other work on the machine hits all alike; it still has to be quiet, since each further process is one more loop.
Seconds are those of the training's steps, as training.json has them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# libgomp, torch's on Linux, reads these as it is loaded: a command cannot set them for itself.
VARIANTS = {
    "as it is": {},
    "GOMP_SPINCOUNT=100000": {"GOMP_SPINCOUNT": "100000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
SHORT = ["head=mtp", "trainer.steps=100", "trainer.eval_prompts=0", "eval.prompts=0"]


def seconds(variant: dict[str, str], loops: int, overrides: list[str]) -> float:
    """Return the seconds of a training's steps, next to N endless loops."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        with tempfile.TemporaryDirectory() as out:
            words = [sys.executable, str(ROOT / "train" / "run.py"), *SHORT, *overrides, f"out={out}/run"]
            subprocess.run(words, cwd=ROOT, env={**kept, **variant}, stdout=subprocess.DEVNULL, check=True)
            return float(json.loads(Path(out, "run", "training.json").read_text())["seconds"])
    finally:
        for loop in busy:
            loop.kill()
            loop.wait()


def main() -> None:
    """Measure, and print a row for each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=1, help="endless loops; fewer than cores")
    parser.add_argument("--repeats", type=int, default=3)
    asked, overrides = parser.parse_known_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the first run, {asked.loops} loops")
    taken: dict[tuple[str, int], list[float]] = {(name, n): [] for n in (0, asked.loops) for name in VARIANTS}
    for _ in range(asked.repeats):
        for (name, loops), runs in taken.items():
            runs.append(seconds(VARIANTS[name], loops, overrides))
    for name in VARIANTS:
        quiet, busy = (statistics.median(taken[name, loops]) for loops in (0, asked.loops))
        print(f"{name:24} alone {quiet:6.1f} s, next to the loops {busy:6.1f} s, {busy / quiet:.2f} times")


if __name__ == "__main__":
    main()
