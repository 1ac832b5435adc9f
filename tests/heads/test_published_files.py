"""The files of published heads: safetensors, shards and pickles, none of which runs anything."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.published import is_published, load_published
from tests import toys
from tests.heads.published import drafts, eagle3_authors, eagle_authors, medusa_second, publish, refusal


@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt"])
def test_pickles_of_tensors_are_read_in_their_dtype(file: str, tmp_path: Path) -> None:
    _, tensors, config = eagle3_authors()
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    loaded = load_published(publish(tmp_path, half, config, file), toys.target().ends)
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.float16}
    assert all(tensor.device.type == "cpu" for tensor in loaded.state_dict().values())


def test_safetensors_come_before_a_pickle(tmp_path: Path) -> None:
    _, tensors, config = medusa_second()
    publish(tmp_path, tensors, config, "medusa_lm_head.pt")
    publish(tmp_path, {name: tensor + 1 for name, tensor in tensors.items()}, config)
    loaded = load_published(tmp_path, toys.target().ends)
    assert torch.equal(loaded.state_dict()["blocks.0.0.linear.bias"], tensors["0.0.linear.bias"] + 1)


def test_shards_are_joined_by_their_index_and_lie_beside_it(tmp_path: Path) -> None:
    head, tensors, config = eagle_authors()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        publish(tmp_path, {name: tensors[name] for name in files if files[name] == file}, config, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert is_published(tmp_path)
    loaded = load_published(tmp_path, toys.target().ends)
    assert all(torch.equal(one, other) for one, other in zip(drafts(head), drafts(loaded), strict=True))
    index.write_text(json.dumps({"weight_map": {**files, "fc.bias": "../elsewhere.safetensors"}}))
    assert "names a file that is no .safetensors beside it" in refusal(tmp_path)
    index.write_text("{}")
    assert "damaged" in refusal(tmp_path)


class Innocent:
    """What runs code when an ordinary unpickler reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_with_code_in_it_is_refused_and_does_not_run(tmp_path: Path) -> None:
    folder, trace = tmp_path / "head", tmp_path / "it ran"
    _, tensors, config = eagle_authors()
    publish(folder, {**tensors, "fc.extra": Innocent(trace)}, config, "pytorch_model.bin")
    assert re.search(r"pytorch_model\.bin: damaged, or holds more than tensors", refusal(folder))
    assert not trace.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert trace.exists()  # it is real code


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda _: b"", lambda _: b"\x80\x02" * 99])
def test_a_damaged_file_is_named(file: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    _, tensors, config = eagle_authors()
    path = publish(tmp_path, tensors, config, file) / file
    path.write_bytes(damage(path.read_bytes()))
    assert file in refusal(tmp_path)


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, {}, {}, "pytorch_model.bin")
    torch.save({"model": {"fc.weight": torch.zeros(2)}}, tmp_path / "pytorch_model.bin")
    assert "not a mapping of names to tensors" in refusal(tmp_path)


def test_a_whole_model_is_no_head(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": torch.zeros(2, 2) for i in range(9)}
    message = refusal(publish(tmp_path, tensors, {"architectures": ["LlamaForCausalLM"]}))
    assert "of no published head known here: dflash, eagle3, eagle, medusa, hydra, mlp" in message


def test_what_is_not_published(tmp_path: Path) -> None:
    assert not is_published(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert not is_published(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not is_published(tmp_path)  # no weights
