"""A head on disk: the round trip, the refusals, and what a crash, a full disk or a damaged file leaves behind."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads import HEADS
from heads.common.files import replacing
from heads.formats import store
from heads.formats.store import TargetSpec, load_head, read_config, read_tensors, save_head
from tests import toys
from tests.heads.stub import Stub, TinyEnds, head, same
from tests.refusals import refuses

TREE = {"kind": "chain", "depth": 2, "paths": [[0], [0, 0]]}
# The keys that a head's config.json has had from its first day on.
FIRST_KEYS = {
    "name", "layers", "heads", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "rope_theta", "norm_eps",
    "bias", "feature_layers", "feature_norm", "norm_output", "norm_before_residual", "kv_injection", "tied", "prefix",
    "lm_head_bias", "inner", "scale_input", "depths", "causal", "markov_rank", "confidence", "embedding",
}  # fmt: skip
SPEC = TargetSpec("someone/target", 11, 4, 3, "f00d")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEADS, "stub", Stub)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "head"
    save_head(folder, head(), SPEC, TREE)
    return folder


def refusal(folder: Path, spec: TargetSpec = SPEC) -> str:
    return refuses(re.escape(str(folder)), load_head, folder, TinyEnds(), spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    original = head().to(dtype)
    save_head(tmp_path / "h", original, SPEC, TREE)
    loaded = load_head(tmp_path / "h", TinyEnds(), replace(SPEC, name="/elsewhere"))
    assert same(original, loaded)
    assert loaded.linear.weight.dtype == dtype
    assert loaded.config == original.config
    assert all(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("name", [*HEADS, *toys.OPTIONS])
def test_real_heads_round_trip_and_hold_nothing_of_the_target(tmp_path: Path, name: str) -> None:
    original: Any = toys.head(name, toys.target())
    save_head(tmp_path / "h", original, SPEC, TREE)
    loaded = load_head(tmp_path / "h", toys.target().embeddings, SPEC).requires_grad_(False)
    assert same(original, loaded)
    assert loaded.config == original.config
    if getattr(original.config, "lm_head", "own") == "shared" and original.vocab is None:
        own = ("selector.", "before.", "bias.", "domino.", "embedding.", "lm_head.candidate_")  # no copies of it
        held = {name for name, tensor in read_tensors(tmp_path / "h").items() if toys.VOCAB in tensor.shape}
        assert all(name.startswith(own) for name in held)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_saved_before_there_was_a_key_loads(tmp_path: Path, name: str) -> None:
    """Whoever adds a key to a head's Config says in `EARLIER` what heads are that were saved without it."""
    original: Any = toys.head(name, toys.target())
    save_head(tmp_path / "h", original, SPEC, TREE)

    def forget(content: dict[str, Any]) -> None:
        head = content["head"]
        content["head"] = {k: v for k, v in head.items() if k in FIRST_KEYS or store.EARLIER.get(k, 0) != v}

    assert same(original, load_head(edited(tmp_path / "h", forget), toys.target().embeddings, SPEC))
    assert set(vars(original.config)) <= FIRST_KEYS | store.EARLIER.keys()


def test_a_head_saved_with_a_key_that_meant_nothing_loads(tmp_path: Path) -> None:
    original: Any = toys.head("peagle", toys.target())
    save_head(tmp_path / "h", original, SPEC, TREE)

    def remember(content: dict[str, Any]) -> None:
        content["head"] |= dict.fromkeys(store.RETIRED["peagle"], False)

    assert same(original, load_head(edited(tmp_path / "h", remember), toys.target().embeddings, SPEC))


def test_config_is_exactly_this(saved: Path) -> None:
    assert read_config(saved) == {
        "format": 1,
        "head": {"name": "stub", "width": 5, "rate": None, "layers": [1, 2]},
        "target": asdict(SPEC),
        "tree": TREE,
    }
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in saved.parent.iterdir()] == ["head"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 12}, ["vocabulary is 11", "is 12"]),
        ({"hidden_size": 8}, ["width is 4", "is 8"]),
        ({"num_layers": 9}, ["number of layers is 3", "is 9"]),
        ({"fingerprint": "beef"}, ["fingerprint of the weights is f00d", "is beef"]),
    ],
)
def test_another_targets_head_is_refused_by_name(saved: Path, change: dict[str, Any], words: list[str]) -> None:
    message = refusal(saved, replace(SPEC, **change))
    assert all(word in message for word in [*words, "someone/target"]), message


@pytest.mark.parametrize("made_for_quantised", [True, False])
def test_a_fingerprint_without_the_quantised_weights_leaves_open_whose_head_it_is(
    saved: Path, caplog: pytest.LogCaptureFixture, made_for_quantised: bool
) -> None:
    specs = [SPEC, replace(SPEC, fingerprint=store.QUANTISED + "f00d")]
    save_head(saved, head(), specs[made_for_quantised], TREE)
    assert same(head(), load_head(saved, TinyEnds(), specs[not made_for_quantised]))
    assert "cannot be told" in caplog.text


def edited(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    content = json.loads((folder / "config.json").read_text())
    edit(content)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c["head"].update(name="nonesuch"), ["'nonesuch'", "eagle", "medusa"]),
        (lambda c: c["head"].update(wdth=3), ["head.wdth", "width, rate, layers"]),
        (lambda c: c["head"].pop("rate"), ["head.rate is missing"]),
        (lambda c: c["head"].update(width="${oc.env:HOME}"), ["head.width", "interpolation"]),
        (lambda c: c.update(extra=1), ["format, head, target and tree"]),
        (lambda c: c.pop("tree"), ["format, head, target and tree"]),
        (lambda c: c.update(head=3), ["head.name is None"]),
        (lambda c: c.update(format=2), ["format 2", "update"]),
        (lambda c: c["head"].update(width=6), ["linear.bias is (5,)", "(6,)"]),
    ],
)
def test_a_wrong_config_is_refused(saved: Path, edit: Callable[[dict[str, Any]], Any], words: list[str]) -> None:
    message = refusal(edited(saved, edit))
    assert all(word in message for word in words), message


def test_no_head_is_refused(saved: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere")
    assert "not a folder of kind head" in refusal(tmp_path)
    (saved / "config.json").write_text('{"format": 1, "he')
    assert "damaged" in refusal(saved)
    (saved / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "damaged" in refusal(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"linear.bias": None}, ["missing ['linear.bias']"]),
        ({"odd": torch.zeros(1)}, ["unknown ['odd']"]),
        ({"linear.bias": torch.zeros(3)}, ["linear.bias", "(3,)", "(5,)"]),
        ({"linear.bias": torch.zeros(5, dtype=torch.int32)}, ["linear.bias", "int32"]),
        ({"linear.bias": torch.full((5,), float("nan"))}, ["linear.bias", "not finite"]),
    ],
)
def test_wrong_tensors_are_refused(saved: Path, change: dict[str, Tensor | None], words: list[str]) -> None:
    tensors = load_file(saved / "model.safetensors") | change
    save_file({k: v for k, v in tensors.items() if v is not None}, saved / "model.safetensors")
    message = refusal(saved)
    assert all(word in message for word in words), message


def test_a_flipped_bit_in_the_header_never_loads_other_weights(saved: Path) -> None:
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    refused, end = 0, 8 + int.from_bytes(whole[:8], "little")
    for position in range(0, end, 3):
        for bit in (0, 2, 5):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                loaded = load_head(saved, TinyEnds(), SPEC)
            except ValueError:
                refused += 1
            else:
                assert same(head(), loaded), (position, bit)
    assert refused > end // 2


def test_weights_that_are_not_finite_are_not_saved(saved: Path) -> None:
    broken = head(1)
    broken.linear.bias.data[0] = float("nan")
    with pytest.raises(ValueError, match="bias holds values that are not finite"):
        save_head(saved, broken, SPEC, TREE)
    assert same(head(), load_head(saved, TinyEnds(), SPEC))


def test_no_space_amid_writing_leaves_the_last_head(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata)
        os.truncate(path, path.stat().st_size // 2)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save_file", half)
    with pytest.raises(OSError, match="No space left on device"):
        save_head(saved, head(1), SPEC, TREE)
    assert same(head(), load_head(saved, TinyEnds(), SPEC))
    with pytest.raises(OSError, match="No space left on device"):
        save_head(saved.parent / "first", head(1), SPEC, TREE)
    assert [path.name for path in saved.parent.iterdir()] == ["head"]


class PowerCutError(BaseException):
    """Nothing that any handler in the code under test would catch."""


@pytest.mark.parametrize("point", range(6))
def test_a_crash_at_any_point_leaves_a_whole_head(saved: Path, monkeypatch: pytest.MonkeyPatch, point: int) -> None:
    calls = 0

    def cut(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > point:
                raise PowerCutError
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((store, "save_file"), (os, "replace"), (os, "fsync")):
            patch.setattr(owner, name, cut(getattr(owner, name)))
        with pytest.raises(PowerCutError):
            save_head(saved, head(1), SPEC, TREE)
    loaded = load_head(saved, TinyEnds(), SPEC)
    assert same(loaded, head(0)) or same(loaded, head(1))
    save_head(saved, head(2), SPEC, TREE)
    assert same(head(2), load_head(saved, TinyEnds(), SPEC))
    assert [path.name for path in saved.parent.iterdir()] == ["head"]


def test_a_link_is_replaced_by_a_folder_and_not_set_aside_for_ever(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    (tmp_path / "other").mkdir()
    folder.symlink_to(tmp_path / "other")
    for _ in range(3):
        with replacing(folder):
            pass
    assert not folder.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "other"]


def test_a_swap_that_fails_puts_the_old_head_back(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def refuse(source: Path, goal: Path) -> None:
        if Path(source).name.endswith(".new"):
            raise OSError(30, "Read-only file system")
        real(source, goal)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="Read-only"):
        save_head(saved, head(1), SPEC, TREE)
    assert [path.name for path in saved.parent.iterdir()] == ["head"]
    assert same(head(), load_head(saved, TinyEnds(), SPEC))
