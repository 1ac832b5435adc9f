"""Throughput and latency in batches, measured and as the tuner predicts them, on a target of 110M random weights.

    python benchmarks/batches.py [--dtype float32] [--batches 1 2 4 8 16 32] [--tokens 48] [--rounds 2]
    python benchmarks/batches.py --drafters suffix prompt_lookup    # on repetitive text, tokens a CPU second

The baseline, a chain and a tree decode the same requests, some shorter than others, in turns. The tuner's prediction
comes from its measured costs and from the steps that each request takes alone. Drafts are read from the target's own
answers and cost nothing: how many requests share a pass decides what pays here, not how good a head is.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from omegaconf import OmegaConf

from benchmarks.engine import PROMPT, TRUE, random_prompts, random_target, readers
from data.text.prompts import Prompt
from eval.inputs.workloads import Text
from eval.measures.cost_model import Costs, Replayed, ReplayedStep, draft_key, predict, stops_paying
from eval.measures.machine import device_facts
from eval.tuning import costs as costing
from inference.decode import RequestParams, autoregress, speculate
from inference.drafters.plain import Baseline
from inference.drafters.policy import TreeConfig
from inference.drafters.registry import make
from inference.protocol import Drafter
from inference.target.config import DTYPES
from inference.target.target import Target
from inference.verification.sample import GREEDY

DRAFT = TreeConfig("chain", TRUE, 0, 0, [], [])  # in the tree, too, the path is a prefix of the nodes
SIZES = (0, TRUE, 8)
LENGTHS = (1.0, 0.8, 0.9, 0.7)  # of the requests, in turn, as shares of the longest
Measured = dict[str, list[tuple[float, float]]]  # by source, a round each: tokens per second, seconds of a request


def requests(prompts: list[Prompt], tokens: int, size: int) -> tuple[list[list[int]], list[RequestParams]]:
    """Return as many requests, each with its length."""
    order = [i % len(prompts) for i in range(size)]
    return [prompts[i].token for i in order], [RequestParams(round(LENGTHS[i] * tokens), GREEDY) for i in order]


def replayed(target: Target, source: Drafter, prompts: list[Prompt], tokens: int) -> list[Replayed]:
    """Return the steps that each request takes, by decoding it alone."""
    found = []
    for token, settings in zip(*requests(prompts, tokens, len(prompts)), strict=True):
        made = speculate(target, source, token, settings)
        steps = [ReplayedStep(step.drafted, step.accepted) for step in made.steps]
        found.append(Replayed(steps, len(made.tokens) - 1))
    return found


def priced(target: Target, texts: list[Text], settings: RequestParams, size: int, samples: int) -> Costs:
    """Return the tuner's costs at a batch size, for drafts that cost nothing."""
    return replace(
        costing.measure(target, None, texts, [], SIZES, samples, settings, size), draft={draft_key(DRAFT): 0.0}
    )


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
                for how in (first, settings):  # the prompts alone, which are taken off
                    drafter.reset()
                    made = speculate(target, drafter, some, how, batch_size=size)
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
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--drafters", nargs="*", default=[])
    asked = parser.parse_args()
    if asked.drafters:
        on_repetitive_text(asked.drafters, asked)
        return
    target, prompts = random_target(asked.dtype), random_prompts(len(LENGTHS))
    settings = RequestParams(asked.tokens, GREEDY)
    answers = {tuple(each.token): autoregress(target, each.token, settings).tokens for each in prompts}
    texts = [Text([*prompt, *made], PROMPT, asked.tokens) for prompt, made in answers.items()]
    drafts = readers(answers)
    steps = {name: replayed(target, source, prompts, asked.tokens) for name, source in drafts.items()}
    print(f"{device_facts(target.device, target.dtype)}\nspeedups over the baseline, predicted and measured")
    print(f"{'batch':>5}" + "".join(f"{name:>9} tok/s  latency s" for name in ("plain", *drafts)), end="")
    print("".join(f"{name:>9} pred. meas.   off by" for name in drafts))
    costs: dict[int, Costs] = {}
    gains: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in drafts}
    for size in sorted({1, *asked.batches}):
        costs[size] = priced(target, texts, settings, size, asked.samples)
        runs = measured(target, {"plain": Baseline(target.device), **drafts}, prompts, size, asked)
        middle = {name: [statistics.fmean(each) for each in zip(*rounds, strict=True)] for name, rounds in runs.items()}
        line = f"{size:5}" + "".join(f"{rate:15.1f} {wait:10.2f}" for rate, wait in middle.values())
        for name, each in steps.items():
            texts_of = [each[i % len(each)] for i in range(size)]
            expected = predict(texts_of, DRAFT, costs, size).speedup
            gain = middle[name][0] / middle["plain"][0]
            gains[name][size] = expected, gain
            line += f"{expected:15.2f} {gain:5.2f} {expected / gain - 1:+8.1%}"
        print(line, flush=True)
    for name, found in gains.items():
        embeddings = [stops_paying({size: pair[i] for size, pair in found.items()}) for i in range(2)]
        told = ["none tried" if end is None else str(end) for end in embeddings]
        print(f"batch size from which on a {name} no longer pays: predicted {told[0]}, measured {told[1]}")


if __name__ == "__main__":
    main()
