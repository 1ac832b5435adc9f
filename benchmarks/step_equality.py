"""Whether the device step writes what the reference engine writes, token for token, over many tokens.

    python benchmarks/step_equality.py [--tokens 100000] [--head outputs/tiny-eagle/head] [--batch 16] [--static]

The bundled target in fp32 and an EAGLE head, one of random weights unless a trained one is given. Requests differ in
prompt, length, seed and stop strings; some end early, and others take their slots. They are decoded greedily, under
a repetition penalty, and under coupled noise, by a chain and by a dynamic tree. The reference decodes one after another
(`tests/oracle.py`). Texts that part where its two best tokens are nearly tied are counted apart.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch

from benchmarks.step_counts import head_of
from data.text.prompts import Prompt
from eval.gates import coupled_check
from eval.inputs.workloads import load_workload
from eval.measures.losslessness import gate
from heads.formats.store import load_head
from inference.batch import batch_of
from inference.decode import Generation, RequestParams
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling
from tests.oracle import reference

TINY = ROOT / "examples" / "tiny"
TREES = [TreeConfig("chain", 4, 0, 0, [], []), TreeConfig("dynamic", 4, 4, 12, [], [])]
PENALISED = Sampling(0.0, 0, 1.0, repetition_penalty=1.2)
HOT, HOT_PENALISED = Sampling(0.8, 0, 0.95), Sampling(1.0, 40, 1.0, repetition_penalty=1.1)
WAYS = {
    "greedy": (GREEDY, "auto"), "greedy, penalty": (PENALISED, "auto"),
    "coupled": (HOT, "coupled"), "coupled, penalty": (HOT_PENALISED, "coupled"),
}  # fmt: skip
STOPS = ((), ("\n\n",), (".", "return"), ())
Request = tuple[list[int], RequestParams]


class Compared(NamedTuple):
    """Counts of texts and tokens, and the first text that differs."""

    counts: Counter[str]
    first: list[str]


def drafter_of(target: Target, head: Path | None, tree: TreeConfig) -> HeadDrafter:
    """Return a trained head's drafter, or one of random weights."""
    if head is not None:
        loaded: Any = load_head(head, target.embeddings, target.spec)
    else:
        torch.manual_seed(0)
        loaded = head_of("eagle", target)
    return HeadDrafter(loaded.to(target.dtype).eval(), tree, tree.kind)


def requests_of(prompts: list[list[int]], sampling: Sampling, rule: str, count: int) -> list[Request]:
    """Return requests that all differ."""

    def settings(i: int) -> RequestParams:
        stop, least = STOPS[i % len(STOPS)], 4 * (i % 3)
        return RequestParams(
            16 + 16 * (i % 9), sampling, stop, seed=i, logit_gaps=True, rule=rule, min_new_tokens=least
        )

    return [(prompts[i % len(prompts)][: 8 + 17 * (i % 11)], settings(i)) for i in range(count)]


def decoded(target: Target, drafter: HeadDrafter, requests: list[Request], size: int, static: bool) -> list[Generation]:
    """Decode in a continuous batch of device steps."""
    batch, answers = batch_of(target, drafter, size, requests), dict[int, Generation]()
    assert batch.device_step is not None
    batch.device_step.fixed_shapes = static
    while len(answers) < len(requests) or batch.running:
        if len(answers) < len(requests) and batch.free:
            answers[len(answers)] = batch.admit(len(answers), *requests[len(answers)])
        else:
            batch.step()
        batch.release()
    return list(answers.values())


def compare(target: Target, requests: list[Request], expected: list[Generation], answers: list[Generation]) -> Compared:
    """Count texts that are identical, that part at a near tie, and that differ, as the losslessness check does."""
    compared = Compared(Counter(tokens=sum(len(answer.tokens) for answer in answers)), [])
    for (prompt, params), ours, theirs in zip(requests, expected, answers, strict=True):
        name = str(params.seed)
        if params.sampling.temperature == 0:
            verdict = gate([ours], [theirs], [name], target.dtype)
        else:
            verdict = coupled_check(target, [ours], [theirs], [Prompt(name, prompt, "")], params)
        [kind], [where] = verdict.verdicts, [*verdict.ties, verdict.first][:1]
        if where is None and (ours.finish_reason, ours.origins) != (theirs.finish_reason, theirs.origins):
            kind = "failed"
        compared.counts[kind] += 1
        if kind != "identical":
            compared.first.append(f"{kind}: {where or f'prompt {name} ends or was drafted otherwise'}")
    return compared


def main() -> None:
    """Decode, compare and print."""
    parser = argparse.ArgumentParser(description="Whether the device step writes what the reference engine writes.")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--static", action="store_true", help="in the shapes of an accelerator")
    asked = parser.parse_args()
    target = Target.load(str(TINY), "float32", "cpu")
    prompts = [prompt.token for prompt in load_workload(str(TINY / "prompts.jsonl"), target, 64)]
    total, begin = Counter[str](), 0
    while total["tokens"] < asked.tokens:
        for number, (way, (sampling, rule)) in enumerate(WAYS.items()):
            tree = TREES[(number + begin) % 2]
            drafter = drafter_of(target, asked.head, tree)
            requests = requests_of(prompts, sampling, rule, begin + 4 * asked.batch)[begin:]
            expected = [reference(target, drafter, *request) for request in requests]
            compared = compare(
                target, requests, expected, decoded(target, drafter, requests, asked.batch, asked.static)
            )
            total += compared.counts
            print(f"{way}, {tree.kind}: {dict(compared.counts)} {compared.first[:1] or ''}", flush=True)
        begin += 4 * asked.batch + 1
    print(f"in all: {dict(total)}")
    sys.exit(bool(total["failed"]))


if __name__ == "__main__":
    main()
