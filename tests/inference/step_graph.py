"""The device step in graphs: its stages compiled, or captured once and run on other sequences.

Dynamo cannot trace the tests' shape checks, so `main`, which prints a case's facts as JSON, has a process of its own.
"""

import json
from itertools import chain
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from heads.modules.vocab import choose_draft_vocab
from inference.batch import Batch, batch_of
from inference.decode import Generation, RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from inference.drafters.policy import TreeConfig
from inference.step import DeviceStep
from inference.target import compiled as passes
from inference.target.compiled import Graphs
from inference.verification.sample import GREEDY, Sampling
from tests import toys
from tests.oracle import reference

REQUESTS = 5
# Small ones: to trace a stage takes time in proportion to its tree's depth.
TREES = {
    "chain": TreeConfig("chain", 2, 0, 0, [], []),
    "dynamic": TreeConfig("dynamic", 2, 3, 6, [], []),
    "best_first": TreeConfig("best_first", 2, 0, 6, [], []),
    "sampled": TreeConfig("sampled", 0, 0, 0, [], [2, 1]),
}
SAMPLINGS = {
    "greedy": (GREEDY, "auto"),
    "coupled": (Sampling(0.8, 0, 0.9), "coupled"),
    "penalised": (Sampling(0.0, 0, 1.0, repetition_penalty=1.5), "auto"),
    "sampled": (Sampling(1.2, 0, 1.0), "auto"),
    "recursive": (Sampling(1.2, 0, 0.9), "recursive"),
}


def batch(head: str, tree: str, requests: list[tuple[list[int], RequestParams]]) -> Batch:
    """Return a static batch of three."""
    target = toys.target("llama", torch.float64)
    own: Any = None if head == "plain" else toys.head(head, target)
    drafter = Baseline(target.device) if own is None else HeadDrafter(own, TREES[tree], head)
    made = batch_of(target, drafter, 3, requests)
    made.device_step.fixed_shapes = True
    return made


def decoded(of: Batch, requests: list[tuple[list[int], RequestParams]]) -> list[Generation]:
    """Decode requests that come and go."""
    waiting, found = list(enumerate(requests)), dict[int, Generation]()
    while waiting or of.running:
        if waiting and of.free:
            number, request = waiting.pop(0)
            found[number] = of.admit(number, *request)
        else:
            of.step()
        of.release()
    return [found[number] for number in range(len(requests))]


class Replay(NamedTuple):
    """A recorded stage that writes its results where they were first, as a CUDA graph does."""

    operations: Any
    inputs: list[Tensor]
    results: list[Tensor]

    def replay(self) -> None:
        """Run the operations."""
        for result, new in zip(self.results, self.operations(*self.inputs), strict=True):
            result.copy_(new)


class Recorded(Graphs):
    """Captures stages by recording their operations: numbers that the host knew stay what they were."""

    def __init__(self, step: DeviceStep) -> None:
        super().__init__(step.target.device)
        self.step, self.replays = step, 0

    def __call__(self, key: Any, stage: Any, *args: Any) -> Any:
        """Count what is replayed."""
        self.replays += key in self.captured
        return super().__call__(key, stage, *args)

    def capture(self, stage: Any, *args: Any) -> tuple[Any, Any]:
        """Record a stage without a trace of its having run."""
        step, leaves = self.step, [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, Tensor)]
        assert step.slots is not None
        assert step.target.eos_mask is not None
        kept = [step.target.eos_mask, *step.held_tensors(), *leaves]
        inputs, returned = list({id(tensor): tensor for tensor in kept}.values()), list[Any]()

        def traced(*_: Tensor) -> list[Tensor]:
            returned.append(stage(*args))
            return [leaf for leaf in tree_leaves(returned[-1]) if isinstance(leaf, Tensor)]

        saved = [tensor.clone() for tensor in inputs]
        with patch.object(torch.compiler, "is_compiling", lambda: True):  # on a CPU a nucleus looks at its probs
            operations = make_fx(traced)(*inputs)
        for tensor, before in zip(inputs, saved, strict=True):
            tensor.copy_(before)
        result = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, returned[-1])
        return Replay(operations, inputs, [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]), result


def captured(step: DeviceStep) -> None:
    """Capture the stages of the step as they come."""
    step.graphs = Recorded(step)


def drafts_compiled(step: DeviceStep) -> None:
    """Compile the head's stages alone, as on a CPU: all slots take part in them, and in nothing else."""
    step.fixed_shapes, step.target.compiles_drafts, passes.BACKEND = False, True, "eager"


def layers_compiled(step: DeviceStep) -> None:
    """Compile the target's decoder layers."""
    passes.BACKEND = "eager"
    step.target.compile()


WAYS = {"captured": captured, "drafts": drafts_compiled, "layers": layers_compiled}


def side_by_side() -> dict[str, bool]:
    """Return whether compiled drafts of several heads and trees, in turns, are accepted as the reference's are."""
    passes.BACKEND = "eager"
    target = toys.target("llama", torch.float64)
    config = toys.HEAD_CONFIGS["eagle"] | {"layers": 1}
    heads: list[Any] = [toys.head_of("eagle", config, target) for _ in range(2)]
    for weight in heads[1].parameters():
        weight.data.mul_(-1)
    sources = [HeadDrafter(head, TREES["dynamic"], "head") for head in heads]
    sources.append(HeadDrafter(heads[0], TREES["chain"], "head"))
    greedy, warm = (RequestParams(12, how, seed=1) for how in (GREEDY, Sampling(0.8, 0, 0.9, repetition_penalty=1.3)))
    kinds = [(sources[0], warm), *((source, greedy) for source in sources)]
    texts = [[(source, toys.prompt(i, 4 + 9 * i), way) for i in range(2)] for source, way in kinds]
    in_turns = [request for several in zip(*texts, strict=True) for request in several]

    def facts(generation: Generation) -> tuple[Any, ...]:
        return tuple(generation.tokens), tuple((step.drafted, step.accepted, step.ranks) for step in generation.steps)

    expected = [facts(reference(target, *request)) for request in list(chain(*texts))]
    stance, rare = torch.compiler.set_stance, []
    target.compiles_drafts = True
    with patch.object(torch.compiler, "set_stance", lambda **named: rare.append(named) or stance(**named)):
        found = {id(request): facts(speculate(target, *request)) for request in in_turns}
    return {
        "same": [found[id(request)] for request in list(chain(*texts))] == expected,
        "differing": len({steps for _, steps in expected}) > len(texts),
        "guarded rarely": len(rare) > sum(len(steps) for _, steps in expected),
    }


def by_turns() -> dict[str, bool]:
    """Return whether two batches of heads that share the target's lm_head draft as the reference does, step by step."""
    passes.BACKEND = "eager"
    target = toys.target("llama", torch.float64)
    heads: list[Any] = [toys.head("hass", target) for _ in range(2)]
    choose_draft_vocab(heads[1], torch.randint(100, (toys.VOCAB,), generator=torch.Generator().manual_seed(9)))
    sources = [HeadDrafter(head, TREES["dynamic"], "hass") for head in heads]
    request = toys.prompt(5, 9), RequestParams(16, GREEDY)
    expected = [reference(target, source, *request) for source in sources]
    target.compiles_drafts = True
    batches = [batch_of(target, source, 1, [request]) for source in sources]
    found = [of.admit(0, *request) for of in batches]
    while any(of.running for of in batches):
        for of in batches:
            if of.running:
                of.step()
            of.release()
    same = [
        (one.tokens, one.steps[0].ranks) == (other.tokens, other.steps[0].ranks)
        for one, other in zip(found, expected, strict=True)
    ]
    counts = [[[step.accepted for step in one.steps] for one in several] for several in (found, expected)]
    return {"same": all(same) and counts[0] == counts[1], "differing": counts[0][0] != counts[0][1]}


def main(cases: list[str]) -> None:
    """Print the facts of every case: head:tree:sampling:way."""
    for case in cases:
        if case in (alone := {"side by side": side_by_side, "by turns": by_turns}):
            torch._dynamo.reset()
            print(json.dumps({case: alone[case]()}), flush=True)
            continue
        head, tree, sampling, way = case.split(":")
        how, rule = SAMPLINGS[sampling]
        requests = [
            (toys.prompt(i, 3 + 5 * i), RequestParams(9 + 4 * i, how, seed=i, rule=rule)) for i in range(REQUESTS)
        ]
        with torch.inference_mode():
            expected = [answer.tokens for answer in decoded(batch(head, tree, requests), requests)]
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            graphed = batch(head, tree, requests)
            WAYS[way](graphed.device_step)
            found = [answer.tokens for answer in decoded(graphed, requests)]
            graphed.device_step.target.compiled = None
            graphed.device_step.target.compiles_drafts = False
        count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if isinstance(graphed.device_step.graphs, Recorded):
            assert graphed.device_step.graphs.replays > REQUESTS, "hardly a stage was replayed"
        print(json.dumps({case: {"same": found == expected, "graphs": count}}), flush=True)
