"""Kept heads under several dynamic trees, beside the baseline: tokens per pass and tokens per second.

    python benchmarks/trees.py RUN_OR_HEAD… [--prompts 24] [--tokens 128] [--dtype bfloat16] [--trees 4,3,8 5,3,12]

A tree is depth, children of a node, nodes. Every prompt goes through all rows in a random order of its own before the
next one, so that what else the machine does falls on all of them alike; the first two prompts only warm up.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from hydra import compose, initialize_config_dir

from data.text.prompts import load_training
from eval.measures import metrics
from eval.measures.machine import device_facts
from heads.common.resolvers import register_resolvers
from heads.formats.hub import load_found, resolve_head
from inference.decode import Generation, RequestParams, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.config import RunConfig, run_config

WARMUP = 2
register_resolvers()


def row(target: Target, head: str, tree: TreeConfig, settings: RequestParams) -> Callable[[list[int]], Generation]:
    """Return what decodes a prompt with a head under a tree."""
    found: Any = load_found(resolve_head(head), target.embeddings, target.spec)
    drafter = HeadDrafter(found.eval().to(target.device, target.dtype), tree, head)

    def decode(prompt: list[int]) -> Generation:
        return speculate(target, drafter, prompt, settings)

    return decode


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Heads under several trees.")
    parser.add_argument("heads", nargs="+")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--trees", nargs="+", default=["4,3,8", "5,3,12", "6,4,16"])
    asked = parser.parse_args()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run: RunConfig = run_config(compose("train"))
    target = Target.load(run.model.path, asked.dtype, run.model.device)
    settings = RequestParams(asked.tokens, GREEDY)
    rows: dict[tuple[str, str], Callable[[list[int]], Generation]] = {
        ("plain", ""): lambda prompt: autoregress(target, prompt, settings)
    }
    for written in asked.trees:
        depth, top_k, nodes = map(int, written.split(","))
        tree = replace(run.tree, kind="dynamic", depth=depth, top_k=top_k, nodes=nodes)
        rows |= {(head, written): row(target, head, tree, settings) for head in asked.heads}
    made: dict[tuple[str, str], list[Generation]] = {name: [] for name in rows}
    seconds = dict.fromkeys(rows, 0.0)
    for i, prompt in enumerate(load_training(run.data, target.tokenizer, asked.prompts + WARMUP).held_out):
        order = list(rows)
        random.Random(i).shuffle(order)
        for name in order:
            begin = time.perf_counter()
            found = rows[name](prompt.token)
            if i >= WARMUP:
                seconds[name] += time.perf_counter() - begin
                made[name].append(found)
    rates = {name: sum(len(each.tokens) for each in made[name]) / seconds[name] for name in rows}
    print(device_facts(target.device, target.dtype))
    for (head, written), rate in rates.items():
        tau = metrics.acceptance(made[head, written]).tau or 1.0
        print(f"{head:40s} {written:8s} τ {tau:.2f} {rate:7.1f} tokens/s {rate / rates['plain', '']:.2f}x")


if __name__ == "__main__":
    main()
