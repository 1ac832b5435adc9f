"""A head's GGUF file holds its tensors by llama.cpp's names; tests/serving compares it with llama.cpp's converter."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file

from heads.formats.published import gguf
from tests.heads.exporting import exported, made
from tests.heads.test_export import DSPARK, LLAMA3, masked
from tests.refusals import refuses

IDS = {f"w{i}": i for i in range(38)}  # the last two pad
PLAIN = {"feature_layers": [1, 3, 4], "feature_norm": False, "norm_output": False}


def target(path: Path, vocabulary: int = 40, architecture: str = "llama") -> Path:
    """Write a target's file that has a tokenizer alone."""
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{i}" for i in range(vocabulary)])
    writer.add_bos_token_id(3)
    writer.add_mask_token_id(5)  # which a block head replaces
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written(
    kind: str, options: dict[str, Any], folder: Path, **more: Any
) -> tuple[GGUFReader, dict[str, torch.Tensor]]:
    exported(masked(made(kind, **options)), "gguf", folder / "head", **more)
    gguf.write(folder / "head", gguf.tokenizer_of(target(folder / "target.gguf"), 40, IDS))
    return GGUFReader(folder / "head" / gguf.FILE), load_file(folder / "head" / "model.safetensors")


def test_eagle3_is_written_with_rotary_pairs_side_by_side(tmp_path: Path) -> None:
    file, tensors = written("eagle3", PLAIN | LLAMA3, tmp_path)
    held = {tensor.name: torch.tensor(tensor.data) for tensor in file.tensors}
    for letter, heads in (("q", 4), ("k", 2)):
        per_head = tensors[f"layers.0.self_attn.{letter}_proj.weight"].unflatten(0, (heads, 8))
        pairs = held[f"blk.0.attn_{letter}.weight"].unflatten(0, (heads, 8))
        assert torch.equal(pairs[:, 0::2], per_head[:, :4])
        assert torch.equal(pairs[:, 1::2], per_head[:, 4:])
    assert torch.equal(held["d2t"], tensors["t2d"].nonzero()[:, 0])
    assert torch.equal(held["output.weight"], tensors["lm_head.weight"])
    assert float(held["rope_freqs.weight"].max()) == 8.0  # the slowest angles, by LLAMA3's factor
    fields = {name: field.contents() for name, field in file.fields.items()}
    assert fields["eagle3.target_layers"] == [2, 4, 5]
    sizes = {"block_count": 1, "context_length": 160, "embedding_length": 32, "feed_forward_length": 48,
             "vocab_size": 40, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8,
             "attention.value_length": 8, "rope.dimension_count": 8, "target_hidden_size": 32,
             "norm_before_residual": False, "norm_before_fc": False}  # fmt: skip
    assert {key: fields[f"eagle3.{key}"] for key in sizes} == sizes
    assert fields["eagle3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert (fields["tokenizer.ggml.tokens"][5], fields["tokenizer.ggml.bos_token_id"]) == ("w5", 3)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_positions_that_are_stretched_are_said(tmp_path: Path, kind: str) -> None:
    length = {} if kind == "linear" else {"original_max_position_embeddings": 64}
    scaled = {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, "factor": 4.0, **length}}
    file, _ = written("eagle3", PLAIN | scaled, tmp_path)
    fields = {name: field.contents() for name, field in file.fields.items()}
    said = {"scaling.type": kind, "scaling.factor": 4.0, "freq_base": 5e5, "dimension_count": 8}
    said |= {"scaling.original_context_length": 64} if length else {}
    assert {key: fields[f"eagle3.rope.{key}"] for key in said} == said


def test_dspark_is_written_in_its_dtype_with_vectors_in_fp32(tmp_path: Path) -> None:
    file, tensors = written("block", DSPARK, tmp_path, dtype=torch.bfloat16)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in file.tensors}
    assert (kinds["markov_w1.weight"], kinds["output_norm.weight"]) == ("BF16", "F32")
    assert len(kinds) == len(tensors)
    fields = {name: field.contents() for name, field in file.fields.items()}
    assert (fields["dflash.target_layers"], fields["dflash.sample_from_anchor"]) == ([3, 6], True)
    assert (fields["dflash.block_size"], fields["dflash.attention.causal"]) == (4, True)
    assert (fields["dflash.has_confidence_head"], fields["tokenizer.ggml.mask_token_id"]) == (True, 7)


def test_a_target_that_is_none_or_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.gguf").write_text("no GGUF at all, but long enough to have a header")
    for path, told in (
        (tmp_path / "text.gguf", "no GGUF file of a target"), (tmp_path / "missing.gguf", "no GGUF file of a target"),
        (target(tmp_path / "small.gguf", 39), "39 tokens, and the head's is 40"),
        (target(tmp_path / "new.gguf", architecture="unheard-of"), "'unheard-of', which llama.cpp does not know"),
    ):  # fmt: skip
        refuses(told, gguf.tokenizer_of, path, 40, IDS)
    others = {token: 37 - index for token, index in IDS.items()}
    with pytest.raises(ValueError, match="most of its tokens are not those of the target's tokenizer"):
        gguf.tokenizer_of(target(tmp_path / "other.gguf"), 40, others)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        gguf.tokenizer_of(tmp_path / "small.gguf", 40, IDS)
