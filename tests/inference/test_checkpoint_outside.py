"""A target's checkpoint from outside: no pickles, and an index that stays in its folder."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from heads.common.target_config import read_target_config
from inference.target import loading
from inference.target.checkpoint import check_files, tensor_files
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.target import Target
from tests import assistants, toys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assistants.save(toys.target().model, toys.tokenizer(), tmp_path / "target")
    return tmp_path / "target"


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match=r"\S") as error:
        Target.load(str(folder), "float32", "cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_target_that_is_a_pickle_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(toys.target().model.state_dict(), folder / "pytorch_model.bin")
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_leads_nowhere_else(folder: Path, name: object) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
    assert "which is no .safetensors in its folder" in refusal(folder)
    with pytest.raises(ValueError, match="in its folder; download it again"):
        tensor_files(str(folder))


@pytest.mark.parametrize("order", [("500KB", "20KB"), ("20KB", "500KB")])
def test_of_two_saves_in_a_folder_all_readers_take_the_one_that_transformers_takes(
    folder: Path, order: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The one whole file, whichever is older: save_pretrained leaves it, and the other's index."""
    (folder / "model.safetensors").unlink()
    for seed, size in enumerate(order):
        torch.manual_seed(seed)
        config = toys.target().model.config
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=size)
    whole = folder / "model.safetensors"
    assert {*tensor_files(str(folder)).values()} == {whole}
    target = Target.load(str(folder), "float32", "cpu")
    assert EmbeddingsOnly.load(str(folder), "float32", "cpu", False).spec == target.spec
    stored = load_file(whole)
    assert all(torch.equal(value, stored[name]) for name, value in target.model.state_dict().items() if name in stored)
    told = [record.getMessage() for record in caplog.records if "of another save" in record.getMessage()]
    shards = sorted(folder.glob("model-0*"))  # which a whole save removes
    assert len(told) == bool(shards)
    assert all(f"{whole}: is read, as transformers does" in line and shards[0].name in line for line in told)


def say(folder: Path, **values: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | values))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000 in its config.json, at most 2000 are made"),
        ({"num_hidden_layers": float("nan")}, "num_hidden_layers is nan"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 in its config.json"),
        ({"num_hidden_layers": "5"}, "num_hidden_layers"),
        ({"num_labels": 10**9}, "num_labels is 1000000000"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"hidden_size": [64]}, "hidden_size"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 1000000000000000000000000000000"),
        ({"hidden_size": 10**6, "num_hidden_layers": 1000}, "parameters, and its files have"),
        ({"hidden_act": "os.system"}, "os.system"),
    ],
)
def test_a_configuration_of_which_no_target_can_be_made(folder: Path, values: dict[str, object], told: str) -> None:
    say(folder, **values)
    assert told in refusal(folder)


def test_quantised_weights_may_take_less_than_a_byte_each(folder: Path) -> None:
    config = read_target_config(str(folder), trust_remote_code=False)
    config.num_hidden_layers, config.quantization_config = 30, {}  # of 3 in fp32: half a byte each
    check_files(str(folder), config)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["org/kernel", "flash_attention_2", {"": "org/kernel"}])
def test_an_attention_from_the_hub_is_code(folder: Path, key: str, value: object) -> None:
    say(folder, **{key: value})
    assert "names code to run by the key " + key in refusal(folder)
    with pytest.raises(ValueError, match="names code"):
        read_target_config(str(folder), trust_remote_code=False)


def test_weights_that_are_missing_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"], weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "its files hold no model.layers.1.self_attn.q_proj.weight, nor 1 others" in refusal(folder)


def test_a_library_that_panics_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # as pyo3 makes them, which cannot be imported
        pass

    def panic(*_: object, **__: object) -> None:
        raise PanicException("out of range\nin Rust")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", panic)
    assert "no causal LM with tokenizer loads from there (out of range)" in refusal(folder)
    with pytest.raises(ValueError, match="out of range"):
        loading.load_tokenizer(str(folder), trust_remote_code=False)


@pytest.mark.parametrize(
    ("key", "step"),
    [
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 10}),
        ("decoder", {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 10}),
        ("post_processor", {"special_tokens": {"X": {"id": "X", "ids": [1] * 200, "tokens": ["X"] * 200}}}),
    ],
)
def test_a_tokenizer_is_no_bomb(folder: Path, key: str, step: dict[str, object]) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content[key] = {"type": "Sequence", f"{key}s": [step] * 9}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert f"the {key} of its tokenizer.json makes more than 1000 of a single character" in refusal(folder)


@pytest.mark.parametrize("charsmap", ["EAAAAP//////////////////////", "AAAAAA==", "AQ=="])
def test_a_damaged_map_of_characters_ends_its_reader_and_not_this_process(folder: Path, charsmap: str) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "the Precompiled step of its tokenizer.json is damaged" in refusal(folder)


def test_weights_that_are_no_numbers_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.self_attn.q_proj.weight holds what is no finite number" in refusal(folder)


@pytest.mark.parametrize("damage", [b"", b"\x08\x00\x00", b"\xff" * 8 + b"{}"])
def test_weights_that_are_damaged_are_one_line(folder: Path, damage: bytes) -> None:
    (folder / "model.safetensors").write_bytes(damage)
    assert "no causal LM with tokenizer loads from there" in refusal(folder)


def test_weights_of_other_shapes_are_named_as_that(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file(weights | {name: weights[name][:7].clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    assert "its weights have other shapes than its config.json says" in refusal(folder)


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.uint8])
def test_weights_of_whole_numbers_are_no_weights(folder: Path, kind: torch.dtype) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file(weights | {name: weights[name].to(kind)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"{name} is of type" in refusal(folder)


def test_an_adapter_in_the_folder_is_not_loaded_unasked(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "move the adapter out, and give it as model.adapter" in refusal(folder)
