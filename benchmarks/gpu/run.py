"""All that benchmarks/gpu.md waits for, measured on a device that is at hand for minutes, what matters most first.

    python benchmarks/gpu/run.py --out OUT [--earlier FOLDER] [--minutes 9.5] [--items 1 2 …] [--again] [--toy]
        [--pieces NAME …]

The pieces of items.py run one after another in a process of their own (pieces.py). It is ended where a piece takes
longer than its seconds or an item longer than its minutes, and another one goes on behind that: so a crash or a hang
costs one piece. OUT/gpu.json and OUT/gpu.md are written after every piece; OUT/log.txt has what was printed, and
OUT/trace_….json.gz the profiles, for Perfetto.

The same command goes on where the last one stopped; --earlier names the folder of gpu.json where OUT begins empty.
A piece that failed is tried again with --again alone. --work keeps what pieces need of each other: heads, a target.
With --toy everything runs on a CPU, at a size at which figures mean nothing; --scale stretches the limits.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.gpu import results
from benchmarks.gpu.items import ITEMS, START, named

POLL = 0.2  # seconds
TAIL = 1500  # characters of the log that a failed piece keeps
DONE, SPENT = "done", "the minutes of its item, or of this call, are spent"


class Driver:
    """One call: the pieces that are left, the seconds that each item has taken, and the process at work."""

    def __init__(self, options: argparse.Namespace, command: list[str]) -> None:
        self.options, self.command = options, command
        self.end = time.monotonic() + 60 * options.minutes
        self.left: list[str] = asked(options)
        self.spent = defaultdict[int, float](float)
        self.status: Path = options.work / "status.json"
        self.facts: Path = options.work / "facts.json"  # which a process writes when it has imported all
        self.facts.unlink(missing_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Run what is left, in as many processes as it takes.

        Raises:
            SystemExit: a process ends before it begins, and so would all others.
        """
        while self.left and time.monotonic() < self.end:
            write_status(self.status, self.left[0])
            self.start()
            try:
                name, why = self.watch()
            finally:
                self.stop()
            if why == DONE:
                return
            if why != SPENT and not self.facts.is_file():
                raise SystemExit(f"nothing can be measured: {why}\n{self.log()}")
            item, behind = named()[name][0], self.left[self.left.index(name) + 1 :]
            if why != SPENT:
                self.fail(name, why)
            self.left = [other for other in behind if why != SPENT or named()[other][0] != item]

    def start(self) -> None:
        """Start a process for the pieces that are left."""
        path = os.pathsep.join([str(ROOT / "carried"), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (self.options.out / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, *self.left], cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def stop(self) -> None:
        """End the process, and all that it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def watch(self) -> tuple[str, str]:
        """Wait; return the piece at work when the process ended or had to, and why."""
        assert self.process is not None
        before, first = time.monotonic(), list[str]()
        while True:
            time.sleep(POLL)
            code, (name, began) = self.process.poll(), read_status(self.status)
            (item, piece), now = named()[name], time.monotonic()
            first += [name] if name not in first and len(first) < 2 else []  # the first may be done, and left out
            self.spent[item] += now - before
            before = now
            limit = self.options.scale * (piece.seconds + (START if name in first else 0))
            if code is not None:
                return name, f"its process ended with status {code}" if code else DONE
            if time.time() - began > limit:
                return name, f"took longer than its {limit:g} s"
            if self.spent[item] > 60 * self.options.scale * ITEMS[item - 1].minutes or now > self.end:
                return name, SPENT

    def fail(self, name: str, why: str) -> None:
        """Record that a piece failed, and the end of what was printed."""
        facts = json.loads(self.facts.read_text(encoding="utf-8"))
        results.keep(self.options.out, name, facts | {"failed": why, "log": self.log()})
        print(f"{name}: {why}", flush=True)

    def log(self) -> str:
        """Return the end of what was printed."""
        return (self.options.out / "log.txt").read_text(encoding="utf-8", errors="replace")[-TAIL:]


def asked(options: argparse.Namespace) -> list[str]:
    """Return the pieces that a call asks for, in its order or that of the items."""
    return options.pieces or [name for name, (item, _) in named().items() if item in options.items]


def write_status(file: Path, name: str) -> None:
    """Note which piece is at work, and since when."""
    results.write(file, json.dumps([name, time.time()]))


def read_status(file: Path) -> tuple[str, float]:
    """Return which piece is at work, and since when."""
    name, began = json.loads(file.read_text(encoding="utf-8"))
    return str(name), float(began)


def ended(_number: int, _frame: FrameType | None) -> None:
    """End as an error does, so that the process at work is ended too."""
    raise SystemExit(1)


def main() -> int:
    """Run the pieces that are left; return how many of those asked for are not measured."""
    parser = argparse.ArgumentParser(description="All that benchmarks/gpu.md waits for.")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu", help="folder of gpu.json and gpu.md")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "gpu-work", help="folder of what pieces make")
    parser.add_argument("--earlier", type=Path, help="folder of the gpu.json to go on with, where OUT has none")
    parser.add_argument("--minutes", type=float, default=9.5, help="after which nothing goes on")
    parser.add_argument("--items", type=int, nargs="+", default=range(1, len(ITEMS) + 1))
    parser.add_argument("--pieces", nargs="+", choices=list(named()), metavar="NAME", help="these alone, in this order")
    parser.add_argument("--again", action="store_true", help="try what failed once more")
    parser.add_argument("--text", type=Path, help="folder of text for the target of 94 M (text.py)")
    parser.add_argument("--toy", action="store_true", help="a size for a CPU, of which no figure means anything")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all limits")
    options = parser.parse_args()
    for name in ("out", "work", "text"):  # the process at work runs in the checkout
        setattr(options, name, getattr(options, name) and getattr(options, name).resolve())
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    if options.earlier and not (options.out / "gpu.json").exists():
        shutil.copy(options.earlier / "gpu.json", options.out)
    signal.signal(signal.SIGTERM, ended)
    command = [sys.executable, str(Path(__file__).with_name("pieces.py")), str(options.out), str(options.work)]
    command += ["--text", str(options.text)] if options.text else []
    command += [f"--{flag}" for flag in ("again", "toy") if getattr(options, flag)]
    Driver(options, [*command, "--pieces"]).run()
    entries = results.read(options.out)
    missing = [name for name in asked(options) if "rows" not in entries.get(name, {})]
    print(f"{options.out / 'gpu.md'}; not measured: {', '.join(missing) or 'nothing'}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
