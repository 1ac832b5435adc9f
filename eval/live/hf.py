"""HF's own `generate` as the second baseline, timed as our engine is."""

import time
from typing import Any

import torch
from transformers import GenerationConfig

from eval.measures.machine import synchronize
from inference.decode import Generation
from inference.target.target import Target


@torch.inference_mode()
def hf_generate(
    target: Target, prompt: list[int], max_new_tokens: int, penalty: float = 1.0, min_new_tokens: int = 0
) -> Generation:
    """Run HF's own greedy `generate` on the target's model under a repetition penalty, timed as our engine is.

    `generate` does not report the end of its prefill. A second call that stops after one token does the prefill and
    nothing else, so decoding took the difference. The runs have no steps: the cost of one cannot be observed.

    It runs under inference mode, as our engine does, which is faster than its own `no_grad`: no operation then pays for
    the bookkeeping of autograd.
    """
    _, prefill_s = _timed_generate(target, prompt, 1, penalty, 0)
    most = min(max_new_tokens, target.context - len(prompt))
    tokens, total_s = _timed_generate(target, prompt, most, penalty, min(min_new_tokens, most))
    decode_s = max(total_s - prefill_s, 0.0) if len(tokens) > 1 else 0.0
    finish = "eos" if tokens[-1] in target.eos else "length"
    sources = ["prefill"] + ["bonus"] * (len(tokens) - 1)
    return Generation(tokens=tokens, sources=sources, prefill_s=prefill_s, decode_s=decode_s, finish=finish)


def _timed_generate(
    target: Target, prompt: list[int], count: int, penalty: float, least: int
) -> tuple[list[int], float]:
    """Return the tokens that `generate` adds to the prompt, from `least` to `count`, and the seconds it took."""
    eos = sorted(target.eos)
    # The sampling values have no effect; without them the checkpoint's own would be used, with a warning.
    configure: Any = GenerationConfig
    settings = configure(
        max_new_tokens=count,
        min_new_tokens=least,
        do_sample=False,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
        repetition_penalty=penalty,
        use_cache=True,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
    )
    token = torch.tensor([prompt], device=target.device)
    synchronize(target.device)
    start = time.perf_counter()
    generate: Any = target.model.generate  # transformers types it on a mixin that AutoModel's classes do not show
    out = generate(token, attention_mask=torch.ones_like(token), generation_config=settings)
    synchronize(target.device)
    return out[0, len(prompt) :].tolist(), time.perf_counter() - start
