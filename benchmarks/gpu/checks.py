"""Tests on the device, and the losslessness check on many tokens: equal in fp32, near ties apart in bf16."""

import os
import re
import subprocess
import sys
from typing import Any

from benchmarks.gpu.bench import TINY, Bench, Row
from benchmarks.gpu.heads import folder
from eval.inputs.workloads import load_workload
from eval.measures.losslessness import gate
from heads.common.resolvers import ROOT
from inference.decode import RequestParams, speculate
from inference.drafters.head import load_drafter
from inference.drafters.plain import Baseline
from inference.target.target import Target
from inference.verification.sample import GREEDY

TOKENS, ANSWER, MEAN = 30_000, 128, 40  # greedy tokens, at most of an answer, and a little below an answer's mean
TOY_TOKENS, TOY_ANSWER, TOY_MEAN = 40, 8, 7
SEVERAL = 32  # sequences
LIMIT = 90  # seconds that a file of tests has; what has passed by then counts
TOY = {"decoding": "chain and eagle3", "training": "mtp", "step": "eagle3 and chain"}  # the tests of a rehearsal
ENDED = re.compile(r"(PASSED|FAILED|SKIPPED|ERROR) (\S+::.*\S)|(\S+::.*?\S) (PASSED|FAILED|SKIPPED|ERROR)")


def device_tests(bench: Bench, tests: str) -> list[Row]:
    """Run a file of tests/device; return how its tests ended, and which failed."""
    bench.drop()
    spread = [] if bench.toy else ["-n", "6"]
    words = [*spread, "-v", "--tb=short", "-m", "gpu", f"tests/device/test_{tests}.py", "-p", "no:cacheprovider"]
    words += ["-k", TOY[tests]] if bench.toy and tests in TOY else []
    environment = {**os.environ, "HEADSTART_TEST_DEVICE": bench.device.type, "OMP_NUM_THREADS": "1"}
    log = bench.work / f"test_{tests}.log"
    with log.open("w") as file:
        command = ["timeout", str(LIMIT), sys.executable, "-m", "pytest", *words]
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False).returncode
    printed = log.read_text(encoding="utf-8", errors="replace")
    print(printed[-20000:], flush=True)
    ended = counted(printed)
    expected = {"PASSED": None, "FAILED": 0, "ERROR": 0, "SKIPPED": None}
    rows: list[Row] = [(kind.lower(), sum(how == kind for how in ended.values()), expected[kind]) for kind in expected]
    rows.append(("status, 124 where time ran out", code, 0))
    return rows + [(f"failed: {test}", "failed", None) for test, how in ended.items() if how in ("FAILED", "ERROR")]


def counted(printed: str) -> dict[str, str]:
    """Return how each test ended, by what pytest -v prints of it, with processes or without."""
    ended = {}
    for line in printed.split("short test summary info", maxsplit=1)[0].splitlines():
        if match := ENDED.search(line):
            ended[match[2] or match[3]] = match[1] or match[4]
    return ended


def lossless(bench: Bench, dtype: str) -> list[Row]:
    """Compare a head's greedy texts with the baseline's, in batches."""
    bench.drop()
    tokens, answer, mean = (TOY_TOKENS, TOY_ANSWER, TOY_MEAN) if bench.toy else (TOKENS, ANSWER, MEAN)
    target = Target.load(str(TINY), dtype, str(bench.device))
    prompts = [each.token for each in load_workload(str(TINY / "chats.jsonl.xz"), target, -(-tokens // mean))]
    settings = RequestParams(answer, GREEDY, logit_gaps=True)
    source: Any = load_drafter(folder(bench, "eagle", 300, large=False) / "head", {}, target, "head")
    plain = speculate(target, Baseline(target.device), prompts, settings, batch_size=SEVERAL)
    drafted = speculate(target, source, prompts, settings, batch_size=SEVERAL)
    result = gate(plain, drafted, [str(i) for i in range(len(prompts))], target.dtype)
    passes = sum(len(text.steps) for text in drafted)
    rows: list[Row] = [("greedy tokens", sum(len(text.tokens) for text in plain), tokens)]
    rows += [(kind, count, 0 if kind == "failed" else None) for kind, count in result.counts().items()]
    rows.append(("first difference", None if result.first is None else str(result.first), None))
    return [*rows, ("τ", sum(len(text.tokens) - 1 for text in drafted) / max(1, passes), None)]
