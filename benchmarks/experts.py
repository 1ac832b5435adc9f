"""What a tree costs a target with experts: seconds of a verification pass by nodes, beside the experts that it reads.

    python benchmarks/experts.py [--layers 6] [--experts 32] [--chosen 2] [--samples 20]

The target is a Qwen3-MoE with random weights, too large for a processor's cache; beside it stands a dense Qwen3 with as
many weights as a token passes through. Passes of both are timed in turns by `eval/tuning/costs.py`, on random tokens.
Read experts are counted at the layers, and compared with `activated`, which takes all of them for as likely.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import transformers
from torch import Tensor

from eval.measures.cost_model import activated
from eval.tuning.costs import verification
from inference.target.target import Target
from tests import toys

NODES = (0, 1, 3, 7, 15, 31)
WIDTH, INNER, CONTEXT = 512, 512, 64


def target(kind: str, layers: int, **more: Any) -> Target:
    """Return a target of random weights."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 8, "head_dim": 64}
    torch.manual_seed(1)
    config = getattr(transformers, kind)(**toys.SIZES | sizes | {"initializer_range": 0.05} | more)
    return Target(transformers.AutoModelForCausalLM.from_config(config), toys.tokenizer(), kind)


def read(model: Target, nodes: int, layers: int) -> float:
    """Return how many experts of a layer a pass over the root and so many nodes reads, on average."""
    counts: list[int] = []

    def note(_module: Any, args: tuple[Tensor, Tensor, Tensor], _output: Any) -> None:
        counts.append(len(args[1].unique()))

    hooks = [layer.mlp.experts.register_forward_hook(note) for layer in model.decoder_layers]
    for seed in range(8):
        tokens = torch.tensor(toys.prompt(seed, 1 + nodes))
        cache = model.cache()
        model.prefill(torch.tensor(toys.prompt(100 + seed, CONTEXT)), cache)
        del counts[-layers:]
        model.prefill(tokens, cache)
    for hook in hooks:
        hook.remove()
    return sum(counts) / len(counts)


def main() -> None:
    """Measure and print a line for each number of nodes."""
    parser = argparse.ArgumentParser(description="What a tree costs a target with experts.")
    for name, value in (("layers", 6), ("experts", 32), ("chosen", 2), ("samples", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    moe = {"num_experts": asked.experts, "num_experts_per_tok": asked.chosen, "moe_intermediate_size": INNER}
    routed = target("Qwen3MoeConfig", asked.layers, **moe)
    dense = target("Qwen3Config", asked.layers, intermediate_size=asked.chosen * INNER)
    seconds = [verification(one, NODES, [CONTEXT], asked.samples, 0)[CONTEXT] for one in (routed, dense)]
    print(
        "| nodes | experts read | `activated` | pass, ms | of one token's | dense: of one token's |\n"
        + "|"
        + " --- |" * 6
    )
    for nodes in NODES:
        here, there = (one[nodes] / one[0] for one in seconds)
        expected = activated(asked.experts, asked.chosen, 1 + nodes)
        count = read(routed, nodes, asked.layers)
        print(f"| {nodes} | {count:.1f} | {expected:.1f} | {1e3 * seconds[0][nodes]:.1f} | {here:.2f} | {there:.2f} |")


if __name__ == "__main__":
    main()
