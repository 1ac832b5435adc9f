"""Files as vLLM's connector writes them: names, shapes and layer ids of its documentation."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from data.batches import Packed
from data.features.coding import copying
from data.features.extraction import spec_of
from data.features.vllm_features import LayerIds, VllmFiles, pieces, write_prompts
from inference.target.embeddings import final_norm
from inference.target.target import Target
from tests import toys
from tests.data import states_server, stores
from tests.data.test_stored import config

IDS = [3, 1]  # of a target of three layers: what leaves its last before the final norm, and its first


def as_vllm(target: Target, folder: Path, packed: Packed, ids: list[int]) -> None:
    """Write what vLLM would: for each document the states after so many decoder layers, without the final norm."""
    out = folder.parent / "prompts.jsonl"
    assert write_prompts(packed, out) == sum(len(list(pieces(packed, row))) for row in range(len(packed.token)))
    folder.mkdir(exist_ok=True)
    for number, line in enumerate(out.read_text().splitlines()):
        content = states_server.document(target, json.loads(line)["prompt_token_ids"], ids)
        save_file(content, folder / f"{number}-abc.safetensors")
        (folder / f"{number}-abc.safetensors.lock").touch()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_its_files_give_the_targets_own_features(tmp_path: Path, name: str) -> None:
    target, packed = toys.target(name), stores.packed(count=6)
    as_vllm(target, tmp_path / "vllm", packed, IDS)
    files = VllmFiles(tmp_path / "vllm", LayerIds.of(IDS, (0,), 3))
    spec = spec_of(target, packed, (0,), config())
    for row in range(len(packed.token)):
        states = files.row(packed, row, final_norm(target.base, 3), 32)
        live = target.features(packed.token[row : row + 1].long(), packed.document[row : row + 1].long(), (0,))
        real = live.document >= 0
        assert torch.allclose(states.hidden[real], live.hidden[real], atol=1e-3)
        assert torch.allclose(states.last_hidden[real], live.last_hidden[real], atol=1e-3)
        assert (states.last_hidden[~real] == 0).all()
        assert copying(states, spec).result()["last"].shape == (1, 16, 32)
    norm = deepcopy(final_norm(target.base, 3)).to("meta")  # the last state is there, as the lm_head is
    assert files.row(packed, 0, norm, 32).last_hidden.device.type == "meta"


def refuse(tmp_path: Path, message: str, **changed: Any) -> None:
    target, packed = toys.target(), stores.packed(count=6)
    values: dict[str, Any] = {"ids": IDS, "layers": (0,), "num_layers": 3, "width": 32, **changed}

    def read() -> None:
        files = VllmFiles(tmp_path, LayerIds.of(values["ids"], values["layers"], values["num_layers"]))
        files.row(packed, 0, final_norm(target.base, 3), values["width"])

    with pytest.raises(ValueError, match=message) as error:
        read()
    assert "\n" not in str(error.value)


def test_mistakes_are_named(tmp_path: Path) -> None:
    refuse(tmp_path, "holds no .safetensors files of vLLM")
    as_vllm(toys.target(), tmp_path, stores.packed(count=6), IDS)
    refuse(tmp_path, r"without \[2\].*eagle_aux_hidden_state_layer_ids=\[2, 3\]", layers=(1,))
    refuse(tmp_path, r"without \[3\]", ids=[1, 2])
    refuse(tmp_path, r"hidden states of shape .* check features.vllm_layers", ids=[1, 2, 3])
    refuse(tmp_path, "hidden states of shape", width=48)
    broken = sorted(tmp_path.glob("*.safetensors"))[0]
    data = broken.read_bytes()
    broken.write_bytes(data[:-7])
    refuse(tmp_path, f"{broken.name}: not a hidden-state file of vLLM")
    broken.unlink()
    for file in tmp_path.glob("*.safetensors"):
        save_file({"token_ids": torch.tensor([1]), "hidden_states": torch.zeros(1, 2, 32)}, file)
    refuse(tmp_path, r"no file is of the \d+ tokens of row 0 from position 0 on; give vLLM the prompts")
