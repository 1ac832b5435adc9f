from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from data.features.source import forward
from heads.base import Features


def test_the_target_sees_tokens_and_documents_and_no_gradient_is_kept() -> None:
    weight = torch.ones(1, requires_grad=True)
    seen: dict[str, Any] = {}

    def features(token: Tensor, document: Tensor, layers: tuple[int, ...]) -> Features:
        seen.update(token=token, document=document, layers=layers)
        last = token[..., None] * weight
        return Features(token, last[:, :, None], last, document)

    target = SimpleNamespace(device=torch.device("cpu"), features=features)
    token = torch.tensor([[1, 2, 3, 0]])
    document = torch.tensor([[0, 0, 1, -1]])
    made = forward(target, token, document, (3,))
    assert torch.equal(seen["token"], token)
    assert torch.equal(seen["document"], document)
    assert seen["layers"] == (3,)
    assert torch.equal(made.last_hidden[..., 0], token.float())
    assert not made.last_hidden.requires_grad
