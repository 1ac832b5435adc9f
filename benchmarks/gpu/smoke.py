"""The tests on the device, and the losslessness gate on many tokens: in fp32 without a difference, in bf16 near ties.

    python benchmarks/gpu/smoke.py --out OUT [--parts tests gate] [--tokens 100000] [--processes 8] [--toy]

1. tests: the whole suite of a machine with an accelerator, which commands take where nobody says otherwise; and
   tests/device, where every head, tree and source decodes and every head trains on the device, in fp32 and in bf16.
2. gate: an EAGLE head of the embedded target, trained here for a minute, and a source that drafts from the text alone
   decode the bundled chats until plain decoding has written so many tokens; greedy, in fp32 and again in bf16.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.gpu.common import TINY, Asked, Table, arguments, record

CHATS = TINY / "chats.jsonl.xz"
ANSWER = 128  # tokens of an answer at most
MEAN = 40  # tokens of an answer to the bundled chats, a little below their mean
SOURCES = ["head", "suffix"]
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")


def suite(asked: Asked, processes: int) -> tuple[dict[str, Any], Table]:
    """Run the tests and count how they ended."""
    device = {**os.environ, "HEADSTART_TEST_DEVICE": asked.device.type, "OMP_NUM_THREADS": "1"}
    spread = ["-n", str(processes), "--dist", "loadfile"]
    asks = {"the whole suite": ["-m", "not slow and not serving and not gpu"], "marked gpu": ["-m", "gpu"]}
    if asked.toy:
        asks = {"some of tests/device": ["-m", "gpu", "-k", "chain or cpu", "tests/device"]}
    numbers, rows = {}, []
    for name, words in asks.items():
        command = [sys.executable, "-m", "pytest", "-q", *words, *([] if asked.toy else spread)]
        done = subprocess.run(command, cwd=ROOT, env=device, capture_output=True, text=True, check=False)
        (asked.out / f"{re.sub(r'[ /]', '-', name)}.log").write_text(done.stdout + done.stderr)
        counts = counted(done.stdout)
        numbers[name] = counts | {"status": done.returncode}
        rows.append([name, *(str(counts[kind]) for kind in ("passed", "failed", "skipped"))])
    return numbers, Table("Tests", ["which", "passed", "failed", "skipped"], rows)


def counted(said: str) -> dict[str, int]:
    """Return how many tests ended in which way, by pytest's last line; an error counts as a failure."""
    found = {"passed": 0, "failed": 0, "skipped": 0}
    for count, kind in COUNTS.findall(said.strip().rsplit("\n", 1)[-1]):
        found["failed" if kind == "error" else kind] += int(count)
    return found


def gates(asked: Asked, tokens: int) -> tuple[dict[str, Any], Table]:
    """Compare the tokens of heads and sources with plain decoding's, in fp32 and in bf16."""
    run = asked.out / "smoke-eagle"
    steps = ["trainer.steps=20", "trainer.eval_prompts=0"] if asked.toy else ["trainer.steps=600"]
    if not (run / "head").is_dir():
        where = [f"model.device={asked.device}", f"out={run}", "overwrite=true", "eval.prompts=0"]
        product("train/run.py", "head=eagle", *steps, *where)
    numbers: dict[str, Any] = {}
    rows = []
    for dtype in ("float32", "bfloat16"):
        out = asked.out / f"smoke-{dtype}"
        product(
            "eval/run.py", f"run={run}", f"drafter=[{','.join(SOURCES)}]", f"workload={CHATS}", "cold=false",
            f"prompts={-(-tokens // MEAN)}", "balanced=false", f"max_new_tokens={8 if asked.toy else ANSWER}",
            "batch_size=4" if asked.toy else "batch_size=32", f"gate_dtype={dtype}", f"dtype={dtype}", "tier=live",
            "repeats=1", "warmup=0", "hf=false", f"model.device={asked.device}", f"out={out}",
        )  # fmt: skip
        report = json.loads((out / "report.json").read_text())
        written = sum(row["tokens"] for row in report["rows"] if row["drafter"] == "plain")
        for row in report["rows"]:
            if row["drafter"] == "plain":
                continue
            found = row["lossless"]
            numbers[f"{row['drafter']}, {dtype}"] = {**found, "tokens": written, "tau": row["tau"]}
            rows.append([
                row["drafter"], dtype, f"{written:,}", f"{row['tau']:.2f}",
                *(str(found[kind]) for kind in ("checked", "identical", "near_tie", "failed")),
            ])  # fmt: skip
    header = ["source", "dtype", "greedy tokens", "τ", "prompts", "identical", "near ties", "failed"]
    return numbers, Table("Losslessness: prompts with plain decoding's tokens", header, rows)


def product(script: str, *words: str) -> None:
    """Run one of our commands.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    done = subprocess.run([sys.executable, script, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])


def main() -> None:
    """Run the parts that are asked for and write the record."""
    asked, read = arguments(
        "The tests on the device, and the losslessness gate.",
        parts={"nargs": "+", "choices": ["tests", "gate"], "default": ["tests", "gate"]},
        tokens={"type": int, "default": None},
        processes={"type": int, "default": 8},
    )  # fmt: skip
    numbers, tables = {}, []
    for part in read.parts:
        tokens = read.tokens or (240 if asked.toy else 100_000)
        numbers[part], table = suite(asked, read.processes) if part == "tests" else gates(asked, tokens)
        tables.append(table)
    record(asked, "smoke", numbers, tables)


if __name__ == "__main__":
    main()
