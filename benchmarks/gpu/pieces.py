"""The process at work: pieces one after another, on one target. run.py starts it and watches the clock."""

import argparse
import json
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import torch
import transformers

from benchmarks.gpu import results
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.items import named
from benchmarks.gpu.machine import driver
from benchmarks.gpu.run import write_status
from eval.measures.machine import device_facts, revision
from heads.common.errors import one_line
from inference.target.config import default_device

ORDINARY = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
            ValueError)  # fmt: skip


def facts_of(bench: Bench) -> results.Entry:
    """Return what tells a measurement from others of its name."""
    device, code = device_facts(bench.device, None), revision()
    return {
        "revision": f"{code['revision']}{' with changes' if code['dirty'] else ''}", "toy": bench.toy,
        "device": device["name"], "driver": driver(), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip


def measured(bench: Bench, name: str) -> results.Entry:
    """Return what a piece measures, or why it failed."""
    piece, begin = named()[name][1], time.perf_counter()
    module, function = piece.call.split(".")
    try:
        rows = getattr(import_module(f"benchmarks.gpu.{module}"), function)(bench, **piece.options)
    except ORDINARY as error:  # the next piece may run all the same
        traceback.print_exc()
        return {"failed": one_line(error)[:500]}
    finally:
        bench.free()
    return {"seconds": time.perf_counter() - begin, "rows": [list(row) for row in rows]}


def main() -> None:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(description="Measure pieces; run.py calls this.")
    parser.add_argument("out", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--pieces", nargs="+", required=True)
    options = parser.parse_args()
    bench = Bench(
        torch.device("cpu" if options.toy else default_device()), options.toy, options.work, options.text, options.out
    )
    if bench.device.type == "cpu" and not bench.toy:
        raise SystemExit(
            "there is no accelerator; --toy runs everything on a CPU, at a size of which no figure means much"
        )
    facts = facts_of(bench)
    results.write(options.work / "facts.json", json.dumps(facts))
    for name in options.pieces:
        before = results.read(options.out).get(name)
        if results.is_done(before, facts) and not (options.again and "failed" in (before or {})):
            continue
        write_status(options.work / "status.json", name)
        entry = measured(bench, name)
        results.keep(options.out, name, facts | entry)
        print(f"{name}: {entry.get('failed', 'measured')}", flush=True)


if __name__ == "__main__":
    main()
