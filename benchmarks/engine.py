"""What the engine itself costs, on a target of 110M random weights, where a pass is a pass of a real model.

    python benchmarks/engine.py [--dtype float32] [--tokens 48] [--eager]

1. Overhead: the share of a step that is spent neither in the target's pass nor in the head's, chain and tree.
2. Efficiency: the speedup that was measured over the one that τ and the passes' own times allow,
   τ · t_plain / (t_verify + t_draft), the times measured in a loop of nothing but those passes.
3. The baseline against HF `generate`, with its dynamic and its static cache.

All of it runs twice: as the model is, and compiled (`engine.compile=true`; HF's static cache with its own compilation).

Random weights accept nothing that a head drafts, so the drafts of part 2 are read from the target's own answer and
cost nothing (t_draft is 0): a chain of true tokens, and the same beside wrong ones in a tree. Those of part 1 come from
a real EAGLE head with random weights. Batches are in `batches.py`, long contexts in `long_context.py`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, LlamaConfig

from data.text.prompts import Prompt
from eval.live import interleave
from eval.measures.machine import device_facts
from heads import HEADS
from heads.base import Embeddings
from heads.formats.store import earlier
from inference.decode import Generation, RequestParams, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.policy import TreeConfig
from inference.protocol import DraftContext, Drafter, Proposal
from inference.target.config import DTYPES
from inference.target.target import Target
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree

VOCABULARY, PROMPT, REPEATS = 32000, 64, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "intermediate_size": 2048, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EAGLE = {
    "name": "eagle", "layers": 1, "length": None, "num_heads": None, "num_kv_heads": None, "head_dim": None,
    "intermediate_size": None, "rope_theta": 10000.0, "rope_scaling": None, "bias": True, "norm_eps": 1e-5,
}  # fmt: skip
TREES = {"chain": TreeConfig("chain", 4, 0, 0, [], []), "tree": TreeConfig("dynamic", 4, 3, 8, [], [])}
TRUE = 3  # tokens of a draft that are right


class Reader(HostDrafter):
    """Drafts what the target is known to answer: `TRUE` tokens as a chain, or beside others in a tree of `nodes`."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], nodes: int, name: str) -> None:
        self.answers, self.nodes, self.name, self.tree = answers, nodes, name, f"{nodes} nodes"

    def start(self, prompt: list[int]) -> "Answer":
        """Look the answer up."""
        return Answer(self.answers[tuple(prompt)], len(prompt), self.nodes)


class Answer(DrafterState):
    """One answer being read."""

    def __init__(self, text: list[int], begin: int, nodes: int) -> None:
        self.text, self.begin, self.nodes = text, begin, nodes

    def propose(self, context: DraftContext) -> Proposal:
        """Return the true tokens, and under the root as many wrong ones as the tree has room for."""
        done = len(context.token) - self.begin
        true = self.text[done : done + min(TRUE, context.max_draft_depth)]
        others = [token for token in range(self.nodes) if token not in true[:1]][: self.nodes - len(true)]
        token = [context.token[-1], *true, *(others if true else [])]
        parent = [*range(-1, len(true)), *([0] * (len(token) - len(true) - 1))]
        return Proposal(DraftTree(torch.tensor(token), torch.tensor(parent)))


def random_target(dtype: str, **shape: Any) -> Target:
    """Return a target of random weights that never ends its answers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | shape)).to(DTYPES[dtype])
    target = Target(model, AutoTokenizer.from_pretrained(str(ROOT / "examples" / "tiny")), "random")
    target.eos = frozenset()
    return target


def random_prompts(count: int) -> list[Prompt]:
    """Return prompts of random tokens."""
    chance = torch.Generator().manual_seed(1)
    return [Prompt(str(i), torch.randint(VOCABULARY, (PROMPT,), generator=chance).tolist(), "") for i in range(count)]


def readers(answers: dict[tuple[int, ...], list[int]]) -> dict[str, Drafter]:
    """Return the chain and the tree of known answers."""
    return {"chain": Reader(answers, TRUE, "chain"), "tree": Reader(answers, 8, "tree")}


def seconds(runs: dict[int, Callable[[], Any]], rounds: int = 20) -> dict[int, float]:
    """Return the median seconds of calls, taken in turn so that a slow minute slows all; two rounds do not count."""
    times: dict[int, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 2):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each[2:]) for name, each in times.items()}


@contextmanager
def clocked(*places: tuple[Any, str]) -> Iterator[list[float]]:
    """Note the seconds of every call of some objects' methods, outermost calls alone."""
    spent: list[float] = []
    inside: list[bool] = []
    before = [(owner, name, getattr(owner, name)) for owner, name in places]

    def watch(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            inside.append(True)
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                inside.pop()
                if not inside:
                    spent.append(time.perf_counter() - begin)

        return timed

    for owner, name, call in before:
        setattr(owner, name, watch(call))
    try:
        yield spent
    finally:
        for owner, name, _ in before:
            delattr(owner, name)  # the method of the class shows again


def overhead(target: Target, head: Any, prompt: list[int], tokens: int) -> None:
    """Print the share of a step outside the target's pass and the head's."""
    print("\nshare of a step outside target and head passes")
    for name, tree in TREES.items():
        drafter = HeadDrafter(head, tree, name)
        speculate(target, drafter, prompt, RequestParams(8, GREEDY))
        places = [(target, "run"), (target.embeddings, "logits"), (head, "expand"), (head, "extend")]
        with clocked(*places) as spent:
            made = speculate(target, drafter, prompt, RequestParams(tokens, GREEDY))
        passes = sum(spent) - made.prefill_s  # the prefill's own passes and its little else
        share, step = 1 - passes / made.decode_s, 1e3 * made.decode_s / len(made.steps)
        print(f"{name:8} {tree.label:18} {share:7.1%} of {step:6.1f} ms")


def efficiency(target: Target, sources: dict[str, Drafter], prompts: list[Prompt], settings: RequestParams) -> None:
    """Print measured speedup over what τ and the passes alone allow."""
    print("\nmeasured speedup over tau * t_plain / t_verify, the passes by themselves")
    runners: dict[str, Callable[[list[int]], Generation]] = {
        "plain": lambda prompt: autoregress(target, prompt, settings),
        **{name: lambda prompt, own=each: speculate(target, own, prompt, settings) for name, each in sources.items()},
    }
    runs = interleave(runners, prompts, REPEATS, prompts[-1:], 0)
    total = {
        name: sum(statistics.median(run.decode_s for run in each) for each in found) for name, found in runs.items()
    }
    middle = PROMPT + settings.max_new_tokens // 2
    cache = target.cache()
    target.prefill(torch.arange(middle), cache)

    def once(nodes: int) -> None:
        parent = torch.arange(-1, nodes - 1)
        target.score(DraftTree(torch.arange(nodes), parent), cache)
        cache.keep(middle, [])

    steps = {name: [step for each in found for step in each[0].steps] for name, found in runs.items()}
    size = {name: 1 + round(statistics.mean(step.drafted for step in each)) for name, each in steps.items()}
    spent = seconds({nodes: partial(once, nodes) for nodes in sorted({*size.values()})})
    for name, source in sources.items():
        tau = sum(step.committed for step in steps[name]) / len(steps[name])
        speedup, ideal = total["plain"] / total[name], tau * spent[size["plain"]] / spent[size[name]]
        print(f"{name:8} {source.tree:10} tau {tau:.2f}, {speedup:.2f}x of {ideal:.2f}x: {speedup / ideal:.2f}")


def against_hf(target: Target, prompts: list[Prompt], settings: RequestParams) -> None:
    """Print the baseline's speed over that of HF generate, with both kinds of cache, the static one compiled too."""
    print("\nthe baseline here over HF generate, prefill included in both")
    everywhere = CompileConfig(mode="default")
    everywhere._compile_all_devices = True  # else it compiles on accelerators alone
    caches: dict[str, dict[str, Any]] = {
        "dynamic": {},
        "static": {"cache_implementation": "static", "disable_compile": True},
        "compiled": {"cache_implementation": "static", "compile_config": everywhere},
    }
    if target.compiled is None:
        del caches["compiled"]

    @torch.inference_mode()
    def hf(prompt: list[int], kind: str) -> Generation:
        begin = time.perf_counter()
        generate: Any = target.model.generate
        out = generate(
            torch.tensor([prompt]),
            max_new_tokens=settings.max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            **caches[kind],
        )
        return Generation(tokens=out[0, len(prompt) :].tolist(), decode_s=time.perf_counter() - begin)

    runners: dict[str, Callable[[list[int]], Generation]] = {
        "here": lambda prompt: autoregress(target, prompt, settings),
        **{kind: lambda prompt, kind=kind: hf(prompt, kind) for kind in caches},
    }
    runs = interleave(runners, prompts, REPEATS, prompts[-1:], 0)
    total = {
        name: sum(statistics.median(run.prefill_s + run.decode_s for run in each) for each in found)
        for name, found in runs.items()
    }
    same = all(a[0].tokens == b[0].tokens for a, b in zip(runs["here"], runs["dynamic"], strict=True))
    for kind in caches:
        print(f"{kind:8} cache {total[kind] / total['here']:6.3f}{'' if same else ' (other tokens!)'}")


def eagle_head(embeddings: Embeddings, **options: Any) -> Any:
    """Return a frozen EAGLE head with random weights."""
    kind: Any = HEADS["eagle"]
    return kind(kind.Config(**earlier(kind) | EAGLE | options), embeddings).eval().requires_grad_(False)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What the engine itself costs.")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    asked = parser.parse_args()
    target = random_target(asked.dtype)
    head = eagle_head(target.embeddings).to(target.dtype)
    prompts = random_prompts(4)
    size = sum(parameter.numel() for parameter in target.model.parameters())
    print(f"{size / 1e6:.0f}M parameters, {device_facts(target.device, target.dtype)}")
    for compiled in (False,) if asked.eager else (False, True):
        if compiled:
            begin = time.perf_counter()
            target.compile()
            speculate(target, HeadDrafter(head, TREES["tree"], "tree"), prompts[0].token, RequestParams(8, GREEDY))
            print(f"\ncompiled, which took {time.perf_counter() - begin:.0f} s")
        settings = RequestParams(asked.tokens, GREEDY)
        answers = {tuple(each.token): autoregress(target, each.token, settings).tokens for each in prompts}
        overhead(target, head, prompts[0].token, asked.tokens)
        efficiency(target, readers(answers), prompts, settings)
        against_hf(target, prompts, settings)


if __name__ == "__main__":
    main()
