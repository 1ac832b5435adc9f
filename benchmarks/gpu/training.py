"""What training a head costs at the shape of an 8B: rate, share of the peak, memory beside its plan, what fits.

    python benchmarks/gpu/training.py --out OUT [--parts steps features fits] [--heads eagle3 …] [--steps 8] [--toy]

1. steps: training steps as a run takes them, on random tokens, features live from random weights. Tokens a second; the
   share of the device's peak that the step uses, and the head's part of it alone; peak memory beside the plan's.
2. features: their extraction beside a bare forward pass of the same model over the same rows.
3. fits: the largest micro-batch for which the plan says that devices of 24, 80 and 139 GB have room, by length; whether
   a step of it then runs in as much memory, and one of twice as many rows does not.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import torch
from transformers import LlamaConfig

from benchmarks.gpu.common import Asked, Table, arguments, product_rate, random_target, record, seconds
from benchmarks.training import composed
from data.batches import pack, token_counts
from data.features.source import Live
from data.text.masks import Sample
from eval.measures.machine import peak_memory
from heads.modules.vocab import prune
from inference.target.target import Target
from train.config import RunConfig
from train.distributed.processes import accelerator_for
from train.planning.plan import GIB, plan
from train.run import batches_for
from train.start import first_head, resolve_init
from train.step import Loss, Stepper

GOAL_MFU = 0.40
HEADS = ["eagle", "eagle3", "medusa", "block"]
DEVICES = {"24 GB": ["device=rtx4090"], "80 GB": ["device=h100"], "139 GB": ["device=h200"]}
TOY_DEVICES = {f"{gb} GB": ["device=cpu", f"device.memory_gb={gb}"] for gb in (1, 2, 4)}
ROWS = 4  # of a micro-batch, in the first part
MOST = 256  # rows that are tried
WARM = 2  # steps that do not count: kernels are chosen and memory is taken


@dataclass(frozen=True)
class Bench:
    """The target, the folder of its config.json, which is all that a plan reads, and what the device can do."""

    asked: Asked
    folder: Path
    target: Target
    rate: float

    def run(self, head: str, length: int, rows: int, *more: str) -> RunConfig:
        """Return a run of one micro-batch a step."""
        peak = [f"trainer.peak_tflops={self.rate / 1e12}"] if self.asked.device.type == "cpu" else []
        tokens = length * rows
        words = [
            f"head={head}", f"model.path={self.folder}", "model.dtype=bfloat16", f"model.device={self.asked.device}",
            f"data.length={length}", f"trainer.micro_tokens={tokens}", f"trainer.batch_tokens={tokens}",
            "trainer.eval_prompts=0", f"out={self.asked.out / 'run'}", *peak, *more,
        ]  # fmt: skip
        return composed(*words)


def stepper(bench: Bench, run: RunConfig) -> Stepper:
    """Return what takes training steps on random tokens."""
    target = bench.target
    accelerator = accelerator_for(run.launcher, run.trainer, run.model)
    torch.manual_seed(0)
    head: Any = first_head(run.head, resolve_init(run.init, run.head, target), target).to(target.device)
    length, rows = run.data.length, run.trainer.batch_tokens // run.data.length
    token = torch.randint(target.embeddings.vocab_size, (2 * rows, length)).tolist()
    samples = [Sample(str(i), row, [1] * length) for i, row in enumerate(token)]
    prune(head, token_counts(samples, target.embeddings.vocab_size))
    batches = batches_for(run, pack(samples, length), accelerator)
    source, width = Live(target, batches, head.feature_layers), target.embeddings.hidden_size
    loss = Loss(head, run.objective, compiled=run.trainer.compile, quick=accelerator.mixed_precision == "bf16")
    return Stepper(run.trainer, run.launcher, accelerator, loss, source, width)


def steps(bench: Bench, run: RunConfig, count: int) -> list[dict[str, Any]]:
    """Take training steps on random tokens and return what each recorded, those that only warm up left out.

    Raises:
        torch.OutOfMemoryError: a step does not fit.
    """
    target, step = bench.target, stepper(bench, run)
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(target.device)
    taken = [step.counted(0, halted=lambda: False)]
    taken += [step(i, halted=lambda: False) for i in range(1, WARM + count)]
    return [each.record or {} for each in taken[WARM:]]


def taken_bytes(device: torch.device) -> int:
    """Return the most bytes that this process has taken of the device, as a plan counts them.

    On an accelerator with what the allocator holds beside what is asked of it, and with the context.
    """
    if device.type != "cuda":
        return peak_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) + torch.cuda.max_memory_reserved(device)


def step_rows(bench: Bench, heads: list[str], lengths: list[int], count: int) -> tuple[dict[str, Any], Table]:
    """Measure training steps by head and length."""
    numbers: dict[str, Any] = {}
    rows = []
    for head in heads:
        for length in lengths:
            run = bench.run(head, length, ROWS, *_device(bench))
            planned = plan(run)
            case = f"{head}, {ROWS} x {length}"
            try:
                found = steps(bench, run, count)
            except torch.OutOfMemoryError:
                numbers[case] = {"planned_bytes": planned["peak_bytes"], "fits": False}
                rows.append([head, f"{ROWS} x {length}", *["out of memory"] * 4, _gib(planned["peak_bytes"]), "-"])
                continue
            head_rate = (
                planned["head_flops"] / planned["steps"] / statistics.median(each["seconds"]["head"] for each in found)
            )
            peak = found[-1]["flops_per_second"] / found[-1]["mfu"]
            mine = {
                "tokens_per_second": statistics.median(each["tokens_per_second"] for each in found),
                "mfu": statistics.median(each["mfu"] for each in found),
                "head_mfu": head_rate / peak,
                "seconds": {
                    part: statistics.median(each["seconds"][part] for each in found) for part in found[0]["seconds"]
                },
                "peak_bytes": taken_bytes(bench.asked.device),
                "planned_bytes": planned["peak_bytes"],
                "fits": True,
            }  # fmt: skip
            numbers[case] = mine
            share = mine["seconds"]["head"] / sum(mine["seconds"].values())
            rows.append([
                head, f"{ROWS} x {length}", f"{mine['tokens_per_second']:,.0f}", f"{mine['mfu']:.1%}",
                f"{mine['head_mfu']:.1%}", f"{share:.0%}", f"{_gib(mine['planned_bytes'])}",
                f"{mine['planned_bytes'] / mine['peak_bytes']:.2f}",
            ])  # fmt: skip
    header = ["head", "rows", "tokens/s", f"MFU, goal {GOAL_MFU:.0%}", "head's MFU", "head's share", "plan, GiB",
              "plan / peak"]  # fmt: skip
    return numbers, Table("A training step, features live; MFU of the device's dense bf16 peak", header, rows)


def feature_rows(bench: Bench, lengths: list[int]) -> tuple[dict[str, Any], Table]:
    """Measure the extraction of three layers' features beside the bare forward pass."""
    target, numbers, rows = bench.target, {}, []
    last = target.spec.num_layers - 1
    layers = (1, last // 2, last - 3)
    for length in lengths:
        token = torch.randint(target.embeddings.vocab_size, (ROWS, length), device=target.device)
        document = torch.zeros_like(token)
        with torch.inference_mode():
            bare = seconds(lambda token=token: target.base(input_ids=token, use_cache=False), target.device, 5)
            ours = seconds(
                lambda token=token, document=document: target.features(token, document, layers), target.device, 5
            )
        numbers[str(length)] = {"bare_seconds": bare, "features_seconds": ours, "ratio": ours / bare}
        tokens = token.numel()
        rows.append([f"{ROWS} x {length}", f"{tokens / bare:,.0f}", f"{tokens / ours:,.0f}", f"{ours / bare:.3f}"])
    header = ["rows", "bare forward, tokens/s", "features, tokens/s", "time over the bare forward's"]
    return numbers, Table("Feature extraction", header, rows)


def fit_rows(bench: Bench, head: str, lengths: list[int]) -> tuple[dict[str, Any], Table]:
    """Return what the plan has room for on each size of device, and whether that is so."""
    numbers, rows = {}, []
    for name, device in (TOY_DEVICES if bench.asked.toy else DEVICES).items():
        for length in lengths:
            most, planned = 0, None
            count = 1
            while count <= MOST:
                found = plan(bench.run(head, length, count, *device))
                if not found["fits"]:
                    break
                most, planned, count = count, found, 2 * count
            place = plan(bench.run(head, length, 1, *device))["device"]
            room = round((place["memory_gb"] - place["context_gb"]) * GIB)  # for tensors
            runs, twice = (_runs(bench, head, length, size, room) for size in (most, 2 * most))
            numbers[f"{name}, {length}"] = {
                "rows": most, "planned_bytes": planned and planned["peak_bytes"], "runs": runs, "twice_runs": twice,
            }  # fmt: skip
            peak = "-" if planned is None else _gib(planned["peak_bytes"])
            more = " or more" if most == MOST else ""
            sizes = [f"{most}{more}", f"{most * length:,}{more}"]
            rows.append([name, str(length), *sizes, peak, _said(runs), _said(twice)])
    header = ["device", "length", "rows", "tokens", "plan, GiB", "runs in it", "twice as many run"]
    return numbers, Table(
        f"The largest micro-batch of {head} that the plan has room for, in powers of two", header, rows
    )


def _runs(bench: Bench, head: str, length: int, rows: int, room: int) -> bool | None:
    """Return whether a step runs in so many bytes of tensors; None where that cannot be tried on this device."""
    device = bench.asked.device
    if not rows or device.type != "cuda" or room > torch.cuda.get_device_properties(device).total_memory:
        return None
    share = room / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share, device)
    try:
        steps(bench, bench.run(head, length, rows, *_device(bench)), 1)
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return True


def _device(bench: Bench) -> list[str]:
    return ["device=cpu"] if bench.asked.device.type == "cpu" else []


def _said(runs: bool | None) -> str:
    return "not tried" if runs is None else "yes" if runs else "no"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def main() -> None:
    """Measure and write the record."""
    parts = {"steps", "features", "fits"}
    asked, read = arguments(
        "What training a head costs at the shape of an 8B.",
        parts={"nargs": "+", "choices": sorted(parts), "default": sorted(parts)},
        heads={"nargs": "+", "default": HEADS},
        lengths={"nargs": "+", "type": int, "default": None},
        steps={"type": int, "default": 8},
    )  # fmt: skip
    measure(asked, read)


def measure(asked: Asked, read: argparse.Namespace) -> None:
    """Measure the parts that are asked for."""
    folder = asked.out / "shape"
    LlamaConfig(**asked.shape, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(folder)
    bench = Bench(asked, folder, random_target(asked), product_rate(asked))
    lengths = read.lengths or ([64, 128] if asked.toy else [2048, 8192])
    longer = read.lengths or (lengths if asked.toy else [*lengths, 32768])
    measured = {
        "steps": partial(step_rows, bench, read.heads, lengths, read.steps),
        "features": partial(feature_rows, bench, lengths),
        "fits": partial(fit_rows, bench, read.heads[0], longer),
    }
    found = {part: call() for part, call in measured.items() if part in read.parts}
    numbers = {"product_rate": bench.rate} | {part: each for part, (each, _) in found.items()}
    tables = [table for _, table in found.values()]
    record(asked, "training", numbers, tables)


if __name__ == "__main__":
    main()
