"""Heads trained and evaluated on the device by the product's own commands, and the target of 94 M (target.py)."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import target as targets
from benchmarks.gpu.bench import Bench, Row
from heads.common.resolvers import ROOT

TOKENS = 2048  # of a training step
TAU = {"eagle3": 3.76, "mtp": 3.94}  # on a CPU, after 0.41 M tokens (benchmarks/heads.py)
PLAIN = 530.0  # tokens/s of the bundled target's captured baseline: 945 kernels of 2 us
TREE_STEP = 2.7  # ms of a captured step with a tree of 12 nodes: 1,358 of them
NOT_LOSSLESS = 1  # an evaluation's status where a check failed: the report is there all the same


def product(script: str, *words: str, fine: Sequence[int] = (0,)) -> None:
    """Run one of the product's commands, which prints to the log.

    Raises:
        RuntimeError: it failed.
    """
    sys.stdout.flush()
    status = subprocess.run([sys.executable, script, *words], cwd=ROOT, check=False).returncode
    if status not in fine:
        raise RuntimeError(f"{script} ended with status {status}: log.txt has what it printed")


def of_target(bench: Bench, large: bool) -> list[str]:
    """Return the words that name the target: the embedded one, or the one of 94 M."""
    words, path = [f"model.device={bench.device}"], bench.work / "target"
    return [*words, f"model.path={path}", f"data.prompts={path / 'prompts.jsonl'}"] if large else words


def train(bench: Bench, head: str, steps: int, large: bool = False) -> list[Row]:
    """Train a head, and return what that took."""
    bench.drop()
    out = folder(bench, head, steps, large)
    tokens = 256 if bench.toy else TOKENS
    data = [f"data.path={bench.work / 'answers.jsonl'}"] if large else []
    product(
        "train/run.py", f"head={head}", f"out={out}", "overwrite=true", *of_target(bench, large),
        *data, "data.cache=null", *(["data.limit=300", "data.length=128"] if bench.toy else []),
        f"trainer.steps={min(steps, 10) if bench.toy else steps}", f"trainer.batch_tokens={tokens}",
        f"trainer.micro_tokens={tokens}", "trainer.eval_prompts=0", "eval.prompts=0",
    )  # fmt: skip
    cost = json.loads((out / "training.json").read_text(encoding="utf-8"))
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "tokens_per_second" in record]
    middle = records[len(records) // 2]
    return [
        ("tokens", cost["tokens"], None), ("seconds", cost["seconds"], None), ("loss", records[-1]["loss"], None),
        ("tokens/s, in the middle", middle["tokens_per_second"], None),
        *((f"- {part}, ms", 1e3 * spent, None) for part, spent in middle["seconds"].items()),
        ("peak memory, GiB", middle["memory_bytes"] / 2**30, None),
    ]  # fmt: skip


def folder(bench: Bench, head: str, steps: int, large: bool) -> Path:
    """Return a head's folder."""
    return bench.work / f"{head}-{steps}{'-large' if large else ''}"


def evaluate(bench: Bench, heads: Sequence[str], compiled: bool, large: bool = False) -> list[Row]:
    """Return acceptance and speed of the heads, against the baseline of the same engine."""
    bench.drop()
    out = bench.work / f"eval{'-large' if large else ''}{'-compiled' if compiled else ''}"
    runs = ",".join(str(folder(bench, head, 1600, large)) for head in heads)
    prompts, tokens = (2, 12) if bench.toy else (16, 128)
    product(
        "eval/run.py", f"run=[{runs}]", f"workload={bench.work / 'target' / 'code.jsonl' if large else 'tiny'}",
        "tier=live", "hf=false", f"prompts={prompts}", f"max_new_tokens={tokens}", "repeats=1", "dtype=bfloat16",
        f"engine.compile={str(compiled and not bench.toy).lower()}", f"out={out}", f"model.device={bench.device}",
        fine=(0, NOT_LOSSLESS),
    )  # fmt: skip
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return [line for row in report["rows"] if row["tier"] == "live" and not row["category"] for line in lines_of(row)]


def lines_of(row: dict[str, Any]) -> list[Row]:
    """Return a report's row: on a device that its launches bound a step with the small tree takes TREE_STEP."""
    name = row["drafter"].split("-")[0]
    tau = TAU.get(name)
    lines: list[Row] = [(f"{name}: tokens/s", row["tokens_per_second"], 1e3 * tau / TREE_STEP if tau else PLAIN)]
    if tau is not None:
        lines += [(f"{name}: τ", row["tau"], tau), (f"{name}: speedup", row["speedup"], 1e3 * tau / TREE_STEP / PLAIN)]
        lines.append((f"{name}: losslessness", json.dumps(row["lossless"]), None))
    parts = {part: 1e3 * spent / max(1, row["steps"]) for part, spent in row["seconds"].items()}
    return lines + [(f"{name}: {part} of a step, ms", spent, None) for part, spent in parts.items()]


def target(bench: Bench, part: str) -> list[Row]:
    """Do one part of making the target, and return what it is."""
    bench.drop()
    call = {"text": targets.read_text, "train": targets.teach, "measure": targets.measure}[part]
    call(bench, bench.work / "target")
    return targets.rows_of(bench.work / "target", part)


def answers(bench: Bench) -> list[Row]:
    """Let the target answer the prompts that heads train on."""
    bench.drop()
    file = bench.work / "answers.jsonl"
    limit, tokens, batch = (24, 24, 8) if bench.toy else (6000, 192, 256)
    product(
        "data/run.py", *of_target(bench, large=True), f"answers={file}", "data.cache=null",
        f"data.path={bench.work / 'target' / 'train_prompts.jsonl'}", f"limit={limit}", f"max_new_tokens={tokens}",
        "temperature=0.5", "keep_unfinished=true", f"batch_size={batch}",
    )  # fmt: skip
    return [("answers", len(file.read_text(encoding="utf-8").splitlines()), limit)]
