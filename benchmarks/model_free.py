"""What a step of the model-free drafters costs: propose and observe, without the target.

    python benchmarks/model_free.py [SOURCE ...]

The sources are the files in conf/drafter of those names, all of them by default. Each replays a text as if the target
had written it, after a context of growing length: real text, tokenised by the bundled target; random tokens; and 64
tokens over and over, where every suffix has been seen before. The target's logits are random, of its vocabulary, with
the true token on top along the accepted path.

Milliseconds: the median and the slowest of 20 steps, and `index`, the one-off cost of taking in the context. `tokens`
are those that a step commits here, which for sources that learn from logits says nothing, `drafted` those that it
drafts and lets ride along.
"""

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch
from omegaconf import OmegaConf

from data.text.prompts import load_prompts
from eval.measures.machine import device_facts
from inference.drafters.host import HostDrafter
from inference.drafters.registry import make
from inference.protocol import CommittedTokens, DraftContext, Verified
from inference.target.target import Target
from inference.verification.rng import RequestRng
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree, children

NAMES = ("prompt_lookup", "prompt_lookup_hf", "prompt_lookup_vllm", "suffix", "recycling", "recycling80", "lookahead")
CONTEXTS = (512, 1024, 2048, 4096, 8192)
STEPS = 20
ROOM = 64


class Cost(NamedTuple):
    """Seconds of every step and of taking in the context, tokens committed and drafted in all."""

    steps: list[float]
    index: float
    committed: int
    drafted: int


def real_text(target: Target, length: int) -> list[int]:
    """Return the start of the bundled target's training chats as tokens."""
    text: list[int] = []
    for chat in load_prompts(str(ROOT / "examples" / "tiny" / "chats.jsonl.xz"), target.tokenizer, 1000):
        text += chat.token
    if len(text) < length:
        raise ValueError(f"examples/tiny/chats.jsonl.xz gives {len(text)} tokens, but {length} are needed")
    return text[:length]


def accepted(tree: DraftTree, following: list[int]) -> list[int]:
    """Return the nodes that the text follows."""
    below, token, path = children(tree), tree.token.tolist(), [0]
    for wanted in following:
        child = next((node for node in below[path[-1]] if token[node] == wanted), None)
        if child is None:
            break
        path.append(child)
    return path


def commit(tree: DraftTree, look_ahead: int, following: list[int], vocabulary: int) -> CommittedTokens:
    """Return what the engine would report if the target wrote `following`."""
    path = accepted(tree, following)
    law = torch.randn(len(tree.token) + look_ahead, vocabulary)
    law[path, following[: len(path)]] = 20.0
    logits, behind = law.tensor_split([len(tree.token)])
    return CommittedTokens(following[: len(path)], Verified(tree, path, logits, behind if look_ahead else None))


def replay(source: HostDrafter, text: list[int], start: int, vocabulary: int) -> Cost:
    """Take in `start` tokens, then run steps over what follows."""
    began = time.perf_counter()
    state = source.start(text[:start])
    index = time.perf_counter() - began
    every = torch.arange(vocabulary)  # one pass over all tokens, so that a source that learns from logits is warm
    known = DraftTree(every, every - 1)
    state.update(CommittedTokens([0], Verified(known, [0], torch.randn(vocabulary, vocabulary))))
    at, seconds, drafted, draws = start + 1, [], 0, RequestRng(0, 0, coupled=False)
    for step in range(STEPS + 1):
        context = DraftContext(text[:at], GREEDY, draws, ROOM)
        began = time.perf_counter()
        proposal = state.propose(context)
        proposed = time.perf_counter()
        tree, look_ahead = proposal.tree, proposal.look_ahead
        riding = 0 if look_ahead is None else len(look_ahead.token)
        settled = commit(tree, riding, text[at : at + ROOM], vocabulary)
        resumed = time.perf_counter()
        state.update(settled)
        spent = proposed - began + time.perf_counter() - resumed
        if step == 0:  # takes in the context's last token, and first-time costs
            start = at + len(settled.token)
        else:
            seconds.append(spent)
            drafted += len(tree.token) - 1 + riding
        at += len(settled.token)
    return Cost(seconds, index, at - start, drafted)


def main() -> None:
    """Measure and print."""
    names = sys.argv[1:] or list(NAMES)
    target = Target.load(str(ROOT / "examples" / "tiny"), device="cpu")
    vocabulary, length = target.embeddings.vocab_size, max(CONTEXTS) + 2 + (STEPS + 1) * (ROOM + 1)
    chance = random.Random(0)
    once = chance.choices(range(vocabulary), k=64)
    texts = {
        "real": real_text(target, length),
        "random": chance.choices(range(vocabulary), k=length),
        "looped": (once * length)[:length],
    }
    print(f"vocabulary {vocabulary}, {device_facts(target.device, target.dtype)}")
    print(f"{'source':20}{'text':8}{'context':>8}{'ms':>8}{'slowest':>9}{'index ms':>10}{'tokens':>8}{'drafted':>9}")
    for name in names:
        options: Any = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/drafter/{name}.yaml"))
        for kind, text in texts.items():
            for start in CONTEXTS:
                source: Any = make(name, options, target)
                cost = replay(source, text, start, vocabulary)
                print(
                    f"{name:20}{kind:8}{start:8}{1e3 * statistics.median(cost.steps):8.3f}{1e3 * max(cost.steps):9.3f}"
                    f"{1e3 * cost.index:10.1f}{cost.committed / STEPS:8.2f}{cost.drafted / STEPS:9.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
