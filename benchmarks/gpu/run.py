"""Everything that benchmarks/gpu.md shows, measured anew: each script in a process of its own, then the page.

    python benchmarks/gpu/run.py --out outputs/gpu --text FOLDER [--only smoke target embedded heads …]

TEXT is what a target is trained on (see target.py). A script that fails is named at the end, and the others run all the
same; each can be run by itself, and the page made of what is there (report.py). --toy runs all of it on a CPU, at a
size of which no figure means anything, and writes OUT/gpu.md.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.gpu import report

HERE = ROOT / "benchmarks" / "gpu"
USUAL = [name for name in report.TITLES if name != "embedded"]  # which the repository holds
HOURS = 12  # that nothing here takes; scripts that can stop and go on are not to stop


def words_of(name: str, asked: argparse.Namespace) -> list[str]:
    """Return the command of one script."""
    script = "target" if name == "embedded" else name
    words = [sys.executable, str(HERE / f"{script}.py"), "--out", str(asked.out), *(["--toy"] if asked.toy else [])]
    words += ["--device", asked.device] if asked.device else []
    words += ["--text", str(asked.text)] if name == "target" and asked.text else []
    words += ["--size", "embedded"] if name == "embedded" else []
    words += ["--minutes", str(60 * HOURS)] if name in ("heads", "decoding") else []
    return words


def main() -> int:
    """Run what is asked for; return how many scripts failed."""
    parser = argparse.ArgumentParser(description="Everything that benchmarks/gpu.md shows, measured anew.")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--only", nargs="+", choices=list(report.TITLES), default=USUAL)
    parser.add_argument("--text", type=Path, help="folder of the text that a target is trained on")
    parser.add_argument("--device")
    parser.add_argument("--toy", action="store_true")
    asked = parser.parse_args()
    failed = []
    for name in asked.only:
        words = words_of(name, asked)
        print(f"\n$ {shlex.join(['python', *words[1:]])}", flush=True)
        if subprocess.run(words, check=False).returncode:
            failed.append(name)
    try:
        report.write(asked.out, asked.out / "gpu.md" if asked.toy else report.PAGE)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        failed.append("report")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
