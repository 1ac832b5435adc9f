"""A linear layer of few rows on a CPU: torch's, and with the packed weight of inference/target/packed.py.

    python benchmarks/packed.py [bfloat16 | float32] [threads]

Each shape has weights of 256 MB or more in all, so that none stays in a cache.
"""

import sys
import time
from copy import deepcopy

import torch
from torch import Tensor, nn

from inference.target.packed import prepack_weights

SHAPES = {
    "SmolLM2 up": (576, 1536),
    "SmolLM2 down": (1536, 576),
    "SmolLM2 lm_head": (576, 49152),
    "8B up": (4096, 14336),
}


def milliseconds(layers: list[nn.Linear], x: Tensor) -> float:
    """Return the time of one layer, the median of five rounds."""
    rounds = []
    for _ in range(6):
        begin = time.perf_counter()
        for layer in layers:
            layer(x)
        rounds.append((time.perf_counter() - begin) / len(layers) * 1e3)
    return sorted(rounds[1:])[2]


@torch.inference_mode()
def main(dtype: str = "bfloat16", threads: str = "1") -> None:
    """Print a table."""
    torch.set_num_threads(int(threads))
    kind = getattr(torch, dtype)
    print("| layer | rows | torch, ms | packed, ms | ratio | largest difference |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, (width, out) in SHAPES.items():
        count = max(1, 2**28 // (2 * width * out))
        plain = [nn.Linear(width, out, bias=False, dtype=kind) for _ in range(count)]
        packed = deepcopy(plain)
        for layer in packed:
            prepack_weights(layer)
        for rows in (1, 5, 16, 64):
            x = torch.randn(rows, width, dtype=kind)
            before, after = milliseconds(plain, x), milliseconds(packed, x)
            off = max((a(x) - b(x)).abs().max().item() for a, b in zip(plain, packed, strict=True))
            print(f"| {name} | {rows} | {before:.2f} | {after:.2f} | {before / after:.2f} | {off:.1g} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
