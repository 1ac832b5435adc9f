"""What features cost: live beside the target's bare forward pass, from a store beside computing them again.

    python benchmarks/features.py [--model PATH] [--data PATH] [--rows 16] [--steps 8] [--head eagle3] [--threads 1]
        [--folder PATH]

1. Features for training over a forward pass of the bare model on the same tokens, a document a row, and packed.
2. For each dtype of a store: its bytes, its extraction over the same forward passes without one, and its read
   (checksum, decoding) beside computing the rows again.
3. Rows as wide as an 8B target's from an accelerator, for which a wait stands in: extraction over the wait, what the
   writer manages without any, and reads by one thread and by several.
4. Training from the bf16 store: the share of the time that it waits for reads.

Forward passes take all cores unless `--threads` leaves one to the thread that hashes and writes. Files lie in
`--folder`, whose disk counts, and are read from the page cache.

    python benchmarks/features.py --server "features.url=[URL] features.vllm=FOLDER features.vllm_layers=[IDS]"

Training from the live target, from vLLM servers and from a store, in turns: tokens per second, this process's CPU time
per token, and the share of the time that it waits.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
from hydra import compose, initialize_config_dir

from data.batches import Packed, pack
from data.features.extraction import Layers, Make, extract, extract_features, spec_of
from data.features.store import (
    DTYPES,
    Copying,
    FeatureRequest,
    FeatureStore,
    StoreSpec,
    decode_sequences,
    start,
)
from data.text.prompts import load_training
from eval.measures.machine import device_facts
from heads.base import Features
from heads.common.resolvers import register_resolvers
from inference.target.target import Target
from train.config import RunConfig, run_config
from train.resolve import on_machine
from train.run import train

MICRO = 4  # rows of a pass
READERS = (1, 2, 4)
register_resolvers()


class Case(NamedTuple):
    """A target, some packed sequences, and the feature layers of a head."""

    target: Target
    packed: Packed
    layers: tuple[int, ...]


def composed(*overrides: str) -> RunConfig:
    """Return a training configuration."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return run_config(compose("train", list(overrides)))


def fastest(*runs: Callable[[], Any], repeats: int = 5, before: Callable[[], Any] = lambda: None) -> list[float]:
    """Return the least seconds of each of several calls, taken in turns, without those of what comes before each."""
    found: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for i, run in enumerate(runs):
            before()
            begin = time.perf_counter()
            run()
            if turn:
                found[i].append(time.perf_counter() - begin)
    return [min(each) for each in found]


def live(case: Case) -> None:
    """Print the throughput of live features over that of the bare model."""
    target, token = case.target, case.packed.token[:MICRO].long()
    document = case.packed.document[:MICRO].long()
    with torch.inference_mode():
        bare, whole, masked = fastest(
            lambda: target.base(input_ids=token, use_cache=False),
            lambda: target.features(token, torch.zeros_like(token), case.layers),
            lambda: target.features(token, document, case.layers),
        )
    print(f"live features over the bare forward pass: a document a row {bare / whole:.3f}, packed {bare / masked:.3f}")


def stored(case: Case, folder: Path) -> None:
    """Print what a store of each dtype takes, how fast it is extracted, and how fast it is read."""
    print("dtype  KB/token  of bf16   extraction over forward passes   read   compute   read is faster by")
    bf16 = 0
    for dtype in ("bf16", *(name for name in DTYPES if name != "bf16")):
        run = composed(f"features.dtype={dtype}", "features=stored", f"features.path={folder / dtype}")
        spec = replace(spec_of(case.target, case.packed, case.layers, run.features), shard_rows=MICRO)
        share, store = extracted(folder / dtype, spec, partial(passed, case, spec), 3)
        reading, computing = reads(case, store)
        bf16, tokens = bf16 or store.bytes(), store.spec.rows * store.spec.length
        print(
            f"{dtype:5s} {store.bytes() / tokens / 1e3:9.3f} {store.bytes() / bf16:8.3f} {share:32.3f} "
            f"{1e6 * reading:6.2f} {1e6 * computing:8.1f}   {computing / reading:.0f}"
        )
    print(f"read and compute in microseconds a token; passes on {torch.get_num_threads()} threads")


def passed(case: Case, spec: StoreSpec, rows: list[int]) -> Copying:
    """Start a forward pass over some rows, as an extraction does."""
    return start(case.target, case.packed.token[rows].long(), case.packed.document[rows].long(), spec)


def extracted(folder: Path, spec: StoreSpec, make: Make, repeats: int) -> tuple[float, FeatureStore]:
    """Return the speed of an extraction over that of computing its rows alone, and the store."""

    def alone() -> None:
        for begin in range(0, spec.rows, MICRO):
            make(list(range(begin, min(begin + MICRO, spec.rows)))).result()

    computing, extraction = fastest(alone, lambda: written(folder, spec, make), repeats=repeats, before=cleared(folder))
    return computing / extraction, FeatureStore(folder)


def cleared(folder: Path) -> Callable[[], None]:
    """Return what removes a folder."""
    return lambda: shutil.rmtree(folder, ignore_errors=True)


def written(folder: Path, spec: StoreSpec, make: Make) -> None:
    """Extract a store, as a second process, which shows no progress."""
    extract(FeatureStore.create(folder, spec), make, MICRO, 1, 2)


def wide(folder: Path, rows: int) -> None:
    """Print extraction and reading of rows of 2,048 tokens, each with four states of 4,096 numbers in bf16."""
    spec = StoreSpec("", "", None, (0, 1, 2), 4096, 32000, "", rows, 2048, "bf16", MICRO)
    states = {"hidden": torch.randn(MICRO, 2048, 3, 4096).bfloat16(), "last": torch.randn(MICRO, 2048, 4096).bfloat16()}
    tokens, size = rows * spec.length, rows * spec.sequence_bytes / 1e9
    print(f"{rows} rows of {1e3 * size / rows:.0f} MB")

    def waited(rate: int, numbers: list[int]) -> Copying:
        time.sleep(len(numbers) * spec.length / rate)
        some = {name: tensor[: len(numbers)] for name, tensor in states.items()}
        return Copying(some, torch.tensor(True), None, spec.name)

    def read(threads: int) -> None:
        store = FeatureStore(folder)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(store.read, range(rows)))

    for rate in (10_000, 20_000):
        share, _ = extracted(folder, spec, partial(waited, rate), 2)
        print(f"{rate} tokens/s, {size * rate / tokens:.2f} GB/s: extraction over the wait {share:.3f}")
    spent = fastest(*(partial(read, threads) for threads in READERS), repeats=3)
    spent += fastest(lambda: written(folder, spec, partial(waited, 10**12)), repeats=2, before=cleared(folder))
    names = [*(f"read by {threads} threads" for threads in READERS), "written without a wait"]
    for name, seconds in zip(names, spent, strict=True):
        print(f"{name}: {tokens / seconds:.0f} tokens/s, {size / seconds:.2f} GB/s")


def reads(case: Case, store: FeatureStore) -> tuple[float, float]:
    """Return the seconds a token of reading a micro-batch, and of computing it."""
    target, rows = case.target, list(range(MICRO))
    token, document = case.packed.token[rows].long(), case.packed.document[rows].long()
    wanted = FeatureRequest(case.layers, target.dtype)

    def read() -> Features:
        each = [store.read(row) for row in rows]
        joined = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        return decode_sequences(joined, token, document, wanted, store.spec)

    spent = fastest(
        read,
        lambda: target.features(token, document, case.layers),
    )
    reading, computing = (each / token.numel() for each in spent)
    return reading, computing


def trained(overrides: list[str], folder: Path) -> None:
    """Print how much of a short training's time went into waiting for reads."""
    train(on_machine(composed(*overrides, f"out={folder}", "trainer.eval_prompts=0", "eval.prompts=0")))
    cost = json.loads((folder / "training.json").read_text())
    share = cost["stall_seconds"] / cost["seconds"]
    print(f"training waited {cost['stall_seconds']:.3f} of {cost['seconds']:.1f} s for reads: {share:.2%}")


class Rate(NamedTuple):
    """What a training took: seconds a token of its steps but the first, CPU seconds a token, and seconds of waiting."""

    seconds: float
    cpu: float
    stall: float


def rate(overrides: list[str], folder: Path) -> Rate:
    """Return what a short training takes."""
    begin = time.process_time()
    words = ["trainer.eval_prompts=0", "eval.prompts=0", "trainer.log_every=1", "overwrite=true", f"out={folder}"]
    run = on_machine(composed(*overrides, *words))
    train(run)
    cpu = time.process_time() - begin
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = run.trainer.batch_tokens * len(steps[1:])
    seconds, stall = (sum(step[key] for step in steps[1:]) for key in ("step_seconds", "stall_seconds"))
    return Rate(seconds / tokens, cpu / (run.trainer.batch_tokens * len(steps)), stall / seconds)


def kept(words: list[str], folder: Path) -> list[str]:
    """Extract a training's features, and return the overrides by which it reads them."""
    stored = ["features=stored", f"features.path={folder}/store"]
    run = on_machine(composed(*words, *stored))
    extract_features(run.model, run.data, run.features, Layers(run.head, None), run.workload, lambda _: None)
    return stored


def compared(words: list[str], server: list[str], folder: Path, turns: int = 3) -> None:
    """Print the throughput of training from each source, the best of some turns."""
    sources = {"live": ["features=live"], "engine": ["features=engine", *server], "stored": kept(words, folder)}
    found: dict[str, list[Rate]] = {name: [] for name in sources}
    for _ in range(turns):
        for name, overrides in sources.items():
            found[name].append(rate([*words, *overrides], folder / "run"))
    for name, rates in found.items():
        best = min(rates)
        cpu = f"{1e6 * best.cpu:6.0f} us of CPU a token"
        print(f"{name:7s} {1 / best.seconds:8.0f} tokens/s {cpu}, waits {best.stall:.1%}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What features cost.")
    parser.add_argument("--model", default="", help="a target's folder; the embedded one without it")
    parser.add_argument("--data", default="", help="a file to train on; the embedded chats without it")
    parser.add_argument("--rows", type=int, default=16, help="packed sequences")
    parser.add_argument("--steps", type=int, default=8, help="of the training")
    parser.add_argument("--head", default="eagle3")
    parser.add_argument("--server", default="", help="overrides of features=engine: compare with a server alone")
    parser.add_argument("--wide", type=int, default=32, help="rows of an 8B target's width")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of forward passes")
    parser.add_argument("--folder", help="where files lie; the one for temporary files without it")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    named = [f"model.path={asked.model}"] * bool(asked.model) + [f"data.path={asked.data}"] * bool(asked.data)
    limit = asked.rows * 8
    words = [f"head={asked.head}", *named, f"trainer.steps={asked.steps}", "trainer.batch_tokens=4096"]
    words += [f"data.limit={limit}"]
    if asked.server:
        with tempfile.TemporaryDirectory() as folder:
            compared(words, asked.server.split(), Path(folder))
        return
    run = composed(f"head={asked.head}", *named)
    target = Target.load(run.model.path, run.model.dtype, run.model.device)
    print(device_facts(target.device, target.dtype))
    samples = load_training(replace(run.data, limit=limit, cache=None), target.tokenizer, 0).samples
    packed = Packed(*(part[: asked.rows] for part in pack(samples, run.data.length)))
    case = Case(target, packed, Layers(run.head, None).of(target))
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        live(case)
        stored(case, Path(folder))
        wide(Path(folder, "wide"), asked.wide)
        trained([*words, "overwrite=true"], Path(folder, "first"))
        trained([*words, "overwrite=true", *kept(words, Path(folder))], Path(folder, "second"))


if __name__ == "__main__":
    main()
