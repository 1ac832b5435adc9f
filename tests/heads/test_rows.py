"""The index arithmetic, on a row that can be read off by eye."""

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
    assert rows.ahead(TOKEN, 1 + 1)[0, :2].tolist() == [12, 13]  # the label of depth 1
    assert rows.ahead(TOKEN, 1 + 2)[0, :1].tolist() == [13]


def test_valid_rows_by_depth() -> None:
    assert rows.valid(DOCUMENT, MASK, 1)[0].nonzero()[:, 0].tolist() == [0, 1, 4]
    assert rows.valid(DOCUMENT, MASK, 2)[0].nonzero()[:, 0].tolist() == [0]
    assert not rows.valid(DOCUMENT, MASK, 3).any()


def test_first_draft_after_the_prompt_is_trained() -> None:
    """The row of the last prompt token but one predicts the answer's first token (SpecForge#885)."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1]])
    document = torch.zeros_like(mask)
    assert rows.valid(document, mask, 1)[0].tolist() == [False, True, True, True, False, False]
