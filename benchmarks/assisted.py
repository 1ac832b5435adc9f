"""Our assistant and prompt lookup against transformers' own, on the same target, prompts, dtype and machine.

    python benchmarks/assisted.py MODEL_PATH [--layers 4 8] [--assistant PATH] [--workload FILE] [--prompts 8] …

Assistants are the target itself, its first layers under its own final norm and lm_head (made here, untrained), and
whatever --assistant names. τ is tokens after the prefill's one over target passes after the prefill; it must agree.
transformers drafts before its prefill too, so its passes are counted with the prefill's token appended to the prompt:
its first pass is then our first step. Seconds are of the whole request, the prefill included, each engine in its own
way, in turns on each prompt.
"""

import argparse
import copy
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
from transformers import GenerationConfig

from data.text.prompts import Prompt
from eval.inputs.workloads import load_workload
from eval.live import interleave
from eval.measures import metrics
from eval.measures.machine import device_facts
from inference.decode import Generation, RequestParams, speculate
from inference.drafters.registry import make
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.sample import GREEDY

ASSISTANT = {
    "source": "assistant", "match": "same", "dtype": None, "device": None, "trust_remote_code": False,
    "confidence": 0.0,
}  # fmt: skip
LOOKUP = {"ngram_min": 1, "ngram_max": 2, "tokens": 10, "match": "first"}  # transformers' defaults
HEADER = f"{'drafter':24} {'τ':>6} {'τ HF':>6} {'τ / HF':>7} {'s':>7} {'s HF':>7} {'HF / s':>7} interval  same text"


def truncated(target: Target, layers: int, folder: str) -> str:
    """Save the target's first layers with its own embedding, final norm and lm_head; return where."""
    model = copy.deepcopy(target.model)
    config = model.config.get_text_config()
    stack = next(
        m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == config.num_hidden_layers
    )
    del stack[layers:]
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def hf_generate(target: Target, prompt: list[int], count: int, extra: dict[str, Any]) -> Generation:
    """Run transformers' greedy assisted `generate`; all of its seconds stand as the decoding's."""
    eos = sorted(target.eos)
    settings = GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        **{key: value for key, value in extra.items() if key != "assistant_model"},
    )
    token = torch.tensor([prompt], device=target.device)
    start = time.perf_counter()
    out = target.model.generate(
        token,
        attention_mask=torch.ones_like(token),
        generation_config=settings,
        assistant_model=extra.get("assistant_model"),
    )
    seconds = time.perf_counter() - start
    return Generation(tokens=out[0, len(prompt) :].tolist(), decode_s=seconds)


def whole(made: Generation) -> Generation:
    """Count the prefill's seconds with the decoding's."""
    return replace(made, prefill_s=0.0, decode_s=made.prefill_s + made.decode_s)


@contextmanager
def counted(target: Target) -> Iterator[list[int]]:
    """Count the target's passes, as a list with an entry for each."""
    passes: list[int] = []
    handle = target.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        handle.remove()


def hf_tau(target: Target, runs: list[Generation], prompts: list[Prompt], extra: dict[str, Any]) -> float:
    """Return transformers' tokens per pass behind the same prefills and first tokens as ours."""
    tokens = 0
    with counted(target) as passes:
        for run, prompt in zip(runs, prompts, strict=True):
            if len(run.tokens) > 1:
                begun = [*prompt.token, run.tokens[0]]
                tokens += len(hf_generate(target, begun, len(run.tokens) - 1, extra).tokens)
    return tokens / len(passes)


def compare(name: str, target: Target, drafter: Drafter, extra: dict[str, Any], asked: argparse.Namespace) -> None:
    """Measure one drafter against transformers' counterpart and print a line."""
    prompts = load_workload(asked.workload, target, asked.prompts, truncate=True)
    settings = RequestParams(asked.tokens, GREEDY)
    runners = {
        "ours": lambda prompt: whole(speculate(target, drafter, prompt, settings)),
        "hf": lambda prompt: hf_generate(target, prompt, min(asked.tokens, target.max_model_len - len(prompt)), extra),
    }
    runs = interleave(runners, prompts, asked.repeats, warmup=prompts[-1:], seed=0)
    ours, hf = ([metrics.median_run(repeats) for repeats in runs[key]] for key in ("ours", "hf"))
    tau, other = metrics.acceptance(ours).tau, hf_tau(target, ours, prompts, extra)
    assert tau is not None
    seconds = [sum(run.decode_s for run in each) for each in (ours, hf)]
    low, high = metrics.paired_interval(metrics.decoding(ours), metrics.decoding(hf), 0) or (math.nan, math.nan)
    same = sum(a.tokens == b.tokens for a, b in zip(ours, hf, strict=True))
    print(
        f"{name:24} {tau:6.3f} {other:6.3f} {tau / other:7.4f} {seconds[0]:7.2f} {seconds[1]:7.2f} "
        f"{seconds[1] / seconds[0]:7.2f} [{low:.2f}, {high:.2f}] {same}/{len(prompts)}",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Assisted decoding here against transformers' own.")
    parser.add_argument("model", nargs="?", default=str(ROOT / "examples" / "tiny"))
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 8], help="sizes of truncated assistants")
    parser.add_argument("--assistant", nargs="*", default=[], help="paths of other assistants with the same tokenizer")
    parser.add_argument("--workload", default="tiny", help="a name or a file of prompts")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafted", type=int, default=5, help="tokens of the assistant a pass")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    target = Target.load(asked.model, "float32")
    print(f"{asked.model}, {target.dtype}, {device_facts(target.device, target.dtype)}")
    print(f"{asked.prompts} prompts, {asked.tokens} tokens, {asked.drafted} drafted, median of {asked.repeats}")
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        paths = {f"first {n} layers": truncated(target, n, f"{folder}/{n}") for n in asked.layers}
        paths |= {"itself": asked.model} | {path: path for path in asked.assistant}
        tree = {"kind": "chain", "depth": asked.drafted, "top_k": 0, "nodes": 0, "paths": [], "widths": []}
        for name, path in paths.items():
            drafter: Any = make("assistant", {**ASSISTANT, "model": path, "tree": tree}, target)
            model = drafter.model.model  # the very same weights for both
            model.generation_config.num_assistant_tokens = asked.drafted
            model.generation_config.num_assistant_tokens_schedule = "constant"
            model.generation_config.assistant_confidence_threshold = 0.0
            compare(name, target, drafter, {"assistant_model": model}, asked)
    lookup = {"prompt_lookup_num_tokens": LOOKUP["tokens"], "max_matching_ngram_size": LOOKUP["ngram_max"]}
    compare("prompt lookup", target, make("prompt_lookup", LOOKUP, target), lookup, asked)


if __name__ == "__main__":
    main()
