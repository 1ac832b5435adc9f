"""What the lm_head of a draft costs: the whole vocabulary, a pruned one, candidates; random weights.

    python benchmarks/candidates.py [--vocab 49152] [--width 576] [--pruned 8192] [--ranks 32 64 128]
        [--candidates 128] [--rows 1 8] [--dtype bfloat16]

Each figure is the least of 40 calls, taken in turns, with the log-probs and the ten best tokens, in milliseconds.
"""

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from heads.modules.vocab import CandidateLmHead, DraftLmHead

CALLS = 40


@torch.inference_mode()
def spent(lm_head: torch.nn.Module, hidden: torch.Tensor) -> float:
    """Return the milliseconds of one call."""
    began = time.perf_counter()
    lm_head(hidden).float().log_softmax(-1).topk(10)
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The cost of a draft's lm_head.")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--pruned", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()

    def embeddings(size: int) -> Any:
        weight = torch.randn(size, asked.width)
        return SimpleNamespace(hidden_size=asked.width, vocab_size=size, lm_head_weight=lambda: weight)

    whole = embeddings(asked.vocab)
    heads: dict[str, Any] = {
        f"all {asked.vocab:,} tokens": DraftLmHead(whole, "own", None),
        f"draft_vocab={asked.pruned}": DraftLmHead(embeddings(asked.pruned), "own", None),
    }
    for rank in asked.ranks:
        heads[f"candidates={asked.candidates}, rank {rank}"] = CandidateLmHead(
            whole, "own", None, asked.candidates, rank
        )
    heads = {name: head.to(getattr(torch, asked.dtype)).eval() for name, head in heads.items()}
    print(f"{'ms':32}" + "".join(f"{f'{count} rows':>10}" for count in asked.rows))
    least = {name: [float("inf")] * len(asked.rows) for name in heads}
    for _ in range(CALLS):
        for name, head in heads.items():
            for i, count in enumerate(asked.rows):
                hidden = torch.randn(1, count, asked.width, dtype=getattr(torch, asked.dtype))
                least[name][i] = min(least[name][i], spent(head, hidden))
    for name, figures in least.items():
        print(f"{name:32}" + "".join(f"{figure:10.2f}" for figure in figures))


if __name__ == "__main__":
    main()
