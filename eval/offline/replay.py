"""Logs played back to the sources that draft from the text alone: what a target would have accepted, without one.

Every lossless rule emits the target's own text, whatever was drafted. So where a log holds that text, a draft that was
chosen without drawing is accepted as far as it agrees with it: exactly, at any temperature.
"""

import time

import torch

from eval.inputs.texts import Text
from eval.measures.metrics import counted
from eval.measures.results import UNTIMED, Request
from inference.protocol import Context, Drafter
from inference.verification.rng import Generator
from inference.verification.sample import GREEDY
from inference.verification.tree import agreed

RULE = "recorded text"


def play(drafter: Drafter, text: Text) -> Request:
    """Let a source draft along a text as decoding would: each pass after what the one before it committed."""
    written, drafted, spent = 1, 0, 0.0
    accepted: list[int] = []
    rng = Generator(0, torch.device("cpu"))  # none of them draws
    begin = time.perf_counter()
    state = drafter.start(text.prompt)
    spent += time.perf_counter() - begin
    while written < text.generated:
        end = text.start + written
        context = Context(text.token[:end], GREEDY, rng, text.limit - written - 1)
        begin = time.perf_counter()
        tree = state.propose(context).tree
        spent += time.perf_counter() - begin
        accepted.append(agreed(tree, text.token[end:]))
        drafted += len(tree.token) - 1
        written += accepted[-1] + 1
    return Request(counted(accepted, drafted, text.generated - 1), seconds=UNTIMED | {"draft": spent})
