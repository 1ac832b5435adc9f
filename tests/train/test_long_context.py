"""What a training step keeps for its backward pass: linear in the row's length, and less where it is recomputed."""

from typing import Any

import pytest
import torch

from heads.base import Features
from heads.modules.layers import Recomputing
from tests import toys
from tests.train.test_acceptance import run
from train.objective import loss_weights
from train.step import Loss


def kept(name: str, length: int, *, recompute: bool = False) -> int:
    """Return the bytes that a step's forward pass saves, each storage once; parameters count too."""
    target = toys.target("llama")
    head: Any = toys.head(name, target).requires_grad_()
    for module in head.modules():
        if isinstance(module, Recomputing):
            module.recompute = recompute
    config = type(run().objective)(**{**vars(run().objective), "depths": 3, "losses": {"soft_ce": 1.0}})
    loss = Loss(head, config, compiled=False)
    token = torch.zeros(1, length, dtype=torch.long)
    document = torch.arange(length)[None] // (length // 2)
    states = torch.randn(1, length, len(head.feature_layers) + 1, target.embeddings.hidden_size)
    features = Features(token, states[:, :, 1:], states[:, :, 0], document)
    weight = loss_weights(document, token + 1, None, config).row
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address comes twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    head.compute_logits = torch.no_grad()(
        head.compute_logits
    )  # the loss makes its gradient chunk by chunk and keeps none of it
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss(features, weight, None)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_step_keeps_grows_with_the_length_not_its_square(name: str, recompute: bool) -> None:
    sizes = [kept(name, length, recompute=recompute) for length in (256, 512, 1024)]
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.02)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_recomputation_keeps_less(name: str) -> None:
    assert kept(name, 512, recompute=True) < 0.75 * kept(name, 512)
