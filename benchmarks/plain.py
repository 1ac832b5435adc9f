"""Plain decoding in our engine against HF generate: same target, dtype, prompts and machine, interleaved in one run.

    python benchmarks/plain.py [MODEL_PATH]

Prints tokens per second of both and their ratio; 1.0 or more means that speedups against our own plain decoding are not
flattered by a slow baseline.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from eval import metrics
from eval.live import HF, PLAIN, measure
from eval.machine import device_facts
from eval.workloads import load_workload, swapped
from inference.decode import Settings
from inference.sample import GREEDY
from inference.target import Target

PROMPTS, TOKENS, REPEATS = 8, 96, 5


def main() -> None:
    """Measure and print."""
    path = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "examples" / "tiny")
    target = Target.load(path)
    prompts = load_workload("tiny", target, PROMPTS, truncate=True)
    warmup = [swapped(prompt) for prompt in prompts[-2:]]
    runs = measure(target, {}, prompts, Settings(TOKENS, GREEDY), repeats=REPEATS, warmup=warmup, hf=True)
    middle = {name: [metrics.median_run(repeats) for repeats in each] for name, each in runs.items()}
    rate = {name: metrics.tokens_per_second(each) for name, each in middle.items()}
    print(f"{path}, {target.dtype}, {device_facts(target.device, target.dtype)}")
    print(f"plain decoding here   {rate[PLAIN]:8.1f} tokens/s")
    print(f"HF generate           {rate[HF]:8.1f} tokens/s")
    print(f"ratio                 {metrics.speedup(middle[PLAIN], middle[HF]):8.3f}")


if __name__ == "__main__":
    main()
