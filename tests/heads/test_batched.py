"""Sequences side by side draft what each drafts alone, however many rows each commits and wherever it lies."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import HEADS
from heads.base import DraftHead, Features, LevelNodes, LevelOutput, NewRows
from heads.formats.store import CONFIG, load_head, save_head
from heads.modules.kv_cache import SPARE, KVCache
from heads.rows import next_token
from tests import drafting, toys

DOUBLE = torch.float64
STEPS = 20
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


def tree(head: DraftHead, state: Any, level: LevelOutput) -> torch.Tensor:
    """Return the logits of a tree's two levels, its second of another shape than its first."""
    count = len(level.logits)
    token = torch.tensor([[3, 5]]).expand(count, -1)
    above, eye = torch.zeros(count, 2, dtype=torch.long), torch.eye(2, dtype=torch.bool).expand(count, -1, -1)
    first = head.expand(state, level, LevelNodes(token, above, eye, 1))
    parent, ones = torch.tensor([[1, 0, 1]]).expand(count, -1), torch.eye(3, dtype=torch.bool).expand(count, -1, -1)
    mask = torch.cat([eye[:, parent[0]], ones], 2)
    second = head.expand(state, first, LevelNodes((token[:, :1] + torch.arange(3)) % toys.VOCAB, parent, mask, 2))
    return torch.cat([first.logits, second.logits], 1)


OTHERS = ("eagle3 injected", "hydra plain", "mtp of the target's kind", "block both ways", "block of DFlash2")


@pytest.mark.parametrize("name", [*HEADS, *OTHERS])
def test_ragged_commits_and_trees_are_those_of_each_sequence_alone(name: str) -> None:
    head: Any = toys.head(name, toys.target("llama", DOUBLE))
    prompts = (5, 90, 17)  # the second is longer than the ring of a toy, whose window is 12
    own, shared = [Rows(head, seed) for seed in range(3)], [Rows(head, seed) for seed in range(3)]
    alone: list[Any] = []
    for rows, length in zip(own, prompts, strict=True):
        alone.append(head.extend(None, NewRows(*rows.take(length, length))))
    cache: Any = None if alone[0][0] is None else KVCache(3, alone[0][0].window, alone[0][0].length.device)
    for slot, (rows, length) in enumerate(zip(shared, prompts, strict=True)):
        head.extend(cache and cache.for_new_sequence(slot), NewRows(*rows.take(length, length)))
    if cache is not None:
        cache.longest = max(prompts)
    chance = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        counts = torch.randint(1, 9, (3,), generator=chance)
        widest = int(counts.max())
        alone = [
            head.extend(state, NewRows(*rows.take(int(count), int(count))))
            for (state, _), rows, count in zip(alone, own, counts, strict=True)
        ]
        both = joined([rows.take(int(count), widest) for rows, count in zip(shared, counts, strict=True)])
        cache, level = head.extend(cache, NewRows(*both, counts))
        if step % 5:
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
        head.extend(cache.for_new_sequence(slot), NewRows(*Rows(head, slot + 5).take(20, 20)))
    head.extend(cache.for_new_sequence(2), NewRows(*Rows(head, 0).take(9, 9)))
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


TREE = {"kind": "dynamic", "depth": 4, "top_k": 3, "nodes": 9, "paths": [], "widths": []}
ATTENTIVE = ["eagle", "mtp", "hass", "eagle3", "eagle3 injected", "hydra", "block", "block both ways"]


def head(name: str, length: int | None) -> Any:
    made: Any = toys.head(name, toys.target("llama", DOUBLE))
    for part in made.modules():
        if hasattr(part, "config"):
            part.config = replace(made.config, length=length)
    return made


def features(of: Any, length: int = 14) -> Features:
    target, token = toys.target("llama", DOUBLE), torch.tensor([toys.prompt(1, length)])
    return target.features(token, torch.zeros_like(token), of.feature_layers)


def part(of: Features, start: int, end: int) -> Features:
    return Features(*(each[:, start:end] for each in of[:4]))


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("name", ATTENTIVE)
def test_unroll_looks_back_as_far_as_drafting(name: str, length: int) -> None:
    made, depths = head(name, length), 4
    packed = features(made)
    drafts, following = made.unroll(packed, depths), next_token(packed.token)[0]
    everything = head(name, None).unroll(packed, depths)
    for t in range(0, 9, 2):
        state, level = drafting.extend(made, None, part(packed, 0, t + 1), following[: t + 1])
        for depth in range(1, depths + 1):
            found = made.compute_logits(drafts[depth - 1].state[0, t], depth)
            torch.testing.assert_close(found, level.logits[0, 0], rtol=1e-9, atol=1e-9)
            if depth < depths:
                token, mask = packed.token[0, t + 1 + depth][None], torch.ones(1, depth, dtype=torch.bool)
                level = drafting.expand(made, state, level, token, torch.zeros(1, dtype=torch.long), mask)
    same = torch.isclose(drafts[0].state, everything[0].state).all(-1)[0]
    # As far as all of a text is seen it makes no difference; behind, it does, and more so through further layers.
    # A block's first slot stands two positions behind the row, its last, which the first may see, five.
    reach = max(0, length - {"block": 2, "block both ways": 5}.get(name, 0))
    assert same[:reach].all()
    assert not same[reach:].any()


@pytest.mark.parametrize("name", ATTENTIVE)
def test_rows_out_of_sight_are_dropped_and_positions_go_on(name: str) -> None:
    made = head(name, 4)
    packed = features(made)
    following = next_token(packed.token)[0]
    whole, expected = drafting.extend(made, None, packed, following)
    state = level = None
    for start, end in ((0, 5), (5, 6), (6, 13), (13, 14)):
        state, level = drafting.extend(made, state, part(packed, start, end), following[start:end])
        assert state.length.tolist() == [end]
        assert state.attn_mask(torch.tensor([[end - 1]]), torch.tensor([end - 1])).sum() == min(end, 4)
    torch.testing.assert_close(level.logits, expected.logits, rtol=1e-9, atol=1e-9)
    assert whole.length.tolist() == [14]


def test_a_head_that_was_saved_without_a_length_looks_at_everything(tmp_path: Path) -> None:
    target, folder = toys.target(), tmp_path / "head"
    save_head(folder, toys.head("eagle", target), target.spec, TREE)
    assert load_head(folder, target.embeddings, target.spec).config.length == 12
    content = json.loads((folder / CONFIG).read_text())
    del content["head"]["length"]
    (folder / CONFIG).write_text(json.dumps(content))
    assert load_head(folder, target.embeddings, target.spec).config.length is None
