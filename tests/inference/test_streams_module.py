"""The streams' own weights: what trains them, how they are saved, and which are refused."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.common.typed import build
from heads.formats.store import read_tensors
from inference.decode import Settings, speculate
from inference.drafters.contrib.streams import Streams, StreamsDrafter, frozen, load_streams, save_streams
from inference.verification.sample import GREEDY
from tests import toys
from tests.inference.streaming import CONFIG, DOUBLE, TOKENS, accepted, made, source, toy


def test_the_gradient_reaches_the_streams_alone() -> None:
    target = toys.target(dtype=DOUBLE)
    streams = made(target).train().requires_grad_(True)
    document = torch.zeros(1, 12, dtype=torch.long)
    draft, teacher = streams(torch.tensor([toys.prompt(0, 12)]), document, torch.tensor([[2, 5, 8]]))
    assert not teacher.requires_grad
    draft.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in streams.parameters())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert {id(p) for p in streams.parameters()}.isdisjoint(map(id, target.model.parameters()))


def test_new_adapters_change_nothing() -> None:
    target = toys.target(dtype=DOUBLE)
    streams = frozen(Streams(replace(CONFIG, modules=["q_proj", "down_proj"]), target), target)
    assert len(streams.adapters) == 4
    assert all(bool((a.up.weight == 0).all()) for a in streams.adapters.values())


def test_round_trip_bit_for_bit(tmp_path: Path) -> None:
    target, streams = toy()
    save_streams(tmp_path / "run" / "streams", CONFIG, streams.state_dict(), target.spec)
    for folder in (tmp_path / "run", tmp_path / "run" / "streams"):
        drafter = StreamsDrafter(StreamsDrafter.Config(str(folder), toys.TREES["chain"]), target, "streams")
        assert drafter.streams.config == CONFIG
        loaded = drafter.streams.state_dict()
        assert all(tensor.equal(loaded[name]) for name, tensor in streams.state_dict().items())
    assert sum(tensor.numel() for tensor in read_tensors(tmp_path / "run" / "streams").values()) == sum(
        p.numel() for p in streams.parameters()
    )
    expected = accepted(speculate(target, source(toys.TREES["chain"]), toys.prompt(0), Settings(TOKENS, GREEDY)))
    assert accepted(speculate(target, drafter, toys.prompt(0), Settings(TOKENS, GREEDY))) == expected


def test_another_targets_streams_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    target, streams = toy()
    weights = streams.state_dict()
    save_streams(tmp_path / "streams", CONFIG, weights, replace(target.spec, name="someone/target", fingerprint="f00d"))
    with pytest.raises(ValueError, match="someone/target: its fingerprint of the weights is f00d"):
        load_streams(tmp_path, target)
    save_streams(tmp_path / "streams", replace(CONFIG, rank=2), weights, target.spec)
    with pytest.raises(ValueError, match=r"down.weight is \(4, .* its config.json and the target make it \(2, "):
        load_streams(tmp_path, target)
    save_streams(tmp_path / "streams", CONFIG, {"embedding": weights["embedding"]}, target.spec)
    with pytest.raises(ValueError, match="missing"):
        load_streams(tmp_path, target)
    (tmp_path / "streams" / "config.json").write_text('{"format": 1, "streams": {}}')
    with pytest.raises(ValueError, match="kind streams, whose keys are format, streams and target"):
        load_streams(tmp_path, target)
    (tmp_path / "streams" / "config.json").unlink()
    with pytest.raises(ValueError, match="not a folder of kind streams"):
        load_streams(tmp_path, target)
    with pytest.raises(ValueError, match="no such folder"):
        StreamsDrafter(StreamsDrafter.Config(str(tmp_path / "nowhere"), toys.TREES["chain"]), target, "streams")
    with pytest.raises(ValueError, match="embedding holds values that are not finite"):
        save_streams(tmp_path / "x", CONFIG, {"embedding": weights["embedding"] * float("nan")}, target.spec)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"streams": 0}, "streams.streams is 0"),
        ({"layers": 0}, "streams.layers is 0"),
        ({"layers": 4}, "streams.layers is 4: llama has 3 layers"),
        ({"rank": 0}, "streams.rank is 0"),
        ({"alpha": 0}, "streams.alpha is 0"),
        ({"modules": ["q_proj", "w_proj"]}, "llama has no w_proj; choose from q_proj, k_proj"),
        ({"modules": []}, "streams.modules"),
    ],
)
def test_a_bad_configuration_is_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Streams(build(Streams.Config, asdict(CONFIG) | change, "streams"), toys.target())
    assert "\n" not in str(caught.value)


def test_a_target_that_takes_no_mask_and_layers_of_experts_are_refused() -> None:
    target = toys.target()
    target.takes_trees = False
    try:
        with pytest.raises(ValueError, match="no stream can ride along"):
            Streams(CONFIG, target)
    finally:
        target.takes_trees = True
    with pytest.raises(ValueError, match=r"streams.modules.*attention"):
        toy()[1]._adapted(None, torch.zeros(3, 4))
