"""The files of published heads: safetensors, shards and pickles, none of which runs anything."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from heads.formats.published import is_published, load_published
from tests import toys
from tests.heads.published import dflash, drafts, eagle3_authors, eagle_authors, medusa_second, publish, refusal
from train.convert import convert, find_pickle

PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")


@pytest.mark.parametrize("file", [PICKLES[0], *(pytest.param(file, marks=pytest.mark.slow) for file in PICKLES[1:])])
def test_a_pickle_is_refused_and_its_conversion_is_read_in_its_dtype(file: str, tmp_path: Path) -> None:
    _, tensors, config = eagle3_authors()
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    folder = publish(tmp_path / "theirs", half, config, file)
    assert f"{file}: a pickle, which can hold code and is not read" in refusal(folder)
    assert f"python train/convert.py pickle={folder / file} out=FOLDER" in refusal(folder)
    out = convert(find_pickle(str(folder)), tmp_path / "ours")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_published(out, toys.target().embeddings)
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.float16}
    assert all(tensor.device.type == "cpu" for tensor in loaded.state_dict().values())
    with pytest.raises(ValueError, match="is there already; name another folder"):
        convert(folder / file, out)


def test_safetensors_come_before_a_pickle(tmp_path: Path) -> None:
    _, tensors, config = medusa_second()
    publish(tmp_path, tensors, config, "medusa_lm_head.pt")
    publish(tmp_path, {name: tensor + 1 for name, tensor in tensors.items()}, config)
    loaded = load_published(tmp_path, toys.target().embeddings)
    assert torch.equal(loaded.state_dict()["blocks.0.0.linear.bias"], tensors["0.0.linear.bias"] + 1)


def test_shards_are_joined_by_their_index_and_lie_beside_it(tmp_path: Path) -> None:
    head, tensors, config = eagle_authors()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        publish(tmp_path, {name: tensors[name] for name in files if files[name] == file}, config, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert is_published(tmp_path)
    loaded = load_published(tmp_path, toys.target().embeddings)
    assert all(torch.equal(one, other) for one, other in zip(drafts(head), drafts(loaded), strict=True))
    index.write_text(json.dumps({"weight_map": {**files, "fc.bias": "../elsewhere.safetensors"}}))
    assert "which is no .safetensors in its folder" in refusal(tmp_path)
    index.write_text("{}")
    assert "damaged" in refusal(tmp_path)


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda data: data[: len(data) // 2],
    lambda _: b"",
    lambda _: b"\x80\x02" * 99,
]


class Innocent:
    """What runs code when an ordinary unpickler reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def unconverted(pickle: Path) -> str:
    """Return what the conversion says, which leaves nothing behind."""
    before = sorted(pickle.parent.parent.rglob("*"))
    with pytest.raises(ValueError, match=r"\S") as caught:
        convert(pickle, pickle.parent.parent / "out")
    assert "\n" not in str(caught.value)
    assert sorted(pickle.parent.parent.rglob("*")) == before
    return str(caught.value)


def test_a_pickle_with_code_in_it_is_not_converted_and_does_not_run(tmp_path: Path) -> None:
    folder, trace = tmp_path / "head", tmp_path / "it ran"
    _, tensors, config = eagle_authors()
    publish(folder, {**tensors, "fc.extra": Innocent(trace)}, config, "pytorch_model.bin")
    assert "a pickle" in refusal(folder)
    assert re.search(
        r"pytorch_model\.bin: damaged, or holds more than tensors", unconverted(folder / "pytorch_model.bin")
    )
    assert not trace.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert trace.exists()  # it is real code


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    _, tensors, config = eagle_authors()
    path = publish(tmp_path, tensors, config) / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert "model.safetensors" in refusal(tmp_path)


def test_a_damaged_pickle_is_named(tmp_path: Path) -> None:
    _, tensors, config = eagle_authors()
    path = publish(tmp_path / "theirs", tensors, config, "pytorch_model.bin") / "pytorch_model.bin"
    path.write_bytes(DAMAGES[0](path.read_bytes()))
    assert "pytorch_model.bin: damaged" in unconverted(path)


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    publish(tmp_path / "theirs", {}, {}, "pytorch_model.bin")
    torch.save({"model": {"fc.weight": torch.zeros(2)}}, tmp_path / "theirs" / "pytorch_model.bin")
    assert "not a mapping of names to tensors" in unconverted(tmp_path / "theirs" / "pytorch_model.bin")
    torch.save({"fc.weight": torch.zeros(2).to(torch.float8_e4m3fn)}, tmp_path / "theirs" / "pytorch_model.bin")
    assert "is of type F8_E4M3; the types read are" in unconverted(tmp_path / "theirs" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no such file, nor a folder or repository with one of pytorch_model\.bin"):
        find_pickle(str(tmp_path))


def test_the_conversion_does_not_see_the_users_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tensors, config = eagle_authors()
    publish(tmp_path / "theirs", tensors, config, "pytorch_model.bin")
    seen: dict[str, str] = {}

    def run(words: list[str], **options: Any) -> None:
        seen.update(options["env"])
        raise subprocess.TimeoutExpired(words, 1)

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(subprocess, "run", run)
    assert "not converted within" in unconverted(tmp_path / "theirs" / "pytorch_model.bin")
    assert "PATH" in seen
    assert "HF_TOKEN" not in seen


def test_an_index_leads_nowhere_else(tmp_path: Path) -> None:
    _, tensors, config = eagle_authors()
    publish(tmp_path, tensors, config, "elsewhere.safetensors")
    folder = publish(tmp_path / "head", {}, config, "unused.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    index = folder / "model.safetensors.index.json"
    for name in (
        "../elsewhere.safetensors",
        str(tmp_path / "elsewhere.safetensors"),
        "a\0.safetensors",
        "a" * 300 + ".safetensors",
        3,
    ):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
        assert "which is no .safetensors in its folder" in refusal(folder), name
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "link.safetensors")}))
    assert "link.safetensors: a link out of its folder" in refusal(folder)


def test_the_hubs_cache_may_link_into_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    _, tensors, config = eagle_authors()
    publish(tmp_path / "hub" / "blobs", tensors, config, "f00d.safetensors")
    folder = publish(tmp_path / "hub" / "snapshots" / "1", {}, config, "unused.safetensors")
    (folder / "a.safetensors").symlink_to("../../blobs/f00d.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")})
    )
    assert load_published(folder, toys.target().embeddings).state_dict()


def test_code_that_a_foreign_config_names_is_not_run(tmp_path: Path) -> None:
    _, tensors, config = eagle_authors()
    folder = publish(tmp_path / "head", tensors, {**config, "auto_map": {"AutoModel": "code.Model"}})
    (folder / "code.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')")
    assert load_published(folder, toys.target().embeddings).state_dict()
    assert not (tmp_path / "it ran").exists()


def test_a_config_that_claims_what_the_file_lacks_takes_no_memory(tmp_path: Path) -> None:
    _, tensors, config = dflash()
    refused = refusal(publish(tmp_path, tensors, {**config, "block_size": 10**9}))
    assert "head.depths is 999999999: give 256 or less" in refused


def test_a_whole_model_is_no_head(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": torch.zeros(2, 2) for i in range(9)}
    message = refusal(publish(tmp_path, tensors, {"architectures": ["LlamaForCausalLM"]}))
    assert "of no published head known here: dflash, peagle, eagle3, eagle, medusa, hydra, mlp" in message


def test_what_is_not_published(tmp_path: Path) -> None:
    assert not is_published(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert not is_published(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not is_published(tmp_path)  # no weights


def test_what_a_config_says_moves_no_cursor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, tensors, config = eagle_authors()
    load_published(publish(tmp_path, tensors, {**config, "num_hidden_layers": "\x1b[2J\n"}), toys.target().embeddings)
    assert r"num_hidden_layers='\x1b[2J\n', the tensors say 1" in caplog.text
