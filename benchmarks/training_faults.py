"""What may befall a training run, done to one that is started, stopped and resumed as a user would.

    python benchmarks/training_faults.py [NUMBER…]

After each the run must go on bit for bit where it can, and otherwise end in one line. About 10 minutes.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 24
RUN = [
    sys.executable, str(ROOT / "train" / "run.py"), "out=out", "eval.prompts=0", f"trainer.steps={STEPS}",
    "trainer.batch_tokens=512", "trainer.micro_tokens=256", "data.length=128", "trainer.eval_every=8",
    "trainer.eval_prompts=1", "trainer.eval_tokens=8", "trainer.save_every=4", "trainer.ema=0.9", "trainer.keep=3",
]  # fmt: skip


def start(folder: Path, *words: str, limit: str = "-n 1024") -> subprocess.Popen[str]:
    """Start a run in a folder, under a limit of bash's ulimit."""
    return subprocess.Popen(
        ["bash", "-c", f'ulimit {limit}; exec "$@"', "", *RUN, *words], cwd=folder, stdin=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def losses(folder: Path) -> dict[int, tuple[str, ...]]:
    """Return what was logged of each step: its losses, and its τ where it was measured."""
    found: dict[int, tuple[str, ...]] = {}
    for line in (folder / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        kept = {key: record[key] for key in ("loss", "accuracy", "tau") if key in record}
        found[record["step"]] = (*found.get(record["step"], ()), json.dumps(kept))
    return found


def stopped(folder: Path, step: int, sign: signal.Signals) -> None:
    """Start a run and stop it at a step."""
    job, metrics = start(folder), folder / "out" / "metrics.jsonl"
    while job.poll() is None and (not metrics.exists() or f'"step": {step},' not in metrics.read_text()):
        time.sleep(0.02)
    job.send_signal(sign)
    job.communicate(timeout=120)


def newest(folder: Path) -> Path:
    """Return the newest checkpoint."""
    return max((folder / "out" / "checkpoints").glob("step-*"))


def cut(path: Path) -> None:
    """Leave half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def every(folder: Path, change: Callable[[Path], None]) -> None:
    """Change the largest file of every checkpoint."""
    for checkpoint in (folder / "out" / "checkpoints").glob("step-*"):
        change(largest(checkpoint))


def largest(folder: Path) -> Path:
    """Return the largest file."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def appended(folder: Path, text: bytes) -> None:
    """Append to the metrics."""
    with (folder / "out" / "metrics.jsonl").open("ab") as file:
        file.write(text)


def linked(folder: Path) -> None:
    """Let the head's folder be a link."""
    shutil.move(folder / "out" / "head", folder / "elsewhere")
    (folder / "out" / "head").symlink_to(folder / "elsewhere")


def nothing(_: Path) -> None:
    """Leave all as it is."""


def replaced(folder: Path) -> None:
    """Let the newest checkpoint be a file."""
    path = newest(folder)
    shutil.rmtree(path)
    path.write_text("x")


KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
# What is done: the step and the signal, the change to what is left, the words of the resumption, whether it must go on.
FAULTS: list[tuple[str, int, signal.Signals, Callable[[Path], object], list[str], bool]] = [
    ("killed before the first checkpoint", 2, KILL, nothing, [], True),
    ("killed after the best step", 9, KILL, nothing, [], True),
    ("interrupted", 7, INT, nothing, [], True),
    ("ended by SIGTERM", 11, TERM, nothing, [], True),
    ("newest checkpoint cut", 14, KILL, lambda f: cut(largest(newest(f))), [], True),
    ("newest checkpoint without its state", 14, KILL, lambda f: newest(f).joinpath("state.json").unlink(), [], True),
    ("newest checkpoint a file", 14, KILL, replaced, [], True),
    ("all checkpoints cut", 14, KILL, lambda f: every(f, cut), [], False),
    ("checkpoints gone", 14, KILL, lambda f: shutil.rmtree(f / "out" / "checkpoints"), [], True),
    ("head gone", 14, KILL, lambda f: shutil.rmtree(f / "out" / "head"), [], True),
    ("head cut", 14, KILL, lambda f: cut(f / "out" / "head" / "model.safetensors"), [], True),
    ("head a link", 14, KILL, linked, [], True),
    ("metrics cut in a line", 14, KILL, lambda f: appended(f, b'{"step": 15, "lo'), [], True),
    ("metrics with NUL bytes", 14, KILL, lambda f: appended(f, bytes(4096) + b"\n"), [], True),
    ("metrics with a list", 14, KILL, lambda f: appended(f, b"[1, 2]\n\n"), [], True),
    ("metrics gone", 14, KILL, lambda f: (f / "out" / "metrics.jsonl").unlink(), [], True),
    ("configuration gone", 14, KILL, lambda f: (f / "out" / "config.yaml").unlink(), [], True),
    ("provenance gone", 14, KILL, lambda f: (f / "out" / "provenance.json").unlink(), [], True),
    ("a checkpoint of a step that is not reached", 14, KILL,
     lambda f: shutil.copytree(newest(f), f / "out" / "checkpoints" / "step-00000099"), [], True),
    ("another head", 14, KILL, nothing, ["head=medusa"], False),
    ("another seed", 14, KILL, nothing, ["trainer.seed=7"], False),
    ("another length", 14, KILL, nothing, ["data.length=64"], False),
    ("another average", 14, KILL, nothing, ["trainer.ema=0.5"], False),
]  # fmt: skip
# Under which a run is started, to go on without: no file above 100 KiB, an address space of 3 GiB, few open files.
LIMITS = ("-f 100", "-v 3145728", "-n 64", "-n 32")


def verdict(folder: Path, job: subprocess.Popen[str], goes_on: bool | None, whole: dict[int, tuple[str, ...]]) -> str:
    """Return what is not as promised, None being that it goes on or ends in a line; empty where all is."""
    printed = job.communicate(timeout=300)[0]
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    if "Traceback" in printed or (job.returncode and len(errors) != 1):
        return f"status {job.returncode}: {printed[-400:]}"
    if job.returncode and not goes_on:
        return ""
    if goes_on is False:
        return "it went on"
    if job.returncode:
        return f"status {job.returncode}: {errors}"
    now = losses(folder)
    if odd := [step for step, told in now.items() if not set(told) <= set(whole[step])]:
        return f"other losses from step {odd[0]}: {now[odd[0]]} for {whole[odd[0]]}"
    gone = "" if (folder / "out" / "head" / "model.safetensors").exists() else "no head"
    return gone or ("" if max(now) == STEPS else f"ends at step {max(now)}")


def main() -> None:
    """Do each, and print what came of it."""
    wanted = {int(word) for word in sys.argv[1:]} or set(range(len(FAULTS) + len(LIMITS)))
    right = 0
    with tempfile.TemporaryDirectory() as place:
        start(Path(place)).communicate(timeout=300)
        whole = losses(Path(place))
        assert len(whole) == STEPS
        for number in sorted(wanted):
            folder = Path(place, str(number))
            folder.mkdir()
            if number < len(FAULTS):
                name, step, sign, change, words, goes_on = FAULTS[number]
                stopped(folder, step, sign)
                change(folder)
                found = verdict(folder, start(folder, "resume=true", *words), goes_on, whole)
            else:
                name = "ulimit " + LIMITS[number - len(FAULTS)]
                found = verdict(folder, start(folder, limit=LIMITS[number - len(FAULTS)]), None, whole)
                found = found or verdict(folder, start(folder, "resume=true"), True, whole)
            right += not found
            print(f"{number} {name}: {found or 'as promised'}", flush=True)
    print(f"{right} of {len(wanted)} as promised")


if __name__ == "__main__":
    main()
