"""The index arithmetic, on a row that can be read off by eye."""

import pytest
import torch

from heads import rows

DOCUMENT = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1]])
TOKEN = torch.tensor([[10, 11, 12, 13, 20, 21, 22, 0]])
MASK = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0]])


def test_positions_restart_in_each_document() -> None:
    assert rows.positions(DOCUMENT).tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]


def test_visible_is_causal_within_documents() -> None:
    seen = rows.visible(DOCUMENT)[0]
    assert seen[3].tolist() == [True] * 4 + [False] * 4
    assert seen[5].tolist() == [False] * 4 + [True, True, False, False]


def test_labels_and_drafted_tokens() -> None:
    assert rows.next_token(TOKEN)[0, :4].tolist() == [11, 12, 13, 20]
    assert rows.drafted_token(TOKEN, 1)[0, :2].tolist() == [11, 12]
    assert rows.shift_left(TOKEN, 1 + 1)[0, :2].tolist() == [12, 13]  # the label of depth 1
    assert rows.shift_left(TOKEN, 1 + 2)[0, :1].tolist() == [13]


def test_a_path_gives_the_drafted_tokens() -> None:
    path = torch.tensor([[[5, 6], [7, 0], [1, 2]] + [[0, 0]] * 5])  # indices into the row's tokens
    assert rows.drafted_token(TOKEN, 1, path)[0, :3].tolist() == [21, 0, 11]
    assert rows.drafted_token(TOKEN, 2, path)[0, :3].tolist() == [22, 10, 12]


def test_the_last_rows_repeat_where_none_follow() -> None:
    assert rows.shift_left(TOKEN, 0) is TOKEN
    assert rows.teacher(TOKEN[..., None], 3)[0, :, 0].tolist() == [13, 20, 21, 22, 0, 0, 0, 0]


X = torch.arange(12).view(2, 3, 2)  # row t of sequence b is [6b + 2t, 6b + 2t + 1]


@pytest.mark.parametrize(("count", "expected"), [(None, [[4, 5], [10, 11]]), ([3, 1], [[4, 5], [6, 7]])])
def test_each_sequence_has_its_own_last_row(count: list[int] | None, expected: list[list[int]]) -> None:
    assert rows.last_rows(X, None if count is None else torch.tensor(count)).squeeze(1).tolist() == expected


def test_rows_are_taken_and_put_back() -> None:
    row = torch.tensor([[2, 0], [0, 1]])
    taken = rows.gather_rows(X, row)
    assert taken.tolist() == [[[4, 5], [0, 1]], [[6, 7], [8, 9]]]
    assert rows.gather_rows(X[..., 0], row).tolist() == [[4, 0], [6, 8]]
    assert rows.scatter_rows(taken, row, 3).tolist() == [[[0, 1], [0, 0], [4, 5]], [[6, 7], [8, 9], [0, 0]]]
    assert rows.scatter_rows(taken[..., :1], row, 3).squeeze(-1).tolist() == [[0, 0, 4], [6, 8, 0]]
    assert rows.gather_rows(X, None) is rows.scatter_rows(X, None, 3) is X


def test_nodes_read_their_parents() -> None:
    assert rows.gather_parents(X, torch.tensor([[1, 1], [2, 0]])).tolist() == [[[2, 3], [2, 3]], [[10, 11], [6, 7]]]


def test_valid_rows_by_depth() -> None:
    assert rows.valid(DOCUMENT, MASK, 1)[0].nonzero()[:, 0].tolist() == [0, 1, 4]
    assert rows.valid(DOCUMENT, MASK, 2)[0].nonzero()[:, 0].tolist() == [0]
    assert not rows.valid(DOCUMENT, MASK, 3).any()
    padding = torch.full_like(DOCUMENT, -1)
    assert not rows.valid(padding, torch.ones_like(MASK), 1).any()
    assert rows.valid(torch.zeros(1, 3).long(), torch.ones(1, 3).bool(), 1).tolist() == [[True, False, False]]


def test_first_draft_after_the_prompt_is_trained() -> None:
    """The row of the last prompt token but one predicts the answer's first token (SpecForge#885)."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1]])
    document = torch.zeros_like(mask)
    assert rows.valid(document, mask, 1)[0].tolist() == [False, True, True, True, False, False]
