"""What EAGLE-3's files say in more than one way: the drafted tokens, and the layers it reads."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.formats.published import eagle3, load_published
from heads.formats.published.plan import Source
from tests import toys
from tests.heads.published import Tensors, eagle3_authors, publish, refused
from tests.heads.stub import TinyEnds


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: {**t, "d2t": t["d2t"] + torch.arange(30)},
            "d2t",
        ),  # the ids themselves, as other projects store them
        (lambda t: {**t, "d2t": torch.zeros_like(t["d2t"])}, "d2t and t2d do not name the same tokens"),
        (lambda t: {**t, "d2t": -torch.arange(30)}, "d2t does not name 30 different tokens"),
        (lambda t: {**t, "d2t": torch.full_like(t["d2t"], -1)}, "does not name 30 different tokens"),
        (lambda t: {**t, "d2t": torch.full_like(t["d2t"], 11)}, "does not name 30 different tokens of the target's 40"),
        (lambda t: {**t, "d2t": t["d2t"] + 2**62}, "d2t does not name 30 different tokens of the target's 40"),
        (lambda t: {**t, "d2t": t["d2t"][:0]}, "d2t does not name 0 different tokens"),
        (lambda t: {**t, "t2d": t["t2d"][:-1]}, "d2t and t2d"),
        (lambda t: {**t, "d2t": t["d2t"][:-1], "t2d": torch.ones(40, dtype=torch.bool)}, "d2t and t2d"),
    ],
)
def test_d2t_is_an_offset(change: Callable[[Tensors], Tensors], named: str, tmp_path: Path) -> None:
    head, tensors, config = eagle3_authors()
    ids = head.state_dict()["vocab.ids"]
    assert not torch.equal(ids, torch.arange(30))
    loaded = load_published(publish(tmp_path / "right", tensors, config), toys.target().embeddings)
    assert torch.equal(loaded.state_dict()["vocab.ids"], ids)
    assert named in refused(tmp_path / "wrong", change(tensors), config)


class Deep(TinyEnds):
    """A target of DeepSeek's depth, of which configs of both conventions are published under one key."""

    num_layers = 61


@pytest.mark.parametrize(
    ("config", "layers", "warned"),
    [
        ({}, None, False),
        ({"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}, [1, 29, 57], False),
        ({"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}, [1, 29, 57], True),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}, [1, 29, 57], False),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}, [1, 29, 57], True),
        ({"eagle_aux_hidden_state_layer_ids": [5, 9, 60]}, [4, 8, 59], False),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 9, 60]}}, [5, 9, 60], False),
        ({"eagle_config": {"layer_ids": [5, 9, 60]}}, [4, 8, 59], False),
        (
            {"eagle_aux_hidden_state_layer_ids": [5, 9, 60],
             "eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 8, 59]}},
            [4, 8, 59], False,
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 30, 58],
             "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}},
            [1, 29, 57], False,
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [5, 9, 60],
             "eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 9, 60]}},
            "count differently", False,
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [5, 9, 60],
             "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
            "not the same layers", False,
        ),
    ],
)  # fmt: skip
def test_layers_are_counted_as_we_do(
    config: dict[str, Any], layers: list[int] | str | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(Path("head"), config, {})
    if isinstance(layers, str):
        with pytest.raises(ValueError, match=layers):
            eagle3.feature_layers(source, 3, Deep())
        return
    with caplog.at_level(logging.WARNING):
        assert eagle3.feature_layers(source, 3, Deep()) == layers
    assert ("other convention" in caplog.text) == warned
