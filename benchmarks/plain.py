"""The baseline in our engine against HF generate: same target, dtype, prompts and machine, interleaved in one run.

    python benchmarks/plain.py [MODEL_PATH]

Prints tokens per second of both, of whole calls and of decoding alone, and their ratio; 1.0 or more means that speedups
against our own the baseline are not flattered by a slow baseline. Two more rows say where the difference comes from:
`generate` under its own `no_grad`, as most scripts call it, and a bare loop over the model's forward, which is what
`generate` would be without its own work on every token.
"""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from eval.inputs.workloads import load_workload
from eval.live import HF, hf_generate, interleave, medians
from eval.measures import metrics
from eval.measures.machine import device_facts
from eval.measures.results import BASELINE
from heads.common.target_config import cache_argument
from inference.decode import Generation, RequestParams, autoregress
from inference.request import clock
from inference.target.target import Target
from inference.verification.sample import GREEDY

PROMPTS, TOKENS, REPEATS = 8, 96, 5


@torch.inference_mode()
def bare(target: Target, prompt: list[int]) -> Generation:
    """Return the greedy tokens of a loop over the model's forward: nothing is checked, and no token ends it."""
    token, cached = torch.tensor([prompt], device=target.device), {cache_argument(target.model): DynamicCache()}
    tokens: list[int] = []
    marks = [time.perf_counter()]
    while len(tokens) < TOKENS:
        token = target.model(token, logits_to_keep=1, **cached).logits[:, -1:].argmax(-1)
        tokens.append(token.item())
        marks.append(time.perf_counter())
    prefill, decode = marks[1] - marks[0], clock(target.device) - marks[1]
    return Generation(tokens, ["bonus"] * TOKENS, prefill_s=prefill, decode_s=decode, finish_reason="length")


def main() -> None:
    """Measure and print."""
    path = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "examples" / "tiny")
    target = Target.load(path)
    prompts = load_workload("tiny", target, PROMPTS, truncate=True)
    warmup = prompts[-2:]
    by_hf: Any = hf_generate
    runners = {
        BASELINE: partial(autoregress, target, params=RequestParams(TOKENS, GREEDY)),
        HF: partial(hf_generate, target, params=RequestParams(TOKENS, GREEDY)),
        "HF under no_grad": partial(by_hf.__wrapped__, target, params=RequestParams(TOKENS, GREEDY)),
        "bare forward": partial(bare, target),
    }
    runs = interleave(runners, prompts, REPEATS, warmup, seed=0)
    middle = medians(runs)
    plain = metrics.decoding(middle[BASELINE])
    print(f"{path}, {target.dtype}, {device_facts(target.device, target.dtype)}")
    print(f"{'':20} {'tokens/s':>10} {'whole call':>10} {'plain over it':>14}")
    for name, each in middle.items():
        whole = sum(len(run.tokens) for run in each) / sum(run.prefill_s + run.decode_s for run in each)
        ratio = metrics.speed_ratio(plain, metrics.decoding(each))
        print(f"{name:20} {metrics.speed(metrics.decoding(each)):10.1f} {whole:10.1f} {ratio:14.3f}")


if __name__ == "__main__":
    main()
