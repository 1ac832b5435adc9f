"""Throughput and latency in batches, on a target of 110M random weights.

    python benchmarks/batches.py [--dtype float32] [--batches 1 2 4 8 16 32] [--tokens 48] [--rounds 2]
    python benchmarks/batches.py --drafters suffix prompt_lookup    # on repetitive text, tokens a CPU second

The baseline, a chain and a tree decode the same requests, some shorter than others, in turns. Drafts are read from the
target's own answers and cost nothing: how many requests share a pass decides what pays here, not how good a head is.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from omegaconf import OmegaConf

from benchmarks.engine import random_prompts, random_target, readers
from data.text.prompts import Prompt
from eval.measures.machine import device_facts
from inference.decode import RequestParams, autoregress, speculate
from inference.drafters.plain import Baseline
from inference.drafters.registry import make
from inference.protocol import Drafter
from inference.target.config import DTYPES
from inference.target.target import Target
from inference.verification.sample import GREEDY
from ops.audit import stops_paying

LENGTHS = (1.0, 0.8, 0.9, 0.7)  # of the requests, in turn, as shares of the longest
Measured = dict[str, list[tuple[float, float]]]  # by source, a round each: tokens per second, seconds of a request


def requests(prompts: list[Prompt], tokens: int, size: int) -> tuple[list[list[int]], list[RequestParams]]:
    """Return as many requests, each with its length."""
    order = [i % len(prompts) for i in range(size)]
    return [prompts[i].token for i in order], [RequestParams(round(LENGTHS[i] * tokens), GREEDY) for i in order]


def measured(
    target: Target, sources: dict[str, Drafter], prompts: list[Prompt], size: int, asked: argparse.Namespace
) -> Measured:
    """Decode the requests with every source in turn."""
    found: Measured = {name: [] for name in sources}
    token, settings = requests(prompts, asked.tokens, size)
    for _ in range(asked.rounds):
        for name, source in sources.items():
            begin = time.perf_counter()
            made = speculate(target, source, token, settings, batch_size=size)
            spent = time.perf_counter() - begin - sum(run.prefill_s for run in made)
            rate = sum(len(run.tokens) - 1 for run in made) / spent
            found[name].append((rate, statistics.median(run.latency_s for run in made)))
    return found


def on_repetitive_text(names: list[str], asked: argparse.Namespace) -> None:
    """Print the tokens per CPU second of drafters without a head on the bundled target, whose prompts repeat a text.

    Each prompt repeats another text, and there are twice as many requests as slots, so that drafts differ in length.
    """
    target = Target.load(str(ROOT / "examples" / "tiny"), asked.dtype, "cpu")
    ids = target.tokenizer((ROOT / "examples" / "tiny" / "recipe.py").read_text(encoding="utf-8")).input_ids
    prompts = list[list[int]]()
    for i in range(2 * max(asked.batches)):
        begin, end = 61 * i + 37, 61 * i + 67 + 7 * (i % 9)
        prompts.append([*ids[11 * i : 11 * i + 25], *ids[begin:end] * 3, *ids[begin : begin + 5 + i % 4]])
    drafters: dict[str, Drafter] = {"baseline": Baseline(target.device)}
    for name in names:
        options: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "drafter" / f"{name}.yaml"))
        drafters[name] = make(name, options, target)
    for size in asked.batches:
        some, rates = prompts[: max(2 * size, 4)], []
        first = [RequestParams(1, GREEDY)] * len(some)
        settings = [RequestParams(round(LENGTHS[i % 4] * asked.tokens), GREEDY) for i in range(len(some))]
        for drafter in drafters.values():
            best = 0.0
            for _ in range(asked.rounds):
                spent = [time.process_time()]
                for params in (first, settings):  # the prompts alone, which are taken off
                    drafter.reset()
                    made = speculate(target, drafter, some, params, batch_size=size)
                    spent.append(time.process_time())
                seconds = (spent[2] - spent[1]) - (spent[1] - spent[0])
                best = max(best, sum(len(one.tokens) - 1 for one in made) / seconds)
            rates.append(best)
        print(f"{size:5}" + "".join(f"{name:>15} {rate:8.1f}" for name, rate in zip(drafters, rates, strict=True)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Throughput and latency in batches.")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--drafters", nargs="*", default=[])
    asked = parser.parse_args()
    if asked.drafters:
        on_repetitive_text(asked.drafters, asked)
        return
    target, prompts = random_target(asked.dtype), random_prompts(len(LENGTHS))
    settings = RequestParams(asked.tokens, GREEDY)
    answers = {tuple(each.token): autoregress(target, each.token, settings).tokens for each in prompts}
    drafts = readers(answers)
    print(f"{device_facts(target.device, target.dtype)}\ntokens a second, seconds of a request, speedup")
    print(f"{'batch':>5}" + "".join(f"{name:>9} tok/s  latency s" for name in ("plain", *drafts)), end="")
    print("".join(f"{name:>9}" for name in drafts))
    gains: dict[str, dict[int, float]] = {name: {} for name in drafts}
    for size in sorted({1, *asked.batches}):
        runs = measured(target, {"plain": Baseline(target.device), **drafts}, prompts, size, asked)
        middle = {name: [statistics.fmean(each) for each in zip(*rounds, strict=True)] for name, rounds in runs.items()}
        line = f"{size:5}" + "".join(f"{rate:15.1f} {wait:10.2f}" for rate, wait in middle.values())
        for name in drafts:
            gains[name][size] = middle[name][0] / middle["plain"][0]
            line += f"{gains[name][size]:9.2f}"
        print(line, flush=True)
    for name, found in gains.items():
        print(f"batch size from which on a {name} no longer pays: {stops_paying(found) or 'none tried'}")


if __name__ == "__main__":
    main()
