"""Learning curves of heads on small targets, and how often the forecast's intervals hold what came out later.

    python benchmarks/forecast.py record curves.jsonl --target NAME --prompts FILE [--heads mlp eagle] [--seeds 0 1]
        [--steps 25 50 100 200 400] [--set model.path=… data.path=…]
    python benchmarks/forecast.py coverage curves.jsonl [--figure docs/heads_scaling.svg]

The first trains every head and seed that is not in the file to every length, as a training within a budget does: each
length is a whole training, and the next goes on from before its cooldown. A line of the file has the tokens and passes
of every prompt at every length, greedy chains to depth 5 along the target's own answers.

The second forecasts the later points from the earlier ones, three and more, all heads of a target and seed together.
The prompts are halved at random, six times: one half measures the earlier points, the other says what came out, so that
an interval has to hold the sampling of both. `--figure` does the same, without prompts, with the figure of
docs/heads.md, whose points are trainings with a whole cosine each.
"""

import argparse
import itertools
import json
import re
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np
from accelerate import Accelerator
from accelerate.utils import set_seed
from hydra import compose, initialize_config_dir

from benchmarks.heads import Extracted
from data.batches import pack, token_counts
from data.features.source import Live
from data.text.prompts import load_prompts, load_samples
from eval.inputs.texts import write
from eval.offline.teacher_forced import record, replay
from heads import HEADS
from heads.base import parameter_count
from heads.common.resolvers import register_resolvers
from heads.modules.vocab import prune
from inference.decode import Settings
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.config import RunConfig, run_config
from train.forecast.curve import Curve, forecast, interval
from train.loop import decoding_copy
from train.optim import cooldown_begin
from train.run import batches_for, loop_of
from train.start import first_head, fit_start, resolve_init

HEADS_TRIED = ["medusa", "mlp", "eagle", "mtp", "eagle3"]
LEAST = 3  # points that a forecast is made from
HALVINGS = 6
STEPS = [25, 50, 100, 200, 400]
COMMON = [
    "data.length=256", "trainer.batch_tokens=512", "trainer.micro_tokens=512", "trainer.precision=fp32",
    "model.dtype=float32", "model.device=cpu", "data.cache=null", "launcher.strategy=ddp", "tree=chain",
    "tree.depth=5",
]  # fmt: skip
Case = tuple[str, float, tuple[float, float, float]]  # a group, what came out, and the median and interval of it


def at(run: RunConfig, steps: int) -> RunConfig:
    """Return a run of so many steps, whose warm-up does not depend on their number."""
    trainer = replace(run.trainer, steps=steps, warmup=20 / steps, cooldown=0.2)
    return replace(run, trainer=trainer)


def curve(run: RunConfig, target: Any, samples: Any, texts: Any, lengths: list[int]) -> dict[str, Any]:
    """Train a head to every length, each from the constant rate of the one before; measure each."""
    snapshot: dict[str, Any] = {}
    start, points, seconds, parameters = 0, [], 0.0, 0
    for steps in lengths:
        this = at(run, steps)
        set_seed(run.trainer.seed)
        config, init = resolve_init(this.init, this.head, target.target)
        head: Any = first_head(config, init, target.target)
        prune(head, token_counts(samples, target.embeddings.vocab_size))
        accelerator = Accelerator(cpu=True)
        batches = batches_for(this, pack(samples, this.data.length), accelerator)
        fit_start(head, init, target.target, batches)
        loop = loop_of(this, accelerator, target.target, head, Live(target, batches, head.feature_layers), [])
        for name, value in snapshot.items():
            loop.step.state.write(name, value)
        begin, stable = time.process_time(), cooldown_begin(this.trainer)
        for step in range(start, steps):
            if step == stable:
                snapshot = {name: loop.step.state.read(name) for name in loop.step.state.names()}
            loop.step(step, halted=lambda: False)
        seconds += time.process_time() - begin
        start = stable
        loop.tracker.close()
        copy = decoding_copy(head, loop.step.state.weights(), target.target)
        depth = min(run.tree.depth, head.max_depth)
        records = [record(target.target, copy, text, [], depth) for text in texts]
        counts = [[one.text.generated - 1, len(replay(one, run.tree))] for one in records]
        points.append({"tokens": steps * run.trainer.batch_tokens, "counts": counts})
        parameters = parameter_count(head)
    return {"points": points, "seconds": round(seconds, 1), "parameters": parameters, "bound": 1 + run.tree.deepest}


def record_all(given: argparse.Namespace) -> None:
    """Record what is missing."""
    done = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    there = {(row["target"], row["head"], row["seed"]) for row in done}
    todo = [(head, seed) for seed in given.seeds for head in given.heads if (given.target, head, seed) not in there]
    if not todo:
        return
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        words = [[f"head={head}", *COMMON, f"trainer.seed={seed}", *given.set] for head, seed in todo]
        runs = [run_config(compose("train", these)) for these in words]
    target = Target.load(runs[0].model.path, "float32", "cpu")
    layers = {i for run in runs for i in HEADS[run.head.name](run.head, target.embeddings).feature_layers}
    extracted = Extracted(target, tuple(sorted(layers)))
    samples = load_samples(runs[0].data, target.tokenizer)
    prompts = [prompt.token for prompt in load_prompts(given.prompts, target.tokenizer, given.count)]
    texts = write(target, prompts, Settings(64, GREEDY))
    for (head, seed), run in zip(todo, runs, strict=True):
        with tempfile.TemporaryDirectory() as out:
            measured = curve(replace(run, out=out), extracted, samples, texts, given.steps)
        row = {"target": given.target, "head": head, "seed": seed, **measured}
        with given.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(given.target, head, seed, [round(point.sum(0)[0] / point.sum(0)[1], 2) for point in counts_of(row)])


def counts_of(row: dict[str, Any]) -> Any:
    """Return the counts of a line: [points, prompts, 2]."""
    return np.array([point["counts"] for point in row["points"]], dtype=float)


def cases(rows: list[dict[str, Any]]) -> list[Case]:
    """Return the forecasts of every target and seed, and what came out on the other half of the prompts."""
    result: list[Case] = []
    for group in dict.fromkeys((row["target"], row["seed"]) for row in rows):
        mine = [row for row in rows if (row["target"], row["seed"]) == group]
        tokens = np.array([point["tokens"] for point in mine[0]["points"]], dtype=float)
        counts = [counts_of(row) for row in mine]
        prompts = counts[0].shape[1]
        for halving, points in itertools.product(range(HALVINGS), range(LEAST, len(tokens))):
            order = np.random.default_rng(halving).permutation(prompts)
            seen, others = order[: prompts // 2], order[prompts // 2 :]
            bounds = [float(row["bound"]) for row in mine]
            curves = [Curve(tokens[:points], one[:points, seen], b) for one, b in zip(counts, bounds, strict=True)]
            forecasts = forecast(curves, [tokens[points:].tolist()] * len(mine), len(others))
            for one, samples in zip(counts, forecasts, strict=True):
                came = one[points:, others].sum(1)
                pairs = zip(came[:, 0] / came[:, 1], map(interval, samples), strict=True)
                result += [(f"{group[0]}, seed {group[1]}", float(tau), seen) for tau, seen in pairs]
    return result


def figure_cases(text: str) -> list[Case]:
    """Return the forecasts of a figure's heads, taken as measured without an error of sampling."""
    points: dict[str, dict[float, float]] = {}
    for tokens, tau, head in re.findall(r'aria-label="training tokens: (\d+); τ: ([\d.]+); head: (\w+)"', text):
        points.setdefault(head, {})[float(tokens)] = float(tau)
    lengths = sorted(next(iter(points.values())))
    result: list[Case] = []
    for count in range(LEAST, len(lengths)):
        curves = [
            Curve(np.array(lengths[:count]), np.array([[[63.0, 63 / head[n]]] * 2 for n in lengths[:count]]), 6.0)
            for head in points.values()
        ]
        forecasts = forecast(curves, [lengths[count:]] * len(curves), 2)
        for head, samples in zip(points.values(), forecasts, strict=True):
            result += [("the figure", head[n], interval(x)) for n, x in zip(lengths[count:], samples, strict=True)]
    return result


def coverage(given: argparse.Namespace) -> None:
    """Print, by group, how often the interval holds what came out, its width and the median's error."""
    found = cases([json.loads(line) for line in given.file.read_text().splitlines()])
    found += figure_cases(given.figure.read_text(encoding="utf-8")) if given.figure else []
    print(
        "| curves | forecasts | within the 90 % interval | above it | below it | width / τ | median / what came out |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for group in [*dict.fromkeys(case[0] for case in found), "all"]:
        mine = [case for case in found if group in (case[0], "all")]
        held, above, below = (
            np.mean([inside(tau, low, high) for _, tau, (_, low, high) in mine])
            for inside in (lambda t, a, b: a <= t <= b, lambda t, _, b: t > b, lambda t, a, _: t < a)
        )
        width = np.mean([(high - low) / middle for _, _, (middle, low, high) in mine])
        error = np.mean([middle / tau for _, tau, (middle, _, _) in mine])
        print(f"| {group} | {len(mine)} | {held:.0%} | {above:.0%} | {below:.0%} | {width:.2f} | {error:.2f} |")


def main() -> None:
    """Record, or compare."""
    parser = argparse.ArgumentParser(description="Learning curves, and how often their forecasts hold.")
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--target", required=True)
    recording.add_argument("--prompts", required=True)
    recording.add_argument("--heads", nargs="+", default=HEADS_TRIED)
    recording.add_argument("--seeds", type=int, nargs="+", default=[0])
    recording.add_argument("--steps", type=int, nargs="+", default=STEPS)
    recording.add_argument("--count", type=int, default=40, help="prompts at most")
    recording.add_argument("--set", nargs="*", default=[], help="overrides of every run")
    recording.set_defaults(run=record_all)
    comparing = commands.add_parser("coverage")
    comparing.add_argument("file", type=Path)
    comparing.add_argument("--figure", type=Path)
    comparing.set_defaults(run=coverage)
    register_resolvers()
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
