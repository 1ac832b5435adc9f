"""What training a head costs beside what it must: memory of the loss, time of a head's step, time of the features.

    python benchmarks/training.py [--vocabulary 128256] [--rows 1024] [--model PATH] [--tokens 2048] [--heads eagle …]

1. The loss in chunks against all rows at once: peak memory of the process above what the tensors that both need take.
2. A head's step (unroll, loss, gradient) over the time that its own matrix products take, done again by themselves, in
   CPU seconds. Threads that wait for others count in these: OMP_NUM_THREADS=1 where the machine does other work.
3. Features for training over a forward pass of the bare model on the same tokens.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.engine import random_target
from data.batches import Batch
from eval.measures.machine import device_facts
from heads import HEADS
from heads.base import DepthOutput, Features
from heads.common.resolvers import register_resolvers
from heads.modules.vocab import DraftLmHead
from inference.target.target import Target
from train.config import RunConfig, run_config
from train.distributed.processes import keep_freed
from train.losses import ObjectiveConfig
from train.objective import chunk_rows, chunked, loss_weights, objective, row_keys, trainable
from train.step import Loss

WIDTH, LENGTH = 256, 512
register_resolvers()


def composed(*overrides: str) -> RunConfig:
    """Return a training configuration."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return run_config(compose("train", ["launcher=inline", *overrides]))


class Reader(nn.Module):
    """The least that the loss asks of a head: an lm_head of its own, and the target's, which is as large."""

    vocab = None

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        embeddings: Any = self
        self.embeddings, self.hidden_size, self.vocab_size = embeddings, WIDTH, vocabulary
        self.lm_head = DraftLmHead(embeddings, "own", None)

    def lm_head_weight(self) -> Tensor:
        """Return what the lm_head starts at."""
        return torch.randn(self.vocab_size, WIDTH) / WIDTH**0.5

    def compute_logits(self, state: Tensor, _depth: int) -> Tensor:
        """Return the draft's logits."""
        return self.lm_head(state)

    def logits(self, last: Tensor) -> Tensor:
        """Return the target's logits."""
        return self.lm_head(last)


def peak(config: ObjectiveConfig, vocabulary: int, rows: int, *, whole: bool) -> int:
    """Return the bytes that loss and gradient take above the inputs, in this process, which must be fresh."""
    torch.manual_seed(0)
    head: Any = Reader(vocabulary)
    token = torch.randint(vocabulary, (rows // LENGTH, LENGTH))
    document = torch.zeros_like(token)
    features = Features(token, torch.zeros(*token.shape, 0, WIDTH), torch.randn(*token.shape, WIDTH), document)
    drafts = [DepthOutput(torch.randn(*token.shape, WIDTH, requires_grad=True)) for _ in range(config.depths)]
    head.lm_head.weight.grad = torch.zeros_like(head.lm_head.weight)
    weight = loss_weights(document, trainable(document, torch.ones_like(token), config.depths), None, config).row / rows
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chunks = chunked(weight > 0, rows if whole else chunk_rows(head, "cpu", weight.numel()), weight.device)
    loss, _ = objective(head, drafts, features, weight, config, chunks)
    loss.backward()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


Product = tuple[Any, Any, Any]  # an operation, its arguments, and those by name


def copied(x: Tensor) -> Tensor:
    """Return a copy without a gradient."""
    return x.detach().clone()


class Products(TorchDispatchMode):
    """Notes the shapes of all matrix products that run."""

    def __init__(self, found: list[Product]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it if it is a product."""
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            named = tree_map_only(Tensor, copied, kwargs or {})
            self.found.append((func, tree_map_only(Tensor, copied, args), named))
        return func(*args, **(kwargs or {}))


def fastest(*runs: Callable[[], Any], repeats: int = 5) -> list[float]:
    """Return the least CPU seconds of each, taken in turn, so that what else the machine does falls on all alike."""
    spent: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, found in zip(runs, spent, strict=True):
            begin = time.process_time()
            run()
            found.append(time.process_time() - begin)
    return [min(found) for found in spent]


def step_over_products(target: Target, name: str, tokens: int) -> tuple[float, float]:
    """Return the seconds of a head's training step, and of its matrix products alone."""
    keep_freed()
    run = composed(f"head={name}")
    torch.manual_seed(0)
    head = HEADS[name](run.head, target.embeddings)
    token = torch.randint(target.embeddings.vocab_size, (tokens // LENGTH, LENGTH))
    document, config = torch.zeros_like(token), run.objective
    features = target.features(token, document, head.feature_layers)
    batch = Batch(token, document, torch.ones_like(token), torch.arange(len(token)))
    step_loss = Loss(head, config, compiled=False, autocast=False)
    anchors, weighed = step_loss.sample_rows(batch, row_keys(0, 0, batch.index))
    weight = weighed.row / token.numel()

    chunks = chunked(weight > 0, chunk_rows(head, "cpu", weight.numel()), weight.device)

    def step() -> None:
        head.zero_grad()
        loss, _ = objective(head, head.unroll(features, config.depths, anchors), features, weight, config, chunks)
        loss.backward()

    products: list[Product] = []
    with Products(products):
        step()

    def alone() -> None:
        with torch.no_grad():
            for func, args, named in products:
                func(*args, **named)

    taken, products_alone = fastest(step, alone)
    return taken, products_alone


def features_over_forward(target: Target, tokens: int) -> float:
    """Return the throughput of feature extraction over that of the bare model."""
    token = torch.randint(target.embeddings.vocab_size, (tokens // LENGTH, LENGTH))
    with torch.inference_mode():
        bare, ours = fastest(
            lambda: target.base(input_ids=token, use_cache=False),
            lambda: target.features(token, torch.zeros_like(token), (1, 2)),
        )
    return bare / ours


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What training a head costs.")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--model", default="", help="a target's folder; a random one of 110M parameters without it")
    parser.add_argument("--tokens", type=int, default=4 * LENGTH, help="of a step, in rows of 512")
    parser.add_argument("--heads", nargs="+", default=list(HEADS))
    parser.add_argument("--peak", choices=("chunked", "whole"))
    asked = parser.parse_args()
    config = replace(composed().objective, losses={"soft_ce": 1.0}, depths=2)
    if asked.peak:
        print(json.dumps(peak(config, asked.vocabulary, asked.rows, whole=asked.peak == "whole")))
        return
    print(device_facts(torch.device("cpu"), torch.float32))
    words = [sys.executable, __file__, "--vocabulary", str(asked.vocabulary), "--rows", str(asked.rows), "--peak"]
    found = {
        how: int(subprocess.run([*words, how], check=True, capture_output=True, text=True).stdout)
        for how in ("whole", "chunked")
    }
    print(f"loss of {asked.rows} rows, 2 depths, vocabulary {asked.vocabulary}: peak memory above its inputs")
    whole, chunked = found["whole"] / 2**20, found["chunked"] / 2**20
    print(f"all rows at once {whole:.0f} MiB, in chunks {chunked:.0f} MiB: {whole / chunked:.1f} times less")
    target = Target.load(asked.model, "float32", "cpu") if asked.model else random_target("float32")
    print("\na head's step over its matrix products alone")
    for name in asked.heads:
        step, products = step_over_products(target, name, asked.tokens)
        print(f"{name:10s} {1e3 * step:7.0f} ms, {1e3 * products:7.0f} ms, {step / products:.2f}")
    print(f"\nfeatures over the bare forward pass: {features_over_forward(target, asked.tokens):.3f}")


if __name__ == "__main__":
    main()
