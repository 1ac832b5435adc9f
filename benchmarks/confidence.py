"""Whether a head's confidence should decide how deep it drafts and which nodes are verified: a replay at given prices.

    python benchmarks/confidence.py RUN_OR_HEAD… [--batches 1 16 64] [--texts 64] [--tokens 96] [--out FILE.json]

The target answers the corpus' last prompts greedily; heads trained with `data.prompts= data.held_out=64` have not seen
them (benchmarks/heads.py trains and keeps some). After every token of the answers the head grows its dynamic trees,
with the probability of each node's path and whether the target accepts it. A step's parts are priced twice: in the
engine on this device (eval/tuning/costs.py), and as benchmarks/h100_estimate.py estimates them for an 8B on an H100.
Full batches are then replayed step by step under these policies:

    fixed      the dynamic tree, or chain, of one top_k, depth and budget: what the tuner chooses among
    order      the same, its nodes ranked by calibrated probability
    nodes      one top_k and depth; of each batch the nodes are verified whose tokens are worth their price
    padded     the same, as many nodes of every sequence: what a pass of one shape can verify
    stop       as nodes; no further level is drafted once what reaches it is worth less than a share of its price
    hindsight  as nodes, to the depth that is worth most once the probabilities of all levels are known
    oracle     as hindsight, for a confidence that is always right: a bound for every other one

Three quarters of the texts choose a policy's numbers and fit the calibration (isotonic, by depth); it is replayed along
the last quarter, each in turn. A gain is over the fixed tree's tokens a second, with the paired bootstrap's interval
over texts. `nodes`, `stop`, `hindsight` and `oracle` verify ragged trees at the price of their nodes, as no pass here
does yet, and no decision costs anything: both favour adapting. benchmarks/confidence_replay.py has the policies.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np
import torch
from hydra import compose, initialize_config_dir

from benchmarks import h100_estimate as h100
from benchmarks.confidence_replay import (
    KINDS,
    WIDEST,
    Array,
    Nodes,
    Outcome,
    Policy,
    Prices,
    calibrated,
    chosen,
    play,
    ranked,
)
from data.text.prompts import held_out_prompts
from eval.inputs.workloads import Text, write
from eval.measures import metrics
from eval.measures.cost_model import between, draft_key
from eval.measures.machine import device_facts
from eval.tuning import costs as costing
from heads.common.resolvers import register_resolvers
from heads.formats.hub import load_found, resolve_head
from inference.decode import Settings
from inference.drafters.head import HeadDrafter, HeadState
from inference.drafters.policy import TreeConfig, candidates
from inference.protocol import Commit, Context
from inference.target.model import TargetOutput
from inference.target.target import Target
from inference.verification.rng import Generator
from inference.verification.sample import GREEDY
from train.config import run_config

register_resolvers()
TOPS, DEEPEST = (1, 2, 4, 8), 8
SIZES, DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (1, 2, 3, 5, DEEPEST)  # that are timed
SAMPLES = {1: 16, 16: 8}  # of every price, by batch size
H100_BATCHES = (1, 16, 32)
LEVEL, STEP = 62, 64  # operations of a drafted level and of a step's rest (benchmarks/step_counts.py)
FOLDS, CHOOSING = 4, 48  # parts of the texts; texts that a policy is chosen on, at most
LEAST = 0.01  # the path probability of nodes whose calibration is reported


def dynamic(top_k: int, depth: int) -> TreeConfig:
    """Return the tree that is priced: a chain for a top_k of 1."""
    return TreeConfig("chain" if top_k == 1 else "dynamic", depth, top_k, WIDEST, [], [])


@torch.inference_mode()
def record(target: Target, head: Any, text: Text) -> dict[int, Nodes]:
    """Grow trees of every top_k after each token of a text."""
    token, nodes = torch.tensor(text.token), {top_k: list[Nodes]() for top_k in TOPS}
    features = target.features(token[None], torch.zeros_like(token)[None], head.feature_layers)
    state, done, depth = HeadState(head, dynamic(1, 1)), 0, min(DEEPEST, head.max_depth)
    for root in range(text.start, len(text.token) - 1):
        output = TargetOutput(features.hidden[:, done:root], features.last[:, done:root], None)
        state.update(Commit(token[done + 1 : root + 1], output, None))
        done, context = root, Context(text.token[: root + 1], GREEDY, Generator(0, target.device), depth)
        for top_k in TOPS:
            nodes[top_k].append(grown(state, top_k, context, text.token[root + 1 :]))
    return {top_k: joined(rows) for top_k, rows in nodes.items()}


def grown(state: HeadState, top_k: int, context: Context, following: Sequence[int]) -> Nodes:
    """Return all nodes that a dynamic tree drafts after one token, given those that follow it."""
    config = TreeConfig("dynamic", context.room, top_k, 10**4, [], [])
    assert state.level is not None
    tree, score = candidates(state.head, state.state, state.level, config, context)
    token, parent = tree.token.tolist(), tree.parent.tolist()
    depth, right = [0], [True]
    for node in range(1, len(token)):
        depth.append(depth[parent[node]] + 1)
        right.append(right[parent[node]] and [token[node]] == following[depth[node] - 1 : depth[node]])
    return Nodes(score[None, 1:].cpu().numpy(), np.array([right[1:]]), np.array([parent[1:]]) - 1, np.array(depth[1:]))


def joined(nodes: Sequence[Nodes]) -> Nodes:
    """Return the nodes after several tokens, or of several texts, as one."""
    score, right, parent, depth = zip(*nodes, strict=True)
    return Nodes(np.concatenate(score), np.concatenate(right), np.concatenate(parent), depth[0])


def measured(target: Target, head: Any, texts: Sequence[Text], batch: int, settings: Settings) -> Prices:
    """Price a step's parts on this device."""
    depths = sorted({min(depth, head.max_depth) for depth in DEPTHS})
    trees = {top_k: [dynamic(top_k, depth) for depth in depths] for top_k in TOPS}
    drafter, timed = HeadDrafter(head, dynamic(4, 5), "head"), list(chain.from_iterable(trees.values()))
    costs = costing.measure(target, drafter, texts, timed, SIZES, SAMPLES.get(batch, 6), settings, batch)
    sizes = range(SIZES[-1] + 1)
    verify = {
        branches: np.array([between(costs.verify, n) + between(settle, n) for n in sizes])
        for branches, settle in zip((False, True), costs.settle, strict=True)
    }
    draft = {}
    for top_k, sized in trees.items():
        seconds = {tree.depth: costs.draft[draft_key(tree)] for tree in sized}
        draft[top_k] = np.array([0, *(between(seconds, depth) for depth in range(1, depths[-1] + 1))])
    return Prices(batch, verify, draft, np.array([between(costs.commit, n) for n in range(DEEPEST + 2)]))


def estimated(batch: int) -> Prices:
    """Price a step's parts on an H100 for an 8B and its EAGLE-3 head, as in ../shared/reference/gpu_path.md."""
    costs = [h100.Cost(0, 0, 12, STEP, 0, 1 + nodes) for nodes in range(WIDEST + 1)]
    passes = np.array([sum(h100.seconds(cost, batch, "compiled").values()) for cost in costs])
    weights = h100.HEAD + h100.HEAD_LM
    level = {top_k: max(weights / h100.BANDWIDTH, weights * batch * top_k / h100.PRODUCTS) for top_k in TOPS}
    levels = 1 + np.arange(DEEPEST + 1)  # one to extend by what was committed
    draft = {top_k: levels * (seconds + LEVEL * h100.KERNEL) for top_k, seconds in level.items()}
    return Prices(batch, dict.fromkeys((False, True), passes), draft, np.zeros(DEEPEST + 2))


def errors_of_calibration(nodes: Nodes, p: Array) -> dict[str, list[float]]:
    """Return the expected calibration error by depth of the head's probabilities and of `p`, over nodes above LEAST."""
    errors = defaultdict(list)
    for depth in np.unique(nodes.depth):
        inside = (nodes.depth == depth) & (nodes.score > np.log(LEAST))
        for name, probs in (("raw", np.exp(nodes.score)), ("calibrated", p)):
            group = np.minimum((10 * probs[inside]).astype(int), 9)
            gap = np.bincount(group, probs[inside] - nodes.right[inside])
            errors[name].append(round(float(np.abs(gap).sum() / inside.sum()), 3))
    return errors


def compare(
    recorded: Mapping[int, Nodes], lengths: Sequence[int], prices: Mapping[str, Prices]
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Choose and replay all policies at all prices; return a row for each of the prices, and the calibration."""
    rows, texts = np.repeat(np.arange(len(lengths)), lengths) % FOLDS, np.arange(len(lengths)) % FOLDS
    outcomes: dict[tuple[str, str], list[tuple[Policy, Outcome]]] = defaultdict(list)
    fitted = {top_k: np.zeros_like(nodes.score) for top_k, nodes in recorded.items()}
    raw = {top_k: ranked(nodes, np.exp(nodes.score), top_k) for top_k, nodes in recorded.items()}
    perfect = {top_k: ranked(nodes, nodes.right.astype(float), top_k) for top_k, nodes in recorded.items()}
    for fold in range(FOLDS):
        probs = {top_k: calibrated(nodes, rows != fold) for top_k, nodes in recorded.items()}
        for top_k, p in probs.items():
            fitted[top_k][rows == fold] = p[rows == fold]
        ranks = {top_k: ranked(nodes, probs[top_k], top_k) for top_k, nodes in recorded.items()}
        sources = dict.fromkeys(KINDS, ranks) | {"fixed": raw, "oracle": perfect}
        train, test = np.flatnonzero(texts != fold)[:CHOOSING], np.flatnonzero(texts == fold)
        for name, price in prices.items():
            rate = 0.0
            for kind in KINDS:
                policy = chosen(kind, sources[kind], price, lengths, train, rate)
                rate = rate or play(policy, lengths, train).rate
                outcomes[name, kind].append((policy, play(policy, lengths, test)))
    table = [row(name, price, {kind: outcomes[name, kind] for kind in KINDS}) for name, price in prices.items()]
    return table, errors_of_calibration(recorded[TOPS[-1]], fitted[TOPS[-1]])


def row(name: str, prices: Prices, outcomes: Mapping[str, Sequence[tuple[Policy, Outcome]]]) -> dict[str, Any]:
    """Return the results at some prices: of each policy its numbers, its means, and its gain over the fixed tree."""
    pairs = {
        kind: [pair for _, out in folds for pair in zip(out.tokens.tolist(), out.seconds.tolist(), strict=True)]
        for kind, folds in outcomes.items()
    }
    results: dict[str, Any] = {"prices": name, "batch": prices.batch}
    results["baseline"] = prices.batch / float(prices.verify[False][0])
    for kind, folds in outcomes.items():
        means = {key: np.mean([getattr(out, key) for _, out in folds]) for key in ("tau", "nodes", "depth")}
        results[kind] = {key: round(float(value), 2) for key, value in means.items()}
        results[kind]["policies"] = [policy.label for policy, _ in folds]
        results[kind]["tokens_per_second"] = metrics.speed(pairs[kind])
        results[kind]["gain"] = metrics.over(pairs[kind], pairs["fixed"])
        results[kind]["interval"] = metrics.paired_interval(pairs[kind], pairs["fixed"], 0)
    return results


def line(head: str, results: Mapping[str, Any]) -> str:
    """Return a line of a Markdown table."""
    cells = [head, results["prices"], ", ".join(dict.fromkeys(results["fixed"]["policies"]))]
    cells.append(f"{results['fixed']['tokens_per_second']:,.0f}")
    cells.append(f"{results['fixed']['tokens_per_second'] / results['baseline']:.2f}")
    for kind in KINDS[1:]:
        gain, low, high = (100 * (x - 1) for x in (results[kind]["gain"], *results[kind]["interval"]))
        cells.append(f"{gain:+.1f} [{low:+.1f}, {high:+.1f}]")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Record, price, replay and print."""
    parser = argparse.ArgumentParser(description="Whether a head's confidence should decide what is drafted.")
    parser.add_argument("heads", nargs="+")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = run_config(compose("train", ["data.prompts=", f"data.held_out={given.texts}"]))
    target, settings = Target.load(run.model.path, given.dtype, run.model.device), Settings(given.tokens, GREEDY)
    prompts = [prompt.token for prompt in held_out_prompts(run.data, target.tokenizer, None)]
    texts, results = write(target, prompts, settings), []
    print(device_facts(target.device, target.dtype), f"{len(texts)} texts", flush=True)
    header = ["head", "prices", "fixed trees", "tokens/s", "over the baseline", *(f"{kind}, %" for kind in KINDS[1:])]
    print("| " + " | ".join(header) + " |\n" + "| --- " * len(header) + "|", flush=True)
    for name in given.heads:
        head: Any = load_found(resolve_head(name), target.embeddings, target.spec)
        head = head.to(target.device, target.dtype).eval()
        records = [record(target, head, text) for text in texts]
        nodes = {top_k: joined([each[top_k] for each in records]) for top_k in TOPS}
        prices = {f"here, {batch}": measured(target, head, texts, batch, settings) for batch in given.batches}
        prices |= {f"8B on an H100, {batch}": estimated(batch) for batch in H100_BATCHES}
        table, errors = compare(nodes, [text.generated - 1 for text in texts], prices)
        print("\n".join(line(name, one) for one in table), f"\ncalibration error by depth: {dict(errors)}", flush=True)
        results.append({"head": name, "rows": table, "calibration_error": errors})
    if given.out:
        given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
