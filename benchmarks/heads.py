"""Heads and training options side by side: the same target, data, tokens and verifier, features extracted once.

    python benchmarks/heads.py [--seeds 0 1 2] [--steps 200 800] --out table.jsonl [--prompts 24]
        [--figure FILE.svg] NAME OVERRIDES… [+ NAME OVERRIDES…]

Each row is a name and overrides of conf/train.yaml, rows are parted by `+`. All rows read the same packed sequences, in
an order that the seed gives, for as many steps and tokens as their own overrides say; with `--steps`, anew for each of
these lengths, with its whole schedule. A finished row and seed is a line of `table.jsonl`; what stands there already is
not run again. Without a row the file's table is printed alone; `--figure` draws τ against tokens and against seconds.
τ is that of the real verifier on held-out prompts, greedy, with the bootstrap's interval over prompts; cost is
parameters and CPU seconds of training without the target's passes. The heads are kept in
`runs/NAME-STEPS-SEED/head` beside the table, where `eval/run.py run=… compare=[…]` finds them.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from hydra import compose, initialize_config_dir
from torch import Tensor

from data.batches import pack, token_counts
from data.features.source import LiveFeatures
from data.text.masks import Sample
from data.text.prompts import load_training
from eval.measures import metrics
from heads import HEADS
from heads.base import Features, parameter_count
from heads.common.resolvers import register_resolvers
from heads.modules.vocab import choose_draft_vocab
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling
from train.build import batches_for, loop_of, values_of
from train.config import RunConfig, run_config
from train.loop import BestHead
from train.start import fit_init, init_head, resolve_init

register_resolvers()


class Extracted:
    """A target whose features of every packed sequence are kept, in bfloat16, for all layers that any head asks for."""

    def __init__(self, target: Target, layers: tuple[int, ...]) -> None:
        self.target, self.layers = target, layers
        self.kept: dict[bytes, tuple[Tensor, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def features(self, token: Tensor, document: Tensor, wanted: tuple[int, ...]) -> Features:
        """Return the features of packed sequences, from the target at first and then from memory."""
        keys = [row.numpy().tobytes() for row in token]
        new = [i for i, key in enumerate(keys) if key not in self.kept]
        if new:
            made = self.target.features(token[new], document[new], self.layers)
            for j, i in enumerate(new):
                self.kept[keys[i]] = (made.hidden[j].bfloat16(), made.last_hidden[j].bfloat16())
        hidden = torch.stack([self.kept[key][0][:, [self.layers.index(i) for i in wanted]] for key in keys])
        last = torch.stack([self.kept[key][1] for key in keys])
        return Features(token, hidden.float(), last.float(), document)


def train(run: RunConfig, target: Any, samples: Sequence[Sample], held_out: list[list[int]]) -> dict[str, Any]:
    """Train one head and measure it."""
    set_seed(run.trainer.seed)
    config, init = resolve_init(run.init, run.head, target.target)
    head: Any = init_head(config, init, target.target)
    run = replace(run, init=init)
    choose_draft_vocab(head, token_counts(samples, target.embeddings.vocab_size))
    accelerator = Accelerator(cpu=True)
    batches = batches_for(run.trainer, pack(samples, run.data.length), accelerator)
    fit_init(head, init, target.target, batches, run.trainer.steps)
    source = LiveFeatures(target, batches, head.feature_layers)
    loop = loop_of(run, accelerator, target.target, head, source, [], values_of(run), {})
    for step in range(run.trainer.steps):  # the target's passes, which are not timed
        for micro in source(step):
            micro.read()
    begin = time.process_time()
    for step in range(run.trainer.steps):
        loop.stepper(step, halted=lambda: False)
    seconds = time.process_time() - begin
    loop.tracker.close()
    weights = loop.stepper.state.weights()
    best_head = BestHead(Path(run.out, "head"), head, target.target, run.tree)
    best_head.write(weights)
    made = best_head.decoding(weights)
    tokens = run.trainer.steps * batches.step_tokens + loop.progress["rollout_tokens"]
    found: dict[str, Any] = {
        "tokens": tokens,
        "parameters": parameter_count(head),
        "train_seconds": round(seconds, 1),
    }
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, 0, 1.0) if temperature else GREEDY
        source = HeadDrafter(made, run.tree, run.head.name)
        runs = [
            speculate(target.target, source, prompt, RequestParams(run.trainer.eval_tokens, sampling, seed=i))
            for i, prompt in enumerate(held_out)
        ]
        got, at = metrics.acceptance(runs), f"T{temperature:.0f}"
        found[f"tau_{at}"], found[f"interval_{at}"] = got.tau, metrics.tau_interval(runs, 0)
        found[f"accepted_{at}"] = [round(each, 3) for each in got.accepted_by_depth]
    return found


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description="Heads and training options side by side.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, nargs="+", help="lengths to train every row for")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--figure", type=Path)
    asked, words = parser.parse_known_args()
    rows: list[list[str]] = [[]]
    for word in words:
        rows = [*rows, []] if word == "+" else [*rows[:-1], [*rows[-1], word]]
    if asked.steps:
        rows = [[*row, f"trainer.steps={n}"] for row in rows if row for n in asked.steps]
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    done = [json.loads(line) for line in lines]
    there = [(row["name"], row["overrides"], row["seed"]) for row in done]
    todo = [(row, seed) for seed in asked.seeds for row in rows if row and (row[0], row[1:], seed) not in there]
    if todo:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            overrides = [["launcher=inline", *row[1:], f"trainer.seed={seed}"] for row, seed in todo]
            runs = [(*each, run_config(compose("train", its))) for each, its in zip(todo, overrides, strict=True)]
            first = checked([run for _, _, run in runs])
            target = Target.load(first.model.path, "float32", "cpu")
            layers = sorted(
                {i for _, _, run in runs for i in HEADS[run.head.name](run.head, target.embeddings).feature_layers}
            )
            extracted = Extracted(target, tuple(layers))
            data = load_training(first.data, target.tokenizer, asked.prompts)
            samples, held_out = data.samples, [prompt.token for prompt in data.held_out]
            for row, seed, run in runs:
                out = asked.out.parent / "runs" / f"{row[0]}-{run.trainer.steps}-{seed}"
                out.mkdir(parents=True, exist_ok=True)
                begin = time.time()
                measured = train(replace(run, out=str(out)), extracted, samples, held_out)
                found = {"name": row[0], "seed": seed, "overrides": row[1:], **measured}
                found["seconds"] = round(time.time() - begin)
                with asked.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                done.append(found)
                print(found, flush=True)
    table(done)
    if asked.figure:
        asked.figure.write_text(figure(done))


def checked(runs: list[RunConfig]) -> RunConfig:
    """Return the first of some runs; refuse others on another target or other data."""
    if any((run.model, run.data) != (runs[0].model, runs[0].data) for run in runs):
        raise SystemExit("rows differ in model or data, and all read the same: run them apart, with one --out")
    return runs[0]


def table(done: list[dict[str, Any]]) -> None:
    """Print a line a name and length: means over seeds and their spread."""
    for name, tokens in dict.fromkeys((row["name"], row["tokens"]) for row in done):
        mine = [row for row in done if (row["name"], row["tokens"]) == (name, tokens)]
        taus = [row["tau_T0"] for row in mine]
        spread = statistics.stdev(taus) if len(taus) > 1 else 0.0
        hot = statistics.mean(row["tau_T1"] for row in mine)
        print(
            f"{name:24s} {tokens:>9,}  tau {statistics.mean(taus):.3f} ± {spread:.3f} ({len(mine)})  T=1 {hot:.3f}  "
            f"{mine[0]['parameters']:>10,}  {statistics.mean(r['train_seconds'] for r in mine):6.0f} s  "
            f"{mine[0]['accepted_T0']}"
        )


def figure(done: list[dict[str, Any]]) -> str:
    """Return τ against tokens and against seconds, a line a name through its means over seeds, as SVG."""
    import vl_convert

    base = {
        "width": 420,
        "height": 320,
        "mark": {"type": "line", "point": True},
        "encoding": {
            "y": {
                "field": "tau_T0",
                "aggregate": "mean",
                "title": "τ",
                "scale": {"zero": False},
                "type": "quantitative",
            },
            "color": {
                "field": "name",
                "type": "nominal",
                "title": "head",
                "sort": list(dict.fromkeys(row["name"] for row in done)),
            },
        },
    }
    means = [{"op": "mean", "field": field, "as": field} for field in ("train_seconds", "tau_T0")]
    axis = {"type": "quantitative", "scale": {"type": "log", "nice": False}, "axis": {"format": "~s"}}
    by_tokens = {"field": "tokens", "title": "training tokens", **axis}
    by_seconds = {"field": "train_seconds", "title": "CPU seconds of training, target's passes apart", **axis}
    panels = [
        {**base, "encoding": {**base["encoding"], "x": by_tokens}},
        {
            **base,
            "transform": [{"aggregate": means, "groupby": ["name", "tokens"]}],
            "encoding": {**base["encoding"], "x": by_seconds},
        },
    ]
    whole = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "data": {"values": done},
        "hconcat": panels,
    }
    return str(vl_convert.vegalite_to_svg(json.dumps(whole)))


if __name__ == "__main__":
    main()
