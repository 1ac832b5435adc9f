"""Training EAGLE-3 at the shape of an 8B: the run's own steps, on packed documents of random tokens."""

import random
import statistics
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.bench import Bench, Row, once, profiled, seconds
from benchmarks.gpu.decoding import told
from benchmarks.training import composed
from data.batches import pack, token_counts
from data.features.source import FeatureSource, LiveFeatures, MicroBatch
from data.text.masks import Sample
from eval.measures.machine import peak_memory
from heads.modules.vocab import choose_draft_vocab
from train import objective
from train.build import batches_for
from train.config import RunConfig
from train.distributed.processes import accelerator_for
from train.plan import plan
from train.start import init_head, resolve_init
from train.step import Loss, Stepper

ROWS, LENGTH = 8, 2048  # of a step: 16,384 tokens, a micro-batch
DOCUMENT = (100, 1500)  # tokens
USED = 32_000  # tokens of the vocabulary that the text has, as many as are drafted
WARM, MEASURED = 2, 5  # steps
# Of `python benchmarks/h100_estimate.py training`, in ms; Muon takes MUON more than AdamW.
TARGET, HEAD, OPTIMISER, STEP, MUON = 496.0, 508.0, 7.0, 1012.0, 46.0
LAUNCHES = 5096
GIVEN, GIVEN_PEAK = 31_780.0, 13.0  # tokens/s and GiB with features given: the estimate, and what is to be reached


def run_of(bench: Bench, optimizer: str, rows: int, *more: str) -> RunConfig:
    """Return a run of one micro-batch a step."""
    length = 64 if bench.toy else LENGTH
    return composed(
        "head=eagle3", "objective.depths=5", f"model.path={bench.folder}", f"model.device={bench.device}",
        "model.dtype=bfloat16", f"data.length={length}", f"trainer.micro_tokens={rows * length}",
        f"trainer.batch_tokens={rows * length}", "trainer.eval_prompts=0", f"trainer.optimizer={optimizer}",
        f"out={bench.work / 'run'}", *more,
    )  # fmt: skip


def stepper(
    bench: Bench, optimizer: str, rows: int = ROWS, *, answers: bool = False, compiled: bool = False
) -> Stepper:
    """Return what takes training steps on random documents; `answers`: of which the second half alone is trained."""
    compiled = compiled and not bench.toy  # a machine without accelerator may have no compiler
    target, run = bench.target, run_of(bench, optimizer, rows, f"trainer.compile={str(compiled).lower()}")
    vars(bench).pop("head", None)  # of decoding
    accelerator = accelerator_for(run.launcher, run.trainer, run.model)
    torch.manual_seed(0)
    head: Any = init_head(*resolve_init(run.init, run.head, target), target).to(target.device)
    samples = documents(8 * rows * run.data.length, min(USED, target.embeddings.vocab_size), bench.toy, answers)
    choose_draft_vocab(head, token_counts(samples, target.embeddings.vocab_size))
    batches = batches_for(run.trainer, pack(samples, run.data.length), accelerator)
    source, width = LiveFeatures(target, batches, head.feature_layers), target.embeddings.hidden_size
    if compiled:
        source.forwards = target.compiled_forwards()
    loss = Loss(head, run.objective, compiled=run.trainer.compile, autocast=accelerator.mixed_precision == "bf16")
    return Stepper(run.trainer, run.launcher, accelerator, loss, source, width)


def documents(tokens: int, vocab: int, toy: bool, answers: bool) -> list[Sample]:
    """Return random documents of so many tokens together, all of them trained or each one's second half."""
    chance, samples = random.Random(0), list[Sample]()
    low, high = (size // 32 if toy else size for size in DOCUMENT)
    while tokens > 0:
        size = chance.randint(low, high)
        context = size // 2 if answers else 0
        mask = [0] * context + [1] * (size - context)
        samples.append(Sample(str(tokens), torch.randint(vocab, (size,)).tolist(), mask))
        tokens -= size
    return samples


class Given(FeatureSource):
    """Features that lie on the device, of one step, again and again: what is left is the head's step."""

    def __init__(self, live: FeatureSource) -> None:
        self.batches, self.stall = live.batches, 0.0
        self.micro = [MicroBatch(micro.batch, partial(lambda given: given, micro.read())) for micro in live(0)]

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the same micro-batches for any step."""
        return self.micro

    def close(self) -> str:
        """Say nothing."""
        return ""


def taken(bench: Bench, training: Stepper) -> tuple[float, float, dict[str, float], int]:
    """Return the first step's seconds, the median of those behind it, their parts, and the tokens of a step."""
    number = iter(range(1000))

    def one() -> Any:
        return training(next(number), halted=lambda: False).record

    first = once(one, bench.device)
    for _ in range(WARM):
        one()
    bench.free()  # and forget the peak of the first steps
    spent, records = [], []
    for _ in range(2 if bench.toy else MEASURED):
        spent.append(once(lambda: records.append(one()), bench.device))
    parts = {part: statistics.median(record["seconds"][part] for record in records) for part in records[0]["seconds"]}
    return first, statistics.median(spent), parts, training.trainer.batch_tokens


def step(bench: Bench, optimizer: str, chunk: int | None = None, **options: bool) -> list[Row]:
    """Return what a training step costs, its target live; `chunk`: rows of a chunk of the loss."""
    with patch.object(objective, "ROWS", chunk or objective.ROWS):
        training = stepper(bench, optimizer, **options)
        first, whole, parts, tokens = taken(bench, training)
    step_ms = STEP + (MUON if optimizer == "muon" else 0)
    guess = {"target": TARGET, "head": HEAD, "optimiser": step_ms - TARGET - HEAD}
    share = tokens / (ROWS * LENGTH)  # of the tokens that the estimate is of
    rows: list[Row] = [
        ("tokens/s", tokens / whole, ROWS * LENGTH / step_ms * 1e3), ("step, ms", 1e3 * whole, share * step_ms),
    ]  # fmt: skip
    rows += [
        (f"- {part}, ms", 1e3 * spent, guess[part] * share if part in guess else None) for part, spent in parts.items()
    ]
    without = sum(parts.values()) - parts["target"]
    rows.append(("tokens/s beside the target's pass", tokens / without, GIVEN))
    planned = plan(run_of(bench, optimizer, ROWS, f"device={'cpu' if bench.toy else 'h100'}")).memory.peak
    rows.append(
        ("memory taken of the device, GiB; what a plan says", taken_bytes(bench.device) / 2**30, planned / 2**30)
    )
    rows += [("first step, s", first, None), ("peak memory, GiB", peak_memory(bench.device) / 2**30, None)]
    return rows


def taken_bytes(device: torch.device) -> int:
    """Return the most bytes taken of the device: the allocator's, and the context."""
    if device.type != "cuda":
        return peak_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) + torch.cuda.max_memory_reserved(device)


def given(bench: Bench, rows: int, **options: bool) -> list[Row]:
    """Return what a step costs whose features are given, and the memory that it takes beside the target's layers."""
    training = stepper(bench, "adamw", rows, **options)
    with torch.no_grad():
        training.source = Given(training.source)
    _, whole, _, tokens = taken(bench, training)
    layers: Any = bench.target.decoder_layers
    resident = sum(weights.nbytes for layer in layers for weights in layer.parameters())
    return [
        ("tokens/s", tokens / whole, GIVEN), ("step, ms", 1e3 * whole, 1e3 * tokens / GIVEN),
        ("peak memory beside the target's layers, GiB", (peak_memory(bench.device) - resident) / 2**30, GIVEN_PEAK),
    ]  # fmt: skip


def profile(bench: Bench, **options: bool) -> list[Row]:
    """Return where the time of a training step goes."""
    training, number = stepper(bench, "adamw", **options), iter(range(1000))

    def one() -> None:
        training(next(number), halted=lambda: False)

    for _ in range(WARM):
        one()
    whole = seconds(one, bench.device, 3, 1)
    expected = {"kernels": LAUNCHES, "launches": LAUNCHES, "graph_launches": 0, "copies": 1}
    trace = profiled(one, bench.device, bench.out / f"trace_{'_'.join(['training', *options])}.json.gz")
    return told(trace, whole, expected, STEP)


def features(bench: Bench) -> list[Row]:
    """Return what features of packed sequences take, beside the bare pass of the same rows, each one document."""
    target, source = bench.target, stepper(bench, "adamw").source
    batch = source.batches(0)[0]
    last = target.spec.num_layers - 1
    token = batch.token.to(target.device)
    with torch.inference_mode():
        bare = seconds(lambda: target.base(input_ids=token, use_cache=False), target.device, 5)
        ours = seconds(lambda: target.features(batch.token, batch.document, (1, last // 2, last - 3)), target.device, 5)
    guess = TARGET * token.numel() / (ROWS * LENGTH)
    return [
        ("bare pass, ms", 1e3 * bare, guess), ("features, ms", 1e3 * ours, guess),
        ("features / bare", ours / bare, 1.0), ("documents", sum(int(row.max()) + 1 for row in batch.document), None),
    ]  # fmt: skip
