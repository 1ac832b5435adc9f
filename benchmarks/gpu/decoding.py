"""Decoding steps at the shape of an 8B, random weights: the engine's own, in a context that grows with every step."""

from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row, once, profiled, seconds, waits
from benchmarks.h100_estimate import LAYERS, Cost
from benchmarks.h100_estimate import seconds as estimated
from benchmarks.step_counts import TREES, counted
from eval.measures.machine import peak_memory
from inference.batch import Batch, batch_of
from inference.decode import RequestParams
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from inference.protocol import Drafter
from inference.target import compiled
from inference.verification.sample import GREEDY

TREE_OF = {"tree": TREES["dynamic, depth 5, 60 nodes"], "chain": TREES["chain of 4"]}
# By benchmarks/step_counts.py: operations of a layer, of a pass beside its layers; of the draft and the rest.
LAYER, AROUND = 38, 12
COUNTS = {"plain": Cost(4, LAYER, AROUND, 17, 0, 1), "tree": Cost(370, LAYER, AROUND, 64, 6, 61),
          "chain": Cost(261, LAYER, AROUND, 60, 5, 5)}  # fmt: skip
TAU = {"plain": 1.0, "tree": 4.0, "chain": 2.8}  # that tokens/s are given at: random weights accept nothing
TOKENS = 512  # of an answer: more than all steps here commit
WARM, MEASURED = 4, 24  # steps


def make(bench: Bench) -> list[Row]:
    """Make the target, and return what it is."""
    took = once(lambda: bench.target, bench.device)
    target, context = bench.target, 64 if bench.toy else 1024
    token = torch.zeros(context, dtype=torch.long, device=bench.device)
    prompt = seconds(lambda: target.prefill(token, target.cache(context)), bench.device, 5)
    return [
        ("made and checked, s", took, None), ("takes trees", str(target.takes_trees), "True"),
        ("packs documents", str(target.packing is not None), "True"), ("captures", str(target.captures), "True"),
        ("memory, GiB", peak_memory(bench.device) / 2**30, 15.0), (f"a prompt of {context}, ms", 1e3 * prompt, 28.0),
    ]  # fmt: skip


def batch_at(bench: Bench, kind: str, size: int, context: int) -> Batch:
    """Return a full batch of sequences of about so many tokens."""
    target, tokens = bench.target, 128 if bench.toy else TOKENS
    source: Drafter = Baseline(target.device) if kind == "plain" else HeadDrafter(bench.head, TREE_OF[kind], kind)
    chance = torch.Generator().manual_seed(size)
    requests = [
        (torch.randint(target.embeddings.vocab_size, (context - slot,), generator=chance).tolist(),
         RequestParams(tokens, GREEDY))
        for slot in range(size)
    ]  # fmt: skip
    batch = batch_of(target, source, size, requests)
    assert batch.device_step is not None
    batch.device_step.static = True  # as on CUDA
    for number, request in enumerate(requests):
        batch.admit(number, *request)
    return batch


def batch_by(bench: Bench, way: str, kind: str, size: int, context: int) -> Batch:
    """Return a batch whose steps run as they are, captured, or captured with compiled layers and drafts."""
    target = bench.target
    target.compiled, target.compiles_drafts = None, False
    if way == "compiled":
        if bench.compiled is None:
            compiled.BACKEND = "eager" if bench.toy else "inductor"  # inductor takes minutes on a CPU
            target.compile()
            bench.compiled = target.compiled
        target.compiled, target.compiles_drafts = bench.compiled, True
    with target.uncaptured() if way == "eager" else nullcontext(), torch.inference_mode():  # as in speculate()
        return batch_at(bench, kind, size, context)


def estimate(kind: str, size: int, context: int, way: str) -> dict[str, float]:
    """Return the estimated seconds of a step's parts on an H100."""
    return estimated(COUNTS[kind], size, way, context)


def step(bench: Bench, kind: str, size: int, context: int, way: str) -> list[Row]:
    """Return what a step of a batch costs, beside the estimate."""
    shape = (min(size, 3), context // 32) if bench.toy else (size, context)
    batch = batch_by(bench, way, kind, *shape)
    first = [once(batch.step, bench.device) for _ in range(WARM)]
    count = 3 if bench.toy else MEASURED
    spent = [once(batch.step, bench.device) for _ in range(count)]
    taken = [step for sequence in batch.running for step in sequence.request.generation.steps[-count:]]
    assert len(taken) == count * shape[0], "no sequence has ended"
    mean, guess = sum(spent) / count, estimate(kind, size, context, way)
    parts = {"draft": "draft_s", "verify": "verify_s", "other": "other_s"}
    rows: list[Row] = [("step, ms", 1e3 * mean, 1e3 * sum(guess.values()))]
    rows += [
        (f"- {part}, ms", 1e3 * sum(getattr(one, field) for one in taken) / count, 1e3 * guess[part])
        for part, field in parts.items()
    ]
    rows += [
        ("slowest step, ms", 1e3 * max(spent), None), ("first step, s", first[0], None),
        ("second step, captured, s", first[1], None),
        (f"tokens/s at τ = {TAU[kind]}", shape[0] * TAU[kind] / mean, size * TAU[kind] / sum(guess.values())),
        ("host waits a step", waits(batch.step, bench.device), 1), ("graphs", graphs(batch), None),
        ("tokens committed a step and sequence", sum(one.committed for one in taken) / len(taken), None),
        ("peak memory, GiB", peak_memory(bench.device) / 2**30, None),
    ]  # fmt: skip
    return rows


def graphs(batch: Batch) -> int | str:
    """Return how many graphs hold a batch's steps."""
    held: Any = batch.device_step and batch.device_step.graphs
    if held is None:
        return "none"
    return len(held.captured) if held.able else "capture failed"


def operations(bench: Bench) -> list[Row]:
    """Return the operations and host reads of a step by part, beside those of docs/engine.md at an 8B's depth."""
    rows: list[Row] = []
    layers = bench.target.config.num_hidden_layers
    for kind, cost in COUNTS.items():
        parts, reads = counted(batch_by(bench, "eager", kind, 1, 64 if bench.toy else 1024))
        of = {"draft": cost.draft, "verify": AROUND + LAYER * layers, "other": cost.other}
        rows += [(f"{kind}: operations of {part}", parts[part], count) for part, count in of.items()]
        rows.append((f"{kind}: reads by the host", reads, 1))
    return rows


def profile(bench: Bench, way: str) -> list[Row]:
    """Return where the time of a step with a tree of 60 goes, for one sequence."""
    batch = batch_by(bench, way, "tree", 1, 64 if bench.toy else 1024)
    for _ in range(WARM):
        batch.step()
    whole = seconds(batch.step, bench.device, 5)
    cost = COUNTS["tree"]
    launches = cost.draft + AROUND + LAYER * LAYERS + cost.other
    expected = {"kernels": launches, "launches": launches if way == "eager" else 0, "copies": 1,
                "graph_launches": 0 if way == "eager" else 4}  # fmt: skip
    trace = profiled(batch.step, bench.device, bench.out / f"trace_decoding_{way}.json.gz")
    return told(trace, whole, expected, 1e3 * sum(estimate("tree", 1, 1024, way).values()))


def told(trace: dict[str, Any], whole: float, expected: dict[str, float], step_ms: float) -> list[Row]:
    """Return a profile's figures, each of one step, and what took longest."""
    rows: list[Row] = [("step, ms", 1e3 * whole, step_ms), ("step under the profiler, ms", trace["wall"], None)]
    rows.append(("device at work, ms", trace["busy"], None))
    rows += [(name, trace[name], expected.get(name)) for name in ("kernels", "launches", "graph_launches", "copies")]
    rows.append(("waits of the host", sum(trace["syncs"].values()), 1))
    rows += [(f"- {name}", count, None) for name, count in trace["syncs"].items()]
    for key in ("largest", "largest_host"):
        rows += [
            (f"{key}: {name[:70]}", f"{spent:.3f} ms, {calls:.0f} calls", None) for name, spent, calls in trace[key]
        ]
    return rows
