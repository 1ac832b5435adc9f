"""What is exported is checked as it lies on disk: each rule by a folder that breaks it, of which nothing stays."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads import HEADS
from heads.formats import store
from heads.formats.published import eagle3, load_published
from heads.formats.published.export import Served, export
from heads.formats.published.exporting import Export, Foreign, check, put
from tests import toys
from tests.heads.exporting import TOKENS, exported, made, served, target

Tensors = dict[str, Any]


def right() -> Foreign:
    return eagle3.engines(Export("vllm", made("eagle3", feature_layers=[1, 3, 4]), served()))


def moved(by: int) -> Callable[[Tensors], Any]:
    """Return a change of the first offset, with the mask of the ids that it leads to."""

    def change(tensors: Tensors) -> None:
        tensors["d2t"][0] += by
        ids = (torch.arange(30) + tensors["d2t"]).clamp(0, 39)
        tensors["t2d"].zero_()[ids] = True

    return change


TENSORS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop("norm.weight"), "the tensor norm.weight is missing"),
    "missing vocabulary": (lambda t: t.pop("d2t"), "the tensor d2t is missing"),
    "the verifier's": (lambda t: t.update({"verifier_norm.weight": torch.ones(32)}), "verifier_norm.weight is none of"),
    "an optimizer's": (lambda t: t.update(exp_avg=torch.ones(2)), "the tensor exp_avg is none of the format's"),
    "embedding": (lambda t: t.update({"embed_tokens.weight": torch.ones(40, 32)}), "embed_tokens.weight is none of"),
    "prefix": (lambda t: t.update({"model.norm.weight": torch.ones(32)}), "the tensor model.norm.weight is none of"),
    "shape": (lambda t: t.update({"norm.weight": torch.ones(31)}), r"norm.weight is \(31,\) .*expected \(32,\)"),
    "layers joined": (lambda t: t.update({"fc.weight": torch.ones(32, 64)}), r"fc.weight is \(32, 64\)"),
    "dtype of offsets": (lambda t: t.update(d2t=t["d2t"].int()), "d2t is .*int32, expected .*int64"),
    "dtype of the mask": (lambda t: t.update(t2d=t["t2d"].long()), "t2d is .*int64, expected .*bool"),
    "dtype": (lambda t: t.update({"norm.weight": t["norm.weight"].int()}), "norm.weight is .*int32"),
    "not a number": (lambda t: t["lm_head.weight"][0, 3].fill_(float("nan")), "lm_head.weight holds values that are"),
    "infinite": (lambda t: t["fc.weight"][0, 3].fill_(float("inf")), "fc.weight holds values that are not finite"),
    "offsets that repeat": (moved(1), "d2t does not lead to increasing ids below 40"),
    "offsets below": (moved(-1), "d2t does not lead to increasing ids below 40"),
    "offsets above": (lambda t: t["d2t"][-1].fill_(40 - 29), "d2t does not lead to increasing ids below 40"),
    "mask": (lambda t: t["t2d"].copy_(torch.arange(40) < 30), "d2t and t2d do not name the same tokens"),
}


def stopped(folder: Path, foreign: Foreign) -> str:
    """Return why an export over an earlier one was stopped, which is all that stays."""
    put(folder, right(), torch.float32)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=rf"^{re.escape(str(folder))}: not exported, [^\n]*$") as caught:
        put(folder, foreign, torch.float32)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return str(caught.value)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_not_the_formats_stop_an_export(name: str, tmp_path: Path) -> None:
    change, named = TENSORS[name]
    foreign = right()
    assert int(foreign.tensors["d2t"][0]) == 0
    change(foreign.tensors)
    assert re.search(named, stopped(tmp_path / "head", foreign))


def test_a_value_that_only_the_exported_dtype_cannot_hold_is_found(tmp_path: Path) -> None:
    foreign = right()
    foreign.config["torch_dtype"] = "float16"
    foreign.tensors["fc.weight"][0, 0] = 1e6
    with pytest.raises(ValueError, match=r"fc\.weight holds values that are not finite in torch\.float16"):
        put(tmp_path / "head", foreign, torch.float16)


def test_what_lies_on_disk_is_checked_and_not_what_was_meant(tmp_path: Path) -> None:
    foreign = right()
    put(tmp_path, foreign, torch.float32)
    check(tmp_path, foreign.shapes, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight"):
        check(tmp_path, foreign.shapes, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_written_in_the_dtype_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = exported(made("eagle3", feature_layers=None), "vllm", tmp_path, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    others = {"d2t": torch.int64, "t2d": torch.bool}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        name: others.get(name, dtype) for name in tensors
    }
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == str(dtype).split(".")[1]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(OSError, match=r"could not be saved .*No space left") as caught:
        exported(made("medusa"), "vllm", tmp_path / "head")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_says_little_of_itself_is_exported(tmp_path: Path) -> None:
    export(made("eagle3", feature_layers=None), "vllm", Served("deep", {}, torch.float32, 3), tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert "max_position_embeddings" not in said
    assert said["speculators_config"]["verifier"] == {"name_or_path": "deep", "architectures": []}


def test_a_block_whose_slots_hold_a_token_stays_one_that_engines_serve(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        **toys.HEAD_CONFIGS["block"],
        "name": "block",
        "causal": False,
        "mask_token": -1,
        "length": None,
    }
    head: Any = HEADS["block"](HEADS["block"].Config(**config), target().embeddings)
    optimizer = torch.optim.SGD([each for each in head.parameters() if each.requires_grad], 1.0)
    token = torch.tensor([TOKENS[:-1]])
    features = target().features(token, torch.zeros_like(token), head.feature_layers)
    sum(draft.state.square().mean() for draft in head.unroll(features, 4)).backward()
    optimizer.step()
    folder = exported(head.requires_grad_(False), "dflash", tmp_path)
    assert json.loads((folder / "config.json").read_text())["dflash_config"]["mask_token_id"] == toys.VOCAB - 1
    again: Any = load_published(folder, target().embeddings)
    assert torch.equal(again.mask, head.mask)
    assert not again.mask.requires_grad
    config["mask_token"] = toys.VOCAB
    with pytest.raises(ValueError, match=r"head\.mask_token is 40: the target has 40 tokens"):
        HEADS["block"](HEADS["block"].Config(**config), target().embeddings)


def test_a_mask_slot_that_training_has_rounded_is_still_its_token(tmp_path: Path) -> None:
    head = made("block", causal=False, feature_layers=[5, 2], mask_token=-1)
    row = target().embeddings.embed(torch.tensor(toys.VOCAB - 1)).detach()
    head.mask.data.copy_(row.bfloat16())
    assert not torch.equal(head.mask, row)
    folder = exported(head, "dflash", tmp_path)
    assert json.loads((folder / "config.json").read_text())["dflash_config"]["mask_token_id"] == toys.VOCAB - 1
