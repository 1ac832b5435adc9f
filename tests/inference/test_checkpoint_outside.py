"""A target's checkpoint from outside: no pickles, and an index that stays in its folder."""

import json
from pathlib import Path

import pytest
import torch

from inference.target.checkpoint import tensor_files
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
    assert "which is no file beside it" in refusal(folder)
    with pytest.raises(ValueError, match="which is no file beside it"):
        tensor_files(str(folder))
