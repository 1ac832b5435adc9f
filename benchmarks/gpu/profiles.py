"""Where the time of a decoding step and of a training step goes, by torch's profiler, at the shape of an 8B.

    python benchmarks/gpu/profiles.py --out OUT [--cases "decoding, eager" …] [--before OLD/profiles.json] [--toy]

Profiled are a speculative step of one sequence with an EAGLE-3 head and a dynamic tree, eager and compiled, and a step
that trains such a head, features live. A step's own time is taken without the profiler, which makes the host slower.
The traces go to OUT/trace_….json.gz, for chrome://tracing or Perfetto. --before puts an earlier record's figures beside
the new ones: run, mend a waste, run again. On a CPU operations stand for kernels.
"""

import gzip
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig

from benchmarks.gpu.common import Asked, Table, arguments, earlier, product_rate, random_target, record, seconds
from benchmarks.gpu.sequences import TOY_TREE, TREE, Sequences, compile_anew, random_head, release, wait
from benchmarks.gpu.traces import STEP, digest
from benchmarks.gpu.training import ROWS, Bench, stepper
from eval.measures.machine import device_facts
from heads.common.errors import one_line
from inference.target.target import Target

HEAD = "eagle3"
PROFILED = 3  # steps
CONTEXT, LENGTH = 1024, 2048  # committed rows when decoding, tokens of a row when training
TOY_CONTEXT, TOY_LENGTH = 64, 64
Numbers = Mapping[str, Any]
# What the first table tells of a step: its words, and the figure's text.
COST: dict[str, Callable[[Numbers], str]] = {
    "step, ms": lambda of: f"{of['step']:.2f}",
    "step under the profiler, ms": lambda of: f"{of['wall']:.2f}",
    "device at work, ms (a CPU: in operations)": lambda of: f"{of['busy']:.2f}",
    "device idle": lambda of: f"{1 - of['busy'] / of['step']:.0%}" if of["device"] else "-",
    "idle under the profiler": lambda of: f"{of['idle']:.0%}",
    "kernels (a CPU: operations)": lambda of: f"{of['kernels']:.0f}",
    "kernel launches by the host": lambda of: f"{of['launches']:.0f}",
    "graph launches": lambda of: f"{of['graph_launches']:.1f}",
    "host synchronisations": lambda of: f"{sum(of['syncs'].values()):.1f}",
    "copies to the host": lambda of: f"{of['copies']:.1f}",
    "numbers read by item()": lambda of: f"{of['reads']:.1f}",
}


def profiled(call: Callable[[], Any], device: torch.device, trace: Path) -> dict[str, Any]:
    """Profile a step, which was never taken before; write the trace and return what it says."""
    step = seconds(call, device, repeats=5)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities):  # what the profiler itself does once is no part of a step
        call()
    with profile(activities=activities) as found:
        for _ in range(PROFILED):
            with record_function(STEP):
                call()
                wait(device)
    found.export_chrome_trace(str(trace))
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        return {"step": 1e3 * step, "trace": trace.name, **digest(json.load(file)["traceEvents"])}


def decoding(asked: Asked, target: Target, trace: Path, *, quick: bool) -> dict[str, Any]:
    """Profile a speculative step."""
    if quick:
        compile_anew(target, asked)
    sequences = Sequences(target, 1, TOY_CONTEXT if asked.toy else CONTEXT)
    drafters = sequences.drafted(random_head(HEAD, target), TOY_TREE if asked.toy else TREE)
    return profiled(sequences.stepper(drafters), asked.device, trace)


def training(asked: Asked, target: Target, trace: Path) -> dict[str, Any]:
    """Profile a training step as a run takes it."""
    folder = asked.out / "shape"
    LlamaConfig(**asked.shape, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(folder)
    bench = Bench(asked, folder, target, product_rate(asked))
    step = stepper(bench, bench.run(HEAD, TOY_LENGTH if asked.toy else LENGTH, ROWS))
    number = iter(range(1 << 30))
    return profiled(lambda: step(next(number), halted=lambda: False), asked.device, trace)


CASES: dict[str, Callable[[Asked, Target, Path], dict[str, Any]]] = {
    "decoding, eager": partial(decoding, quick=False),
    "decoding, compiled": partial(decoding, quick=True),
    "training": training,
}


def measured(asked: Asked, target: Target, case: str) -> dict[str, Any]:
    """Return what a case costs, or in a word why it failed."""
    trace = asked.out / f"trace_{case.replace(', ', '_')}.json.gz"
    try:
        return CASES[case](asked, target, trace)
    except (RuntimeError, ValueError) as error:  # out of memory, or what compilers raise; other cases may run
        traceback.print_exc()
        return {"failed": "out of memory" if "out of memory" in str(error) else one_line(error)[:80]}
    finally:
        release(target)


def old_cases(file: Path | None, asked: Asked, facts: Numbers) -> dict[str, Any]:
    """Return the cases of an earlier record.

    Raises:
        SystemExit: it is no record of this script, or one of another device or size.
    """
    if file is None:
        return {}
    told = json.loads(file.read_text(encoding="utf-8"))
    if told["name"] != "profiles":
        raise SystemExit(f"{file} is a record of {told['name']}: give --before a profiles.json")
    if told["toy"] != asked.toy or told["device"]["name"] != facts["name"]:
        raise SystemExit(f"{file} was measured on {told['device']['name']}, toy={told['toy']}: measure it again here")
    return told["numbers"]["cases"]


def tables(cases: Mapping[str, Numbers], before: Mapping[str, Numbers]) -> list[Table]:
    """Return the tables: what a step costs, and for each case where its time goes, with what it was before."""
    columns: dict[str, Numbers] = {}
    for name, found in cases.items():
        columns |= {f"{name}, before": before[name]} if name in before else {}
        columns[name] = found
    rows = [[words, *[_said(text, found) for found in columns.values()]] for words, text in COST.items()]
    names = sorted({name for found in columns.values() for name in found.get("syncs", {})})
    rows += [
        [f"- {name}", *[f"{found.get('syncs', {}).get(name, 0):.1f}" for found in columns.values()]] for name in names
    ]
    found = [Table("What a step costs; counts are of one step", ["figure", *columns], rows)]
    for name, each in cases.items():
        if "failed" in each:
            continue
        where = "device" if each["device"] else "CPU"
        found.append(_largest(f"{name}: largest by own {where} time", each["largest"], before.get(name), "largest"))
        if each["device"]:
            host = each["largest_host"]
            found.append(_largest(f"{name}: largest by own time on the host", host, before.get(name), "largest_host"))
    return found


def _said(text: Callable[[Numbers], str], found: Numbers) -> str:
    return found["failed"] if "failed" in found else text(found)


def _largest(caption: str, largest: list[list[Any]], before: Numbers | None, key: str) -> Table:
    was = {} if before is None else {name: spent for name, spent, _ in before.get(key, [])}
    more = [] if before is None else ["before, ms"]
    rows = [
        [name[:60], f"{spent:.3f}", f"{calls:.1f}", *([_before(was, name)] if more else [])]
        for name, spent, calls in largest
    ]
    return Table(caption, ["what", "ms a step", "calls a step", *more], rows)


def _before(was: Mapping[str, float], name: str) -> str:
    return f"{was[name]:.3f}" if name in was else "not among them"


def main() -> None:
    """Profile and write the record."""
    asked, read = arguments(
        __doc__ or "",
        cases={"nargs": "+", "choices": list(CASES), "default": list(CASES)},
        before={"type": Path, "default": None, "help": "an earlier profiles.json, to be told beside this one"},
    )
    before = old_cases(read.before, asked, device_facts(asked.device, None))
    target, found = random_target(asked), earlier(asked, "profiles").get("cases", {})
    found |= {case: measured(asked, target, case) for case in read.cases}
    cases = {case: found[case] for case in CASES if case in found}
    record(asked, "profiles", {"head": HEAD, "cases": cases, "before": before}, tables(cases, before))


if __name__ == "__main__":
    main()
