"""Serve prompts by vLLM, which is run by its own environment's Python: a job on stdin, what came of it on stdout.

The job holds `target`, `prompts` of token ids, `tokens` of each answer and, for speculation, `speculative`, with
`overrides` of the target's config.json.
"""

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    """Run the job."""
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    engine: Any = LLM(
        job["target"], enforce_eager=True, disable_log_stats=False, max_num_seqs=1,
        speculative_config=job.get("speculative"), hf_overrides=job.get("overrides", {}),
        dtype="float32", block_size=32,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"])
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    counted = {}
    for metric in engine.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name != metric.name:
            counted[name] = metric.values if hasattr(metric, "values") else metric.value
    print(json.dumps({"tokens": [list(answer.outputs[0].token_ids) for answer in answers], **counted}))


if __name__ == "__main__":
    main()
