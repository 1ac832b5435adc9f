"""Sequences side by side draft what each drafts alone, however many rows each commits and wherever it lies."""

from typing import Any

import pytest
import torch

from heads import HEADS
from heads.base import DraftHead, Features, Level, NewRows, Nodes
from heads.modules.kv_cache import SPARE, KVCache
from tests import toys

DOUBLE = torch.float64
STEPS = 40
EXACT = {"rtol": 1e-9, "atol": 1e-9}


class Rows:
    """Random rows of one sequence, taken a few at a time."""

    def __init__(self, head: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        width = head.embeddings.hidden_size
        self.token = torch.randint(toys.VOCAB, (1, 400), generator=generator)
        self.last = torch.randn(1, 400, width, dtype=DOUBLE, generator=generator)
        self.hidden = torch.randn(1, 400, len(head.feature_layers), width, dtype=DOUBLE, generator=generator)
        self.done = 0

    def take(self, count: int, padded: int) -> tuple[Features, torch.Tensor]:
        """Return the next `count` rows with what follows each, filled up to `padded` rows with others."""
        rows = slice(self.done, self.done + padded)
        self.done += count
        token = self.token[:, rows]
        return Features(token, self.hidden[:, rows], self.last[:, rows], torch.zeros_like(token)), token


def joined(parts: list[tuple[Features, torch.Tensor]]) -> tuple[Features, torch.Tensor]:
    *features, tokens = (torch.cat(each) for each in zip(*((*part[:4], token) for part, token in parts), strict=True))
    return Features(*features), tokens


def tree(head: DraftHead, state: Any, level: Level) -> torch.Tensor:
    """Return the logits of a tree's two levels, its second of another shape than its first."""
    count = len(level.logits)
    token = torch.tensor([[3, 5]]).expand(count, -1)
    above, eye = torch.zeros(count, 2, dtype=torch.long), torch.eye(2, dtype=torch.bool).expand(count, -1, -1)
    first = head.expand(state, level, Nodes(token, above, eye, 1))
    parent, ones = torch.tensor([[1, 0, 1]]).expand(count, -1), torch.eye(3, dtype=torch.bool).expand(count, -1, -1)
    mask = torch.cat([eye[:, parent[0]], ones], 2)
    second = head.expand(state, first, Nodes((token[:, :1] + torch.arange(3)) % toys.VOCAB, parent, mask, 2))
    return torch.cat([first.logits, second.logits], 1)


@pytest.mark.parametrize("name", [*HEADS, *toys.OPTIONS])
def test_ragged_commits_and_trees_are_those_of_each_sequence_alone(name: str) -> None:
    head: Any = toys.head(name, toys.target("llama", DOUBLE))
    prompts = (5, 90, 17)  # the second is longer than the ring of a toy, whose window is 12
    own, shared = [Rows(head, seed) for seed in range(3)], [Rows(head, seed) for seed in range(3)]
    alone: list[Any] = []
    for rows, length in zip(own, prompts, strict=True):
        alone.append(head.extend(None, NewRows(*rows.take(length, length))))
    cache: Any = None if alone[0][0] is None else KVCache(3, alone[0][0].window, alone[0][0].length.device)
    for slot, (rows, length) in enumerate(zip(shared, prompts, strict=True)):
        head.extend(cache and cache.alone(slot), NewRows(*rows.take(length, length)))
    if cache is not None:
        cache.longest = max(prompts)
    chance = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        counts = torch.randint(1, 5, (3,), generator=chance)
        widest = int(counts.max())
        alone = [
            head.extend(state, NewRows(*rows.take(int(count), int(count))))
            for (state, _), rows, count in zip(alone, own, counts, strict=True)
        ]
        both = joined([rows.take(int(count), widest) for rows, count in zip(shared, counts, strict=True)])
        cache, level = head.extend(cache, NewRows(*both, counts))
        if step % 8:
            continue
        expected = torch.cat([each.logits for _, each in alone])
        torch.testing.assert_close(level.logits, expected, **EXACT)
        grown = torch.cat([tree(head, state, each) for state, each in alone])
        torch.testing.assert_close(tree(head, cache, level), grown, **EXACT)
    if cache is not None:
        assert cache.length.tolist() == [rows.done for rows in own]
        assert cache.length.max() > 12 + 2 * SPARE, "no ring was filled a second time"


@pytest.mark.parametrize("name", ["eagle", "eagle3 injected", "block", "hydra"])
def test_a_moved_sequence_drafts_on(name: str) -> None:
    head: Any = toys.head(name, toys.target("llama", DOUBLE))
    rows = Rows(head, 0)
    state, level = head.extend(None, NewRows(*rows.take(9, 9)))
    cache = KVCache(3, state.window, state.length.device)
    for slot in range(3):
        head.extend(cache.alone(slot), NewRows(*Rows(head, slot + 5).take(20, 20)))
    head.extend(cache.alone(2), NewRows(*Rows(head, 0).take(9, 9)))
    cache.longest = 20
    cache.move(2, 0)
    expected = tree(head, state, level)
    torch.testing.assert_close(tree(head, cache, level), expected, **EXACT)


def test_a_commit_of_more_rows_than_a_ring_spares_is_cut_up() -> None:
    head: Any = toys.head("eagle", toys.target("llama", DOUBLE))
    rows, whole = Rows(head, 3), Rows(head, 3)
    state, _ = head.extend(None, NewRows(*rows.take(7, 7)))
    _, level = head.extend(state, NewRows(*rows.take(3 * SPARE + 5, 3 * SPARE + 5)))
    _, expected = head.extend(None, NewRows(*whole.take(3 * SPARE + 12, 3 * SPARE + 12)))
    torch.testing.assert_close(level.logits, expected.logits, **EXACT)
