"""What a tree costs a target with experts: seconds of a verification pass by nodes, beside the experts that it reads.

    python benchmarks/experts.py [--layers 6] [--experts 32] [--chosen 2] [--samples 20] [--run RUN [--prompts 12]]

The target is a Qwen3-MoE with random weights, too large for a processor's cache; beside it stands a dense Qwen3 with as
many weights as a token passes through. Passes of both are timed in turns, on random tokens.
Read experts are counted at the layers, and compared with those of a router that takes all for as likely.

With --run, a trained head of the bundled target, two targets that write what that one writes decode its prompts: a
Mixtral whose experts all are its MLP (sparse upcycling, Komatsuzaki et al., arXiv 2212.05055, untrained, so that the
router is random), and a dense one with as many weights a token. So τ is of real text, and only the passes differ.
"""

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig

from data.text.prompts import load_prompts
from eval.tune import typical
from heads.formats.hub import load_found, resolve_head, sibling_spec
from inference.decode import Generation, RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from inference.drafters.policy import TreeConfig
from inference.protocol import Drafter
from inference.request import clock
from inference.target.target import Target
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree
from tests import toys

EMBEDDED = Path(__file__).resolve().parent.parent / "examples" / "tiny"
TREES = {
    "chain of 4": TreeConfig("chain", 4, 0, 0, [], []),
    "tree of 12": TreeConfig("dynamic", 5, 3, 12, [], []),
    "tree of 20": TreeConfig("dynamic", 7, 2, 20, [], []),
}

NODES = (0, 1, 3, 7, 15, 31)
WIDTH, INNER, CONTEXT, TOKENS = 512, 512, 64, 64


@torch.inference_mode()
def pass_seconds(target: Target, samples: int) -> dict[int, float]:
    """Return the seconds of a verification pass by drafted nodes behind random tokens, measured in turns."""
    shuffle, cache = random.Random(0), target.cache()
    tokens = shuffle.choices(range(target.embeddings.vocab_size), k=CONTEXT)
    target.prefill(torch.tensor(tokens, device=target.device), cache)
    seconds: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    for turn in range(samples + 1):  # the first warms up
        for nodes in shuffle.sample(NODES, len(NODES)):
            cache.snapshot()
            start = clock(target.device)
            parent = torch.tensor([-1, *[0] * nodes], device=target.device)
            target.score(DraftTree(torch.arange(nodes + 1, device=target.device), parent), cache)
            spent = clock(target.device) - start
            seconds[nodes] += [spent] if turn else []
            cache.keep(CONTEXT, [])
    return {nodes: typical(values) for nodes, values in seconds.items()}


def target(kind: str, layers: int, **more: Any) -> Target:
    """Return a target of random weights."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 8, "head_dim": 64}
    torch.manual_seed(1)
    config = getattr(transformers, kind)(**toys.SIZES | sizes | {"initializer_range": 0.05} | more)
    return Target(transformers.AutoModelForCausalLM.from_config(config), toys.tokenizer(), kind)


@contextmanager
def counting(model: Target) -> Iterator[list[int]]:
    """Count how many experts of each layer a pass reads."""
    counts: list[int] = []

    def note(_module: Any, args: tuple[Tensor, Tensor, Tensor], _output: Any) -> None:
        counts.append(len(args[1].unique()))

    hooks = [layer.mlp.experts.register_forward_hook(note) for layer in model.decoder_layers]
    yield counts
    for hook in hooks:
        hook.remove()


def read(model: Target, nodes: int, layers: int) -> float:
    """Return how many experts of a layer a pass over the root and so many nodes reads, on average."""
    with counting(model) as counts:
        for seed in range(8):
            tokens = torch.tensor(toys.prompt(seed, 1 + nodes))
            cache = model.cache()
            model.prefill(torch.tensor(toys.prompt(100 + seed, CONTEXT)), cache)
            del counts[-layers:]
            model.prefill(tokens, cache)
    return sum(counts) / len(counts)


def upcycled(experts: int, chosen: int) -> dict[str, Target]:
    """Return the bundled target with its MLP as each of its experts, and one with its MLP `chosen` times as wide."""
    source: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    values = {key: value for key, value in source.config.to_dict().items() if key != "model_type"}
    wide = {"intermediate_size": chosen * values["intermediate_size"]}
    torch.manual_seed(1)
    routed: Any = AutoModelForCausalLM.from_config(
        MixtralConfig(**values, num_local_experts=experts, num_experts_per_tok=chosen)
    )
    dense: Any = AutoModelForCausalLM.from_config(LlamaConfig(**values | wide))
    for model in (routed, dense):
        model.load_state_dict({k: v for k, v in source.state_dict().items() if ".mlp." not in k}, strict=False)
    stacks = (model.model.layers for model in (source, routed, dense))
    for layer, sparse, wider in zip(*stacks, strict=True):
        gate, up, down = (part.weight.data for part in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj))
        sparse.mlp.experts.gate_up_proj.data[:] = torch.cat([gate, up])
        sparse.mlp.experts.down_proj.data[:] = down
        wider.mlp.gate_proj.weight.data = gate.repeat(chosen, 1)
        wider.mlp.up_proj.weight.data = up.repeat(chosen, 1)
        wider.mlp.down_proj.weight.data = down.repeat(1, chosen) / chosen
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    return {name: Target(model, tokenizer, name) for name, model in (("experts", routed), ("dense", dense))}


def drafters(target: Target, run: str) -> dict[str, Drafter]:
    """Return the baseline's empty drafts and the head's trees."""
    folder = resolve_head(run)
    head: Any = load_found(folder, target.embeddings, sibling_spec(folder, target.spec, "drafts for"))
    head.eval().to(target.dtype)
    return {"none": Baseline(target.device), **{name: HeadDrafter(head, tree, name) for name, tree in TREES.items()}}


def decoded(targets: dict[str, Target], run: str, prompts: int) -> str:
    """Return a line for each target and draft: every prompt goes through all of them in an order of its own."""
    # Both targets have the same embedding, and a head may take the widths of its MLP from the target's.
    cells = [(name, draft, one) for name in targets for draft, one in drafters(targets["experts"], run).items()]
    texts: defaultdict[tuple[str, str], list[Generation]] = defaultdict(list)
    counts: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    settings, shuffle = RequestParams(TOKENS, GREEDY), random.Random(0)
    for prompt in load_prompts(str(EMBEDDED / "prompts.jsonl"), targets["dense"].tokenizer, prompts):
        for name, draft, drafter in shuffle.sample(cells, len(cells)):
            target = targets[name]
            counted: Any = counting(target) if name == "experts" else nullcontext([])
            with counted as read:
                texts[name, draft].append(speculate(target, drafter, prompt.token, settings))
            counts[name, draft] += read[len(target.decoder_layers) :]  # behind the prefill
    return "\n".join(row(name, draft, texts, counts[name, draft]) for name, draft, _ in cells)


def row(name: str, draft: str, texts: dict[tuple[str, str], list[Generation]], counts: list[int]) -> str:
    """Return a line: τ, experts of a layer that a pass reads, its price, what both promise, the measured speedup."""
    ours, plain = texts[name, draft], texts[name, "none"]
    tau = sum(len(one.tokens) - 1 for one in ours) / sum(len(one.steps) for one in ours)
    price, one = (median(step.verify_s for text in some for step in text.steps) for some in (ours, plain))
    rates = [sum(len(one.tokens) for one in some) / sum(one.decode_s for one in some) for some in (ours, plain)]
    experts = f"{sum(counts) / len(counts):.1f}" if counts else "-"
    promised, speedup = tau * one / price, rates[0] / rates[1]
    return f"| {name} | {draft} | {tau:.2f} | {experts} | {price / one:.2f} | {promised:.2f} | {speedup:.2f} |"


def main() -> None:
    """Measure and print a line for each number of nodes."""
    parser = argparse.ArgumentParser(description="What a tree costs a target with experts.")
    for name, value in (("layers", 6), ("experts", 32), ("chosen", 2), ("samples", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--run", default=None)
    parser.add_argument("--prompts", type=int, default=12)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.run is not None:
        print("| target | draft | τ | experts read | pass, of one token's | τ over that | measured speedup |")
        print("|" + " --- |" * 7)
        print(decoded(upcycled(asked.experts, asked.chosen), asked.run, asked.prompts))
        return
    moe = {"num_experts": asked.experts, "num_experts_per_tok": asked.chosen, "moe_intermediate_size": INNER}
    routed = target("Qwen3MoeConfig", asked.layers, **moe)
    dense = target("Qwen3Config", asked.layers, intermediate_size=asked.chosen * INNER)
    seconds = [pass_seconds(one, asked.samples) for one in (routed, dense)]
    print(
        "| nodes | experts read | by the formula | pass, ms | of one token's | dense: of one token's |\n"
        + "|"
        + " --- |" * 6
    )
    for nodes in NODES:
        here, there = (one[nodes] / one[0] for one in seconds)
        expected = asked.experts * (1 - (1 - asked.chosen / asked.experts) ** (1 + nodes))
        count = read(routed, nodes, asked.layers)
        print(f"| {nodes} | {count:.1f} | {expected:.1f} | {1e3 * seconds[0][nodes]:.1f} | {here:.2f} | {there:.2f} |")


if __name__ == "__main__":
    main()
