"""What features cost: live beside the target's bare forward pass, from a store beside computing them again.

    python benchmarks/features.py [--model PATH] [--data PATH] [--rows 16] [--steps 8] [--head eagle3]

1. Features for training over a forward pass of the bare model on the same tokens, a document a row, and packed.
2. For each dtype of a store: its bytes, its write, and its read (checksum, decoding) over computing the rows again.
3. Training from the bf16 store: the share of the time that it waits for reads.

    python benchmarks/features.py --server "features.url=[URL] features.vllm=FOLDER features.vllm_layers=[IDS]"

Training from the live target, from vLLM servers and from a store, in turns: tokens a second, this process's CPU time a
token, and the share of the time that it waits.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from data.batches import Packed, pack
from data.features.coding import FeatureRequest, compute, decode_rows, join
from data.features.extraction import Layers, extract, spec_of
from data.features.quantize import DTYPES
from data.features.store import FeatureStore, Row
from data.text.prompts import load_samples
from eval.measures.machine import device_facts
from heads.common.resolvers import register_resolvers
from inference.target.target import Target
from train.config import RunConfig, run_config
from train.run import train

MICRO = 4  # rows of a pass
register_resolvers()


class Case(NamedTuple):
    """A target, some packed rows, and the feature layers of a head."""

    target: Target
    packed: Packed
    layers: tuple[int, ...]


def composed(*overrides: str) -> tuple[RunConfig, dict[str, Any]]:
    """Return a training configuration, and the same as plain values."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", list(overrides))
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    return run_config(cfg), resolved


def fastest(*runs: Callable[[], Any], repeats: int = 5) -> list[float]:
    """Return the least seconds of each of several calls, taken in turns."""
    found: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for i, run in enumerate(runs):
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
    """Print what a store of each dtype takes, and how fast it is read."""
    print("dtype  KB/token  of bf16   write   read   compute   read is faster by")
    bf16 = 0
    for dtype in ("bf16", *(name for name in DTYPES if name != "bf16")):
        store, write = written(case, folder / dtype, dtype)
        reading, computing = reads(case, store)
        bf16, tokens = bf16 or store.bytes(), store.spec.rows * store.spec.length
        print(
            f"{dtype:5s} {store.bytes() / tokens / 1e3:9.3f} {store.bytes() / bf16:8.3f} {1e6 * write / tokens:6.2f} "
            f"{1e6 * reading:6.2f} {1e6 * computing:8.1f}   {computing / reading:.0f}"
        )
    print("write, read and compute in microseconds a token; files in the page cache, as after an extraction")


def written(case: Case, folder: Path, dtype: str) -> tuple[FeatureStore, float]:
    """Return an extracted store, and the seconds that its writing took besides the target's passes."""
    target, packed, layers = case
    run, _ = composed(f"features.dtype={dtype}", "features=stored", f"features.path={folder}")
    spec = replace(spec_of(target, packed, layers, run.features), shard_rows=8)
    store, computing = FeatureStore.create(folder, spec), 0.0

    def made(rows: list[int]) -> Row:
        nonlocal computing
        begin = time.perf_counter()
        found = compute(target, packed.token[rows].long(), packed.document[rows].long(), spec)
        computing += time.perf_counter() - begin
        return found

    begin = time.perf_counter()
    extract(store, made, MICRO, 1, 2)  # as a second process, which shows no progress and finds all shards free
    return store, time.perf_counter() - begin - computing


def reads(case: Case, store: FeatureStore) -> tuple[float, float]:
    """Return the seconds a token of reading a micro-batch, and of computing it."""
    target, rows = case.target, list(range(MICRO))
    token, document = case.packed.token[rows].long(), case.packed.document[rows].long()
    wanted = FeatureRequest(case.layers, target.dtype)
    spent = fastest(
        lambda: decode_rows(join(store.read(row) for row in rows), token, document, wanted, store.spec),
        lambda: target.features(token, document, case.layers),
    )
    reading, computing = (each / token.numel() for each in spent)
    return reading, computing


def trained(overrides: list[str], folder: Path) -> None:
    """Print how much of a short training's time went into waiting for reads."""
    train(*composed(*overrides, f"out={folder}", "trainer.eval_prompts=0", "eval.prompts=0"))
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
    run, resolved = composed(*overrides, *words)
    train(run, resolved)
    cpu = time.process_time() - begin
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = run.trainer.batch_tokens * len(steps[1:])
    seconds, stall = (sum(step[key] for step in steps[1:]) for key in ("step_seconds", "stall_seconds"))
    return Rate(seconds / tokens, cpu / (run.trainer.batch_tokens * len(steps)), stall / seconds)


def compared(words: list[str], server: list[str], folder: Path, turns: int = 3) -> None:
    """Print the throughput of training from each source, the best of some turns."""
    kept = [f"features.path={folder}/store"]
    rate([*words, "features=hybrid", *kept], folder / "run")
    apart = ["features=stored", "features.on_missing=compute", *kept]
    sources = {"live": ["features=live"], "engine": ["features=engine", *server], "stored": apart}
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
    parser.add_argument("--rows", type=int, default=16, help="packed rows")
    parser.add_argument("--steps", type=int, default=8, help="of the training")
    parser.add_argument("--head", default="eagle3")
    parser.add_argument("--server", default="", help="overrides of features=engine: compare with a server alone")
    asked = parser.parse_args()
    named = [f"model.path={asked.model}"] * bool(asked.model) + [f"data.path={asked.data}"] * bool(asked.data)
    words = [f"head={asked.head}", *named, f"trainer.steps={asked.steps}", "trainer.batch_tokens=4096"]
    words += [f"data.limit={asked.rows * 8}"]
    if asked.server:
        with tempfile.TemporaryDirectory() as folder:
            compared(words, asked.server.split(), Path(folder))
        return
    run, _ = composed(f"head={asked.head}", *named)
    target = Target.load(run.model.path, run.model.dtype, run.model.device)
    print(device_facts(target.device, target.dtype))
    limit = asked.rows * 8
    samples = load_samples(run.data, target.tokenizer, limit)
    packed = Packed(*(part[: asked.rows] for part in pack(samples, run.data.length)))
    case = Case(target, packed, Layers(run.head, None).of(target))
    with tempfile.TemporaryDirectory() as folder:
        live(case)
        stored(case, Path(folder))
        words += ["features=hybrid", f"features.path={folder}/trained"]
        trained([*words, "overwrite=true"], Path(folder, "first"))
        trained([*words, "overwrite=true", "features.on_missing=fail", "features.mode=stored"], Path(folder, "second"))


if __name__ == "__main__":
    main()
