"""What long rows cost in training: the memory of a step by length, and features of packed sequences over a forward.

    python benchmarks/long_context_training.py [--lengths 2048,8192,32768] [--heads eagle,eagle3] [--dtype float32]

1. For each head and length, with and without trainer.recompute: seconds and peak memory of one row's step, each in a
   process of its own, beside that process's memory before the step.
2. Features of packed sequences, document by document and under a mask, over a forward pass of the bare model.
"""

import argparse
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
from hydra import compose, initialize_config_dir

from data.batches import pack
from data.text.prompts import load_training
from heads import HEADS
from heads.base import Features
from heads.common.resolvers import register_resolvers
from heads.modules.layers import Recomputing
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.target import Target
from train.config import RunConfig, run_config
from train.objective import loss_weights, trainable
from train.step import Loss

TOKENS = 4096  # of the features' comparison
register_resolvers()


def composed(*overrides: str) -> RunConfig:
    """Return a training configuration."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return run_config(compose("train", list(overrides)))


def peak() -> float:
    """Return the most memory that this process has had, in 10^6 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def step(name: str, length: int, *, recompute: bool) -> None:
    """Print what one step on one row costs."""
    run = composed(f"head={name}")
    target = EmbeddingsOnly.load(run.model.path, "float32", "cpu", False)
    kind: Any = HEADS[name]
    head = kind(run.head, target.embeddings)
    for module in head.modules():
        if isinstance(module, Recomputing):
            module.recompute = recompute
    token = torch.randint(target.embeddings.vocab_size, (1, length))
    document, width = torch.zeros_like(token), target.embeddings.hidden_size
    states = torch.randn(1, length, len(head.feature_layers) + 1, width)
    trained = trainable(document, token * 0 + 1, run.objective.depths)
    weight = loss_weights(document, trained, None, run.objective).row / length
    before, begin = peak(), time.perf_counter()
    loss = Loss(head, run.objective, compiled=False, autocast=False)
    features = Features(token, states[:, :, 1:], states[:, :, 0], document)
    loss(features, weight, None, loss.chunks(weight > 0, weight.device))[0].backward()
    spent, more = time.perf_counter() - begin, peak() - before
    print(
        f"{name:8s} {length:6d}  {recompute!s:5s}  {spent:7.1f} s  {more:7.0f} MB  {1e3 * more / length:6.1f} KB/token"
    )


def features(dtype: str) -> None:
    """Print the throughput of the features of packed sequences over that of the bare model."""
    run = composed("head=eagle3")
    target = Target.load(run.model.path, dtype, "cpu")
    packing = target.packing
    for length in (512, 2048):
        packed = pack(load_training(replace(run.data, limit=300, cache=None), target.tokenizer, 0).samples, length)
        rows = TOKENS // length
        token, document = packed.token[:rows].long(), packed.document[:rows].long()
        found: dict[str, list[float]] = {"bare": [], "by documents": [], "under a mask": []}
        for _ in range(6):
            for name, times in found.items():
                target.packing = None if name == "under a mask" else packing
                begin = time.perf_counter()
                with torch.inference_mode():
                    if name == "bare":
                        target.base(input_ids=token, use_cache=False)
                    else:
                        target.features(token, document, (2, target.spec.num_layers // 2, target.spec.num_layers - 3))
                times.append(time.perf_counter() - begin)
        bare, by, masked = (min(times[1:]) for times in found.values())
        print(f"{dtype}, rows of {length}: over the bare forward {bare / by:.2f}, under a mask {bare / masked:.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What long rows cost in training.")
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--heads", default="eagle,eagle3")
    parser.add_argument("--dtype", default="float32", help="of the features' comparison")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        step(asked.one[0], int(asked.one[1]), recompute=asked.one[2] == "True")
        return
    print("head     length  again  a step     memory")
    for name in asked.heads.split(","):
        for length in asked.lengths.split(","):
            for recompute in (False, True):
                words = [sys.executable, __file__, "--one", name, length, str(recompute)]
                subprocess.run(words, check=True)
    features(asked.dtype)


if __name__ == "__main__":
    main()
