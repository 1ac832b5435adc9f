"""Features read ahead: the live ones up to rounding, and whatever the store lacks."""

import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.batches import Batches, Packed
from data.features.extraction import extract, spec_of
from data.features.source import FeaturesConfig, LiveFeatures, StoredFeatures
from data.features.store import SHARDS, Copying, DamagedError, FeatureRequest, FeatureStore, start
from heads.base import Features, NamedTensors
from inference.target.target import Target
from tests import toys
from tests.data import asking, stores
from tests.data.test_store import flip

LAYERS = (0, 2)


def config(**changed: Any) -> FeaturesConfig:
    values: dict[str, Any] = {
        "mode": "stored", "path": "x", "dtype": "fp32",
        "shard_mb": 1, "prefetch": 3, "micro_rows": 2, "vllm": None, "vllm_layers": [],
        "url": [], "endpoint": asking.config(),
    }  # fmt: skip
    return FeaturesConfig(**values | changed)


@pytest.fixture
def packed() -> Packed:
    return stores.packed()


@pytest.fixture
def target() -> Target:
    return toys.target()


def batches(packed: Packed, rank: int = 0, world: int = 1) -> Batches:
    return Batches(packed, 4, 2, 0, rank, world)


def extracted(folder: Path, target: Target, packed: Packed, **changed: Any) -> FeatureStore:
    spec = replace(spec_of(target, packed, LAYERS, config(**changed)), shard_rows=3)
    store = FeatureStore.create(folder, spec)
    extract(store, lambda rows: under_way(target, packed, store, rows), 2, 0, 1)
    return store


def under_way(target: Target, packed: Packed, store: FeatureStore, rows: list[int]) -> Copying:
    return start(target, packed.token[rows].long(), packed.document[rows].long(), store.spec)


def stored(store: FeatureStore, of: Batches, layers: tuple[int, ...] = LAYERS) -> StoredFeatures:
    return StoredFeatures(store, of, FeatureRequest(layers, torch.float32), torch.device("cpu"), 3)


def steps(source: Any, count: int) -> list[Features]:
    return [micro.read() for step in range(count) for micro in source(step)]


def same(ours: list[Features], theirs: list[Features], share: float) -> None:
    """Check features against others; they may differ by a share of each state's largest value."""
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        real = b.document >= 0
        assert torch.equal(a.token, b.token)
        assert torch.equal(a.document, b.document)
        for mine, other in ((a.hidden, b.hidden), (a.last_hidden, b.last_hidden)):
            assert mine.shape == other.shape
            allowed = share * other.abs().amax(-1, keepdim=True)
            assert ((mine - other).abs() <= allowed)[real].all()


@pytest.mark.parametrize(("dtype", "share"), [("bf16", 2**-8), ("fp8", 1.01 / 2**4)])
def test_stored_features_are_the_live_ones_up_to_rounding(
    tmp_path: Path, target: Target, packed: Packed, dtype: str, share: float
) -> None:
    store = extracted(tmp_path, target, packed, dtype=dtype)
    source = stored(store, batches(packed))
    trainable = deepcopy(target)
    trainable.model.requires_grad_(True)
    live = steps(LiveFeatures(trainable, batches(packed), LAYERS), 9)
    assert not any(features.last_hidden.requires_grad for features in live)
    same(steps(source, 9), live, share)
    assert source.read == 36
    assert "36 sequences read" in source.close()
    one, turned = (steps(stored(store, batches(packed), layers=layers), 1)[0] for layers in (LAYERS, LAYERS[::-1]))
    assert torch.equal(turned.hidden, one.hidden.flip(2)), "layers come in the head's own order"


def test_fewer_layers_are_chosen_from_more(tmp_path: Path, target: Target, packed: Packed) -> None:
    store = extracted(tmp_path, target, packed)
    all_of, one, none = (steps(stored(store, batches(packed), layers=layers), 1)[0] for layers in (LAYERS, (2,), ()))
    assert torch.equal(one.hidden, all_of.hidden[:, :, 1:])
    assert none.hidden.shape == (2, 16, 0, 32)
    assert torch.equal(none.last_hidden, all_of.last_hidden)
    form = FeatureRequest((2,), torch.bfloat16)
    coarse = steps(StoredFeatures(store, batches(packed), form, torch.device("cpu"), 3), 1)[0]
    assert coarse.hidden.dtype == coarse.last_hidden.dtype == torch.bfloat16


def test_a_store_knows_its_rows_by_tokens_and_documents_alone(target: Target, packed: Packed) -> None:
    others = [packed, *(packed._replace(**{field: getattr(packed, field) * 0}) for field in Packed._fields)]
    found = [spec_of(target, other, LAYERS, config()).data for other in others]
    assert found[0] == found[3]
    assert len({*found}) == 3
    spec = spec_of(target, packed, LAYERS, config(shard_mb=3))
    assert spec.shard_rows == 3 * 10**6 // spec.sequence_bytes


def test_a_step_may_be_any_and_waiting_is_counted(
    tmp_path: Path, target: Target, packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = extracted(tmp_path, target, packed)
    source, live = stored(store, batches(packed)), LiveFeatures(target, batches(packed), LAYERS)
    for step in (5, 6, 2, 2, 9):
        same([m.read() for m in source(step)], [m.read() for m in live(step)], 1e-5)
    read = store.read

    def slow(row: int) -> NamedTensors:
        time.sleep(0.1)
        return read(row)

    monkeypatch.setattr(store, "read", slow)
    source = stored(store, batches(packed))
    steps(source, 1)
    assert source.stall >= 0.05  # several threads read: a row of the first micro-batch at least is waited for


def test_a_damaged_row_is_named(tmp_path: Path, target: Target, packed: Packed) -> None:
    store = extracted(tmp_path, target, packed)
    flip(tmp_path / SHARDS / "000001.safetensors", 0.7)
    with pytest.raises(DamagedError, match=r"000001\.safetensors: sequence [3-5] .*\.json and extract again"):
        steps(stored(store, batches(packed)), 9)


@pytest.mark.parametrize(("hidden", "last"), [(float("inf"), 0.0), (0.0, float("nan"))])
def test_states_that_are_not_finite_are_refused(
    monkeypatch: pytest.MonkeyPatch, target: Target, packed: Packed, hidden: float, last: float
) -> None:
    spec, token, document = spec_of(target, packed, LAYERS, config()), packed.token[:1], packed.document[:1]
    bad = Features(token, torch.full((1, 16, 2, 32), hidden), torch.full((1, 16, 32), last), document)
    monkeypatch.setattr(target, "features", lambda *_: bad)
    with pytest.raises(ValueError, match="a hidden state is not finite"):
        start(target, token, document, spec).result()
