"""Lookahead decoding against a literal one: a pass of its own for every rider, a plain list for the pool."""

import random
from typing import Any

import pytest
import torch

from inference.drafters.lookahead import Lookahead
from inference.target.target import Target
from tests import toys
from tests.inference.model_free import Recorder, accepted, decode, logits, make, plain

TOKENS = 24


def column(levels: list[list[int]], last: int, i: int) -> list[int]:
    """Return what the token of a level in a column has before it from the root on, itself included."""
    return levels[0][1 : i + 1] + [level[i] for level in levels[1 : last + 1]]


def literal(
    target: Target, config: Lookahead.Config, prompt: list[int], answer: list[int]
) -> tuple[list[set[tuple[int, ...]]], list[int]]:
    """Decode as the method is written down; return each pass's drafted n-grams, and how many tokens were accepted."""
    size, chance = config.ngram, random.Random(0)
    levels = [chance.choices(prompt, k=config.window) for _ in range(size - 1)]
    pool = [prompt[end - size : end] for end in range(size, len(prompt) + 1)] if config.from_prompt else []
    at, drafts, counts = 1, [], []
    while at < len(answer):
        room = len(answer) - at - 1
        root = answer[at - 1]
        recent: list[tuple[int, ...]] = []
        for ngram in reversed(pool):
            if ngram[0] == root and tuple(ngram[1:]) not in recent and len(recent) < config.guesses:
                recent.append(tuple(ngram[1:]))
        drafts.append({rest[:room] for rest in recent if room})
        ahead = answer[at:]
        matched = [
            next((i for i, token in enumerate(rest[:room]) if token != ahead[i]), min(room, len(rest)))
            for rest in recent
        ]
        counts.append(max(matched, default=0))
        width = sum(i + size - 2 <= room for i in range(len(levels[0])))
        levels = [level[:width] for level in levels]
        if width:
            levels[0][0] = root
            text = prompt + answer[:at]
            written = [int(logits(target, text + column(levels, size - 2, i)).argmax()) for i in range(width)]
            if len(counts) > size - 2:
                pool += [[*(level[i] for level in levels), written[i]] for i in range(width)]
            levels = [*levels[1:], written]
        at += counts[-1] + 1
    return drafts, counts


@pytest.mark.parametrize(
    "values",
    [
        {"window": 4, "ngram": 4, "guesses": 3},
        {"window": 6, "ngram": 3, "guesses": 1, "from_prompt": False},
        {"window": 1, "ngram": 5, "guesses": 2},
    ],
)
def test_drafts_and_acceptance_equal_the_literal_method(values: dict[str, Any]) -> None:
    target = toys.target("llama", torch.float64)
    source = make("lookahead", target, **values)
    total = 0
    for seed in range(2):
        recorder = Recorder(source)
        begin = toys.prompt(seed, 9)
        prompt = begin + plain(target, begin, 12) + begin[:4]
        answer = plain(target, prompt, TOKENS)
        drafts, counts = literal(target, source.config, prompt, answer)
        made = decode(target, recorder, prompt, TOKENS)
        assert made.tokens == answer
        assert [leaves(proposal.tree) for proposal in recorder.proposed] == [whole(draft) for draft in drafts]
        assert accepted(made) == counts
        total += sum(map(len, drafts))
    assert total > 0


def leaves(tree: Any) -> set[tuple[int, ...]]:
    """Return the token sequences from below the root to every leaf."""
    sequences: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token.tolist(), tree.parent.tolist(), strict=True):
        sequences.append(() if parent < 0 else (*sequences[parent], token))
    return whole(set(sequences[1:]))


def whole(sequences: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Leave out what another sequence begins with."""
    longer = {other[:size] for other in sequences for size in range(len(other))}
    return sequences - longer
