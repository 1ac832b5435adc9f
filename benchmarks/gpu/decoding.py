"""Decoding steps at the shape of an 8B, random weights: the engine's own, in a context that grows with every step."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row, once, profiled, seconds, waits
from benchmarks.h100_estimate import LAYERS, Cost
from benchmarks.h100_estimate import seconds as estimated
from benchmarks.step_counts import TREES, counted
from eval.measures.machine import peak_memory
from inference.batch import Batch, batch_of
from inference.decode import Generation, RequestParams
from inference.drafters.head import HeadDrafter
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.plain import Baseline
from inference.protocol import DraftContext, Drafter, Proposal
from inference.target import compiled
from inference.target.target import Target
from inference.verification.sample import GREEDY
from inference.verification.tree import chain

TREE_OF = {"tree": TREES["dynamic, depth 5, 60 nodes"], "chain": TREES["chain of 4"]}
# By benchmarks/step_counts.py: operations of a layer, of a pass beside its layers; of the draft and the rest.
LAYER, AROUND = 38, 12
COUNTS = {"plain": Cost(4, LAYER, AROUND, 17, 0, 1), "tree": Cost(370, LAYER, AROUND, 64, 6, 61),
          "chain": Cost(261, LAYER, AROUND, 60, 5, 5)}  # fmt: skip
TAU = {"plain": 1.0, "tree": 4.0, "chain": 2.8}  # that tokens/s are given at: random weights accept nothing
TOKENS = 512  # of an answer: more than all steps here commit
WARM, MEASURED = 4, 24  # steps
FULL, ANSWER = 32, 256  # sequences of the replay, and tokens of an answer
REPLAYED = 9538.0  # tokens/s of vLLM with saved answers as drafts, on an H100


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
    requests = [(prompt, RequestParams(tokens, GREEDY)) for prompt in prompts_of(target, size, context)]
    batch = batch_of(target, source, size, requests)
    assert batch.device_step is not None
    batch.device_step.fixed_shapes = True  # as on CUDA
    for number, request in enumerate(requests):
        batch.admit(number, *request)
    return batch


def prompts_of(target: Target, size: int, context: int) -> list[list[int]]:
    """Return random prompts of at most `context` tokens, each of another length."""
    chance = torch.Generator().manual_seed(size)
    vocab = target.embeddings.vocab_size
    return [torch.randint(vocab, (context - slot,), generator=chance).tolist() for slot in range(size)]


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
    taken = [step for request in batch.running for step in request.generation.steps[-count:]]
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


def profile(bench: Bench, kind: str, size: int, way: str) -> list[Row]:
    """Return where the time of a step goes."""
    shape = (min(size, 3), 64) if bench.toy else (size, 1024)
    batch = batch_by(bench, way, kind, *shape)
    for _ in range(WARM):
        batch.step()
    whole = seconds(batch.step, bench.device, 5)
    cost = COUNTS[kind]
    launches = cost.draft + AROUND + LAYER * LAYERS + cost.other
    expected = {"kernels": launches, "launches": launches if way == "eager" else 0, "copies": 1,
                "graph_launches": 0 if way == "eager" else 4}  # fmt: skip
    trace = profiled(batch.step, bench.device, bench.out / f"trace_{kind}_{size}_{way}.json.gz")
    return told(trace, whole, expected, 1e3 * sum(estimate(kind, size, 1024, way).values()))


class Saved(HostDrafter):
    """Drafts what a prompt was answered with before: every draft is right, and drafting costs next to nothing."""

    def __init__(self, depth: int, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.depth, self.answers, self.name = depth, answers, f"saved answers, {depth} tokens"
        self.tree = f"path-{depth}"

    def clone(self) -> "Saved":
        """Return itself: it learns nothing."""
        return self

    def start(self, prompt: list[int]) -> "SavedState":
        """Find the answer to the prompt."""
        return SavedState(self.depth, len(prompt), self.answers[tuple(prompt)])


class SavedState(DrafterState):
    """One prompt's saved answer."""

    def __init__(self, depth: int, begin: int, answer: list[int]) -> None:
        self.depth, self.begin, self.answer = depth, begin, answer

    def propose(self, context: DraftContext) -> Proposal:
        """Draft the saved tokens that follow."""
        done = len(context.token) - self.begin
        draft = self.answer[done : done + min(self.depth, context.max_draft_depth)]
        return Proposal(chain(torch.tensor([context.token[-1], *draft])))


def replay(bench: Bench, depth: int) -> list[Row]:
    """Return the speed of a full batch whose drafts are its saved answers.

    In bf16 a pass over more rows may choose another token at a near tie, which random weights have often, and what
    follows in the saved answer is then wrong: τ says how many drafts were right.
    """
    target, size = bench.target, 3 if bench.toy else FULL
    settings = RequestParams(24 if bench.toy else ANSWER, GREEDY)
    prompts = prompts_of(target, size, 64 if bench.toy else 1024)
    plain, answers = decoded(target, Baseline(target.device), prompts, settings)
    saved = {tuple(prompt): answer.tokens for prompt, answer in zip(prompts, answers, strict=True)}
    spent, drafted = decoded(target, Saved(depth, saved), prompts, settings)
    tokens = sum(len(answer.tokens) - 1 for answer in drafted)  # without the prefill's
    steps = sum(len(answer.steps) for answer in drafted)
    return [
        ("baseline, tokens/s", tokens / plain, None), ("tokens/s", tokens / spent, REPLAYED),
        ("τ", tokens / steps, depth + 1),
        ("step, ms", 1e3 * spent / max(len(answer.steps) for answer in drafted), None),
        ("texts as saved", sum(a.tokens == b.tokens for a, b in zip(answers, drafted, strict=True)), size),
    ]  # fmt: skip


def decoded(
    target: Target, drafter: Drafter, prompts: list[list[int]], settings: RequestParams
) -> tuple[float, list[Generation]]:
    """Answer prompts twice in one batch; return the seconds of the second time's steps, prefills left out."""
    batch = batch_of(target, drafter, len(prompts), [(prompt, settings) for prompt in prompts])
    assert batch.device_step is not None
    batch.device_step.fixed_shapes = True  # as on CUDA
    spent, answers = 0.0, list[Generation]()
    with torch.inference_mode():
        for _ in range(2):  # the first time captures
            answers = [batch.admit(number, prompt, settings) for number, prompt in enumerate(prompts)]
            spent = 0.0
            while not all(answer.finish_reason for answer in answers):
                spent += once(batch.step, target.device)
                batch.release()
    return spent, answers


def told(trace: dict[str, Any], whole: float, expected: Mapping[str, float], step_ms: float) -> list[Row]:
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
