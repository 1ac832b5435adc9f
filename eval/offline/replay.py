"""Logs played back to the sources that draft from the text alone: what a target would have accepted, without one.

Every lossless rule emits the target's own text, whatever was drafted. So where a log holds that text, a draft that was
chosen without drawing is accepted as far as it agrees with it: exactly, at any temperature.
"""

import time
from collections.abc import Sequence

import torch

from eval.inputs.texts import Text
from eval.measures.cost_model import Step
from eval.measures.results import Row
from eval.measures.tally import Heading, Tally, rows, tally
from inference.protocol import Context, Drafter
from inference.verification.rng import Generator
from inference.verification.sample import GREEDY
from inference.verification.tree import agreed

RULE = "recorded text"


def replayed(drafters: Sequence[Drafter], texts: Sequence[Text], heading: Heading) -> list[Row]:
    """Return each source's rows; one that remembers meets the texts in their order, beginning with nothing."""
    made: list[Row] = []
    for drafter in drafters:
        drafter.forget()
        tallies = [play(drafter, text) for text in texts]
        made += rows(drafter.name, drafter.tree, RULE, tallies, heading, drafter.memory)
    return made


def play(drafter: Drafter, text: Text) -> Tally:
    """Let a source draft along a text as decoding would: each pass after what the one before it committed."""
    made, steps, spent = 1, [], 0.0
    rng = Generator(0, torch.device("cpu"))  # none of them draws
    begin = time.perf_counter()
    state = drafter.start(text.token[: text.start])
    spent += time.perf_counter() - begin
    while made < text.made:
        end = text.start + made
        context = Context(text.token[:end], GREEDY, rng, text.limit - made - 1)
        begin = time.perf_counter()
        tree = state.propose(context).tree
        spent += time.perf_counter() - begin
        accepted = agreed(tree, text.token[end:])
        steps.append(Step(end - 1, len(tree.token) - 1, accepted))
        made += accepted + 1
    return tally(steps, text.made - 1, spent)
