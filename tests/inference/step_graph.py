"""The device step as one graph: compiled whole, and recorded once and run on other sequences. A script of its own.

The tests' shape checks, which dynamo cannot trace, are not installed here. It prints, as JSON, a case's facts.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from heads.modules import layers
from inference.batch import Batch, batch_of
from inference.decode import Generation, Settings
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Plain
from inference.laps import Laps
from inference.step import DeviceStep
from inference.verification.sample import GREEDY, Sampling
from tests import toys

REQUESTS = 7
SAMPLINGS = {"greedy": (GREEDY, "auto"), "coupled": (Sampling(0.8, 0, 0.9), "coupled")}


class Silent(Laps):
    """Marks nothing: time does not belong into a graph."""

    def mark(self, ended: str | None) -> None:
        """Do nothing."""


def batch(head: str, tree: str, requests: list[tuple[list[int], Settings]]) -> Batch:
    """Return a static batch of three."""
    target = toys.target("llama", torch.float64)
    own: Any = None if head == "plain" else toys.head(head, target)
    drafter = Plain(target.device) if own is None else HeadDrafter(own, toys.TREES[tree], head)
    made = batch_of(target, drafter, 3, requests)
    assert made.device_step is not None
    made.device_step.static = True
    return made


def decoded(of: Batch, requests: list[tuple[list[int], Settings]]) -> list[Generation]:
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


def replace_run(step: Any, run: Any) -> None:
    """Let a function of the step's arguments take the place of its run, but for the first one, which makes tables."""
    original, first = step.run, [True]

    def replaced(slots: Any, reach: int, settings: Settings, laps: Laps) -> Any:
        if first:
            first.clear()
            return original(slots, reach, settings, laps)
        return run(slots, reach, settings)

    step.run = replaced


def compiled(step: DeviceStep) -> None:
    """Compile the step whole; a second form of it is an error."""
    original = step.run
    torch._dynamo.config.error_on_recompile = True
    replace_run(
        step,
        torch.compile(
            lambda slots, reach, settings: original(slots, reach, settings, Silent(step.target.device)),
            fullgraph=True,
            backend="eager",
        ),
    )


def split(step: DeviceStep) -> None:
    """Compile the step with every attention under a mask split over its keys."""
    layers.count_pieces = lambda _, key: 4 if key.shape[2] % 4 == 0 else 1
    compiled(step)


def recorded(step: DeviceStep) -> None:
    """Record the operations of the first step, and run these in all that follow."""
    original, graphs = step.run, list[Any]()

    def run(slots: Any, reach: int, settings: Settings) -> Any:
        kept = [*slots, *step.cache.storage.blocks, *_state(step)]
        if not graphs:

            def traced(*_: Tensor) -> Tensor:
                return original(slots, reach, settings, Silent(step.target.device))[0]

            saved = [tensor.clone() for tensor in kept]
            graphs.append(make_fx(traced)(*kept))
            for tensor, before in zip(kept, saved, strict=True):
                tensor.copy_(before)
        return graphs[0](*kept), None, None, None

    replace_run(step, run)


def _state(step: DeviceStep) -> list[Tensor]:
    drafts: Any = step.drafts
    if getattr(drafts, "cache", None) is None:
        return []
    return [drafts.cache.length, *drafts.buffers[:2], *(half for pair in drafts.cache.layers for half in pair)]


def main() -> None:
    """Print the facts of every case in the arguments: head:tree:sampling:way."""
    count_pieces = layers.count_pieces
    for case in sys.argv[1:]:
        head, tree, sampling, way = case.split(":")
        how, rule = SAMPLINGS[sampling]
        requests = [(toys.prompt(i, 3 + 5 * i), Settings(9 + 4 * i, how, seed=i, rule=rule)) for i in range(REQUESTS)]
        with torch.inference_mode():
            expected = [answer.tokens for answer in decoded(batch(head, tree, requests), requests)]
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            graphed = batch(head, tree, requests)
            assert graphed.device_step is not None
            {"compiled": compiled, "recorded": recorded, "split": split}[way](graphed.device_step)
            found = [answer.tokens for answer in decoded(graphed, requests)]
        layers.count_pieces = count_pieces
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        print(json.dumps({case: {"same": found == expected, "graphs": graphs}}), flush=True)


if __name__ == "__main__":
    main()
