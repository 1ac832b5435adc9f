"""What a step costs at long contexts, on a target of 110M random weights: the engine beside the target by itself.

    python benchmarks/long_context.py [--contexts 2048 8192 32768] [--kv-heads 12]

A row is a context, its cache filled with random keys and values. `alone` is a bare forward of the transformers model
over as many rows with a cache of that length, its attention's own work included; `step` is the engine's, drafts aside:
the pass with its mask, the choice of the path, and the cache's compaction. If the engine's work grows no faster than
the target's attention, their ratio does not rise with the context. `attention` is the bare forward's growth from no
context on; `mask` and `settle` are parts of the step; `head` is an EAGLE head's commit of two rows and its proposal.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import torch

from benchmarks.engine import SHAPE, eagle_head, random_target
from eval.measures.machine import device_facts
from heads.base import Features, NewRows
from heads.common.target_config import cache_argument
from heads.modules.kv_cache import KVCache
from inference.drafters.head import HeadDrafter
from inference.drafters.host import DrafterState, HostDrafter
from inference.drafters.policy import TreeConfig
from inference.protocol import DraftContext, DraftInputs, Proposal
from inference.request import Request, RequestParams
from inference.step import DeviceStep
from inference.target.cache import BatchCache, TargetCache
from inference.target.model import TargetOutput
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree

ROOM, SHORT = 512, 16  # rows beyond the longest context; a context that costs nothing
DRAFTS = {"plain": 0, "chain of 4": 4, "tree of 8": 8, "tree of 32": 32}
TREE = TreeConfig("dynamic", 4, 3, 8, [], [])


class Planted(HostDrafter, DrafterState):
    """Drafts the same tree again and again, for nothing."""

    name, tree = "planted", "planted"

    def __init__(self, draft: DraftTree) -> None:
        self.draft = draft

    def start(self, prompt: list[int]) -> "Planted":
        """Return the state of any sequence: none."""
        return self

    def propose(self, context: DraftContext) -> Proposal:
        """Return the tree."""
        return Proposal(self.draft)


def filled(target: Target, length: int) -> TargetCache:
    """Return a cache of random rows."""
    cache = target.cache()
    config: Any = target.config
    shape = 1, config.num_key_value_heads, length, target.embeddings.layer_dims.head_dim
    chance = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(shape, generator=chance, dtype=target.dtype) for _ in range(2))
    for layer in range(config.num_hidden_layers):
        cache.hf.update(keys, values, layer)
    return cache


def typical(run: Callable[[], float], repeats: int) -> float:
    """Return the median milliseconds that a call reports, after two that do not count."""
    return 1e3 * statistics.median([run() for _ in range(repeats + 2)][2:])


def draft_of(nodes: int) -> DraftTree:
    """Return a chain of up to 4 nodes, else a tree of four levels."""
    width = max(1, nodes // 4)
    parents = [max(0, 1 + (i // width - 1) * width) for i in range(nodes)]
    return DraftTree(torch.arange(nodes + 1), torch.tensor([-1, *parents]))


@torch.inference_mode()
def alone(target: Target, cache: TargetCache, rows: int) -> float:
    """Return the seconds of a bare forward over so many rows behind the cache, which is left as it was."""
    length = cache.length
    token, position = torch.arange(rows)[None], torch.arange(length, length + rows)[None]
    base: Any = target.base
    cached = {cache_argument(base): cache.hf}
    begin = time.perf_counter()
    out = base(input_ids=token, position_ids=position, use_cache=True, **cached)
    target.embeddings.logits(out.last_hidden_state)
    spent = time.perf_counter() - begin
    cache.keep(length, [])
    return spent


@torch.inference_mode()
def step(target: Target, cache: TargetCache, draft: DraftTree) -> tuple[float, float]:
    """Return the seconds of one step of the engine behind the cache, and those outside the target's pass."""
    length = cache.length
    request = Request(target, [0] * (length + 1), RequestParams(ROOM, GREEDY), cache)
    request.generation.tokens.append(0)
    drafts, batch = Planted(draft).batch(1), BatchCache(cache.storage, TargetCache)
    drafts.start_sequence(0, request.token_ids, TargetOutput(torch.zeros(1, 1, 0, 1), torch.zeros(1, 1, 1), None))
    batch.active = [cache]
    DeviceStep(target, batch, drafts, "planted").step([request])
    cache.keep(length, [])
    done = request.generation.steps[-1]
    return done.verify_s + done.other_s, done.other_s


@torch.inference_mode()
def masked(target: Target, length: int, draft: DraftTree) -> float:
    """Return the seconds that positions and mask of a pass take."""
    begin = time.perf_counter()
    position, seen = trees.layout(draft, length)
    target.attention_mask(seen[None], position[None], None)
    return time.perf_counter() - begin


@torch.inference_mode()
def drafting(drafter: HeadDrafter, target: Target, length: int) -> Callable[[], float]:
    """Return what times a head's commit of two rows and its proposal, behind so many committed rows."""
    shape, width = (
        (1, target.embeddings.layer_dims.num_heads, length, target.embeddings.layer_dims.head_dim),
        target.embeddings.hidden_size,
    )
    chance = torch.Generator().manual_seed(0)
    keys, values, rows = (torch.randn(each, generator=chance) for each in (shape, shape, (1, 2, width)))
    committed = torch.zeros(1, length, dtype=torch.long, device=target.device)
    cache, position = KVCache.opened(None, None, committed)
    cache.append(0, keys, values, position)
    token, drafts = torch.tensor([[1, 2]]), drafter.batch(1)
    features = Features(token, rows.new_zeros(1, 2, 0, width), rows, torch.zeros_like(token))
    roots, room = DraftInputs(token[:, 1:], GREEDY), torch.tensor([ROOM])
    drafts.cache = cache
    _, drafts.buffers = drafter.head.extend(cache, NewRows(features, token, torch.tensor([2])))

    @torch.inference_mode()
    def once() -> float:
        cache.length[:], cache.longest = length, length
        begin = time.perf_counter()
        drafts.extend(features, torch.tensor([2]))
        drafts.draft_trees(roots, room, length + 2, allow_host_sync=True)
        return time.perf_counter() - begin

    return once


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a step costs at long contexts.")
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 8192, 32768])
    parser.add_argument("--kv-heads", type=int, default=SHAPE["num_key_value_heads"])
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    positions = max(asked.contexts) + ROOM
    target = random_target("float32", max_position_embeddings=positions, num_key_value_heads=asked.kv_heads)
    drafter = HeadDrafter(eagle_head(target.embeddings, num_kv_heads=12), TREE, "eagle")
    print(f"{device_facts(target.device, target.dtype)}, {asked.kv_heads} key-value heads; milliseconds")
    titles = "context", "draft", "alone", "attention", "step", "step/alone", "mask", "settle", "head"
    print("".join(f"{title:>12}" for title in titles))
    short: dict[str, float] = {}
    for length in [SHORT, *asked.contexts]:
        cache = filled(target, length)
        own = typical(drafting(drafter, target, length), asked.repeats)
        for name, nodes in DRAFTS.items():
            draft = draft_of(nodes)
            pairs = [(alone(target, cache, nodes + 1), *step(target, cache, draft)) for _ in range(asked.repeats + 2)]
            bare, whole, settle = (1e3 * statistics.median(each) for each in zip(*pairs[2:], strict=True))
            mask = typical(partial(masked, target, length, draft), asked.repeats) if nodes else 0.0
            grown = bare - short.setdefault(name, bare)
            cells = [f"{value:12.2f}" for value in (bare, grown, whole, whole / bare, mask, settle, own)]
            print(f"{length:12}{name:>12}" + "".join(cells), flush=True)
        del cache


if __name__ == "__main__":
    main()
