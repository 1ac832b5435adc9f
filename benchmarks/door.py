"""How long the door takes: from typing to a command's first line, to a refusal, to the plan of a preset.

    python benchmarks/door.py [REPEATS]

Each command runs REPEATS times (5), in turns. Prints a Markdown table: the least, the median and the greatest wall
seconds and CPU seconds, and whether the median is within the bar; exits with 1 where one is not. On a machine that does
other work too the wall clock shows that; a command that is within its bar by its CPU seconds alone is marked and no
failure. A command of which the first line counts is ended after it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TRAIN, EVAL = "train/run.py", "eval/run.py"
PRESET = "experiment=eagle3_llama70b_2x8x80"


class Door(NamedTuple):
    """A command, whether its first line counts in place of its end, and the seconds that it may take."""

    what: str
    words: tuple[str, ...]
    first_line: bool
    bar: float


FIRST_LINE, REFUSAL, PLAN = 2.5, 3.0, 5.0  # seconds
DOORS = (
    Door("first line of a training", (TRAIN, "trainer=debug"), True, FIRST_LINE),
    Door("first line of --help", (TRAIN, "--help"), True, FIRST_LINE),
    Door("a misspelt key", (TRAIN, "trainer.stesp=3"), False, REFUSAL),
    Door("a value out of range", (TRAIN, "trainer.lr=nan"), False, REFUSAL),
    Door("data that is missing", (TRAIN, "data.path=/missing", "plan=true"), False, REFUSAL),
    Door("a run that is missing", (EVAL, "run=/missing"), False, REFUSAL),
    Door("plan=true of a preset", (TRAIN, PRESET, "plan=true"), False, PLAN),
)


def timed(door: Door) -> tuple[float, float]:
    """Return the wall and CPU seconds of one run, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, str(ROOT / door.words[0]), *door.words[1:]],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        if door.first_line:
            process.stdout.readline()
            wall = time.perf_counter() - begun
            process.kill()
        else:
            process.stdout.read()
            wall = time.perf_counter() - begun
        process.stdout.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return wall, usage.ru_utime + usage.ru_stime


def shown(seconds: list[float]) -> str:
    """Return the least, the median and the greatest."""
    return f"{min(seconds):.2f} / {statistics.median(seconds):.2f} / {max(seconds):.2f}"


def verdict(bar: float, wall: list[float], cpu: list[float]) -> str:
    """Return whether the median is within the bar: pass, busy where by the CPU's clock alone, or FAIL."""
    if statistics.median(wall) <= bar:
        return "pass"
    return "busy" if statistics.median(cpu) <= bar else "FAIL"


def main() -> None:
    """Measure all commands in turns, and print the table."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    rounds = [[timed(door) for door in DOORS] for _ in range(repeats)]
    print("| from typing to | command | wall s, min / median / max | CPU s, min / median / max | bar s | verdict |")
    print("| --- | --- | --- | --- | ---: | --- |")
    verdicts = []
    for door, runs in zip(DOORS, zip(*rounds, strict=True), strict=True):
        wall, cpu = (list(column) for column in zip(*runs, strict=True))
        verdicts.append(verdict(door.bar, wall, cpu))
        numbers = f"{shown(wall)} | {shown(cpu)} | {door.bar:g} | {verdicts[-1]}"
        print(f"| {door.what} | `{' '.join(door.words)}` | {numbers} |")
    if "FAIL" in verdicts:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
