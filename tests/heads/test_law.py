import pytest
import torch

from heads.modules.argmax import argmax


@pytest.mark.parametrize("size", [5, 128, 640, 8192])
def test_the_argmax_is_the_first_of_equals(size: int) -> None:
    logits = torch.randint(9, (3, 40, size)).float()
    assert torch.equal(argmax(logits), logits.argmax(-1))
    logits[1, 2, size // 2] = float("inf")
    assert argmax(logits)[1, 2] == size // 2
