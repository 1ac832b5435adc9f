"""What a pass of vLLM that verifies K tokens in each of b sequences takes, over plain decoding of b (K + 1) sequences.

taskset -c 0 .venv-serving/bin/python benchmarks/verification_price.py [K=3] [sizes=1,2,4,8] [steps=60]

That ratio is 1 where a server without speculation tells what speculation will cost it (docs/serving.md). vLLM's build
for CPUs runs the bundled target in this process, in fp32; answers are held to one token, so that every
pass has K drafts, which are n-grams and cost next to nothing. Seconds are those of one core, the median of the passes
with exactly so many tokens; a line a size.
"""

import json
import os
import statistics
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
TARGET = Path(__file__).resolve().parents[1] / "examples" / "tiny"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
LENGTH = 48  # tokens of a prompt


def drafted(engine: Any) -> int:
    """Return how many tokens were drafted so far."""
    return sum(metric.value for metric in engine.get_metrics() if metric.name == DRAFTED)


def seconds(engine: Any, sequences: int, tokens: int, steps: int) -> float:
    """Return the processor's seconds of a step over so many sequences that drafts so many tokens for all of them."""
    from vllm import SamplingParams

    numbers = count(time.time_ns())
    for token in range(300, 300 + sequences):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=steps * (tokens + 1), ignore_eos=True, allowed_token_ids=[token]
        )
        prompt: Any = {"prompt_token_ids": [token] * LENGTH}
        engine.llm_engine.add_request(str(next(numbers)), prompt, sampling)
    taken, running = [], sequences
    while running:
        before, begin = drafted(engine), time.process_time()
        outputs = engine.llm_engine.step()
        passed = time.process_time() - begin
        if running == len(outputs) == sequences and drafted(engine) - before == tokens * sequences:
            taken.append(passed)
        running -= sum(output.finished for output in outputs)
    return statistics.median(taken[2:])  # the first ones read prompts


def main() -> None:
    """Measure and print."""
    from vllm import LLM

    words = dict(word.split("=") for word in sys.argv[1:])
    tokens, steps = int(words.get("K", "3")), int(words.get("steps", "60"))
    sizes = [int(size) for size in words.get("sizes", "1,2,4,8").split(",")]
    lookup = {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    times: dict[str, dict[int, float]] = {}
    for name, speculative in {"plain": None, "verifying": lookup}.items():
        engine: Any = LLM(
            str(TARGET), dtype="float32", block_size=32, enforce_eager=True, disable_log_stats=False,
            max_num_seqs=max(sizes) * (tokens + 1), speculative_config=speculative, enable_prefix_caching=False,
        )  # fmt: skip
        wider = sizes if speculative else sorted({*sizes, *(size * (tokens + 1) for size in sizes)})
        times[name] = {size: seconds(engine, size, tokens if speculative else 0, steps) for size in wider}
        del engine
    for size in sizes:
        verifying, priced, plain = times["verifying"][size], times["plain"][size * (tokens + 1)], times["plain"][size]
        print(json.dumps({
            "b": size, "K": tokens, "verifying_ms": round(1e3 * verifying, 2), "plain_ms": round(1e3 * priced, 2),
            "ratio": round(verifying / priced, 3), "over_plain_of_b": round(verifying / plain, 3),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
