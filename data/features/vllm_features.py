"""Hidden states that vLLM wrote, for targets too large for a plain forward pass.

vLLM's `extract_hidden_states` method with the `ExampleHiddenStatesConnector` writes one safetensors file a request,
`token_ids` [tokens] and `hidden_states` [tokens, layer ids, width], and while it writes may hold a lock on FILE.lock
(as of vLLM 0.22: docs/features/speculative_decoding/extract_hidden_states.md and
vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py).

Layer ids are not in the file: they are those that vLLM was started with, in that order. Id 0 is the input of the first
decoder layer and id i the output of layer i - 1, so our layer i is its i + 1. The number of layers as an id is the last
layer's output before the final norm ("not normalized using the output norm"); our last state is that one normed.
"""

import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from data.batches import Packed
from data.features.coding import States
from heads.formats.layer_ids import as_states

TOKENS, STATES = "token_ids", "hidden_states"


class Piece(NamedTuple):
    """A document of a packed row: its row, its first position there, and its tokens."""

    row: int
    start: int
    token: tuple[int, ...]


def pieces(packed: Packed, row: int) -> Iterator[Piece]:
    """Yield the documents of a packed row."""
    start, token = 0, packed.token[row].tolist()
    for document, group in groupby(packed.document[row].tolist()):
        count = len(list(group))
        if document >= 0:
            yield Piece(row, start, tuple(token[start : start + count]))
        start += count


def write_prompts(packed: Packed, out: Path) -> int:
    """Write the documents' tokens as JSON Lines, as vLLM's `generate` takes them, and return how many there are."""
    out.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with out.open("w", encoding="utf-8") as file:
        for row in range(len(packed.token)):
            for piece in pieces(packed, row):
                file.write(json.dumps({"prompt_token_ids": piece.token}) + "\n")
                count += 1
    return count


class VllmFiles:
    """A folder of vLLM's files, looked up by their tokens."""

    def __init__(self, folder: Path, ids: list[int], layers: tuple[int, ...], num_layers: int) -> None:
        """Read the tokens of every file; `ids` are the layer ids that vLLM was started with, `layers` are ours.

        Raises:
            ValueError: an id is lacking, or a file is none of vLLM's.
        """
        states = as_states(layers)
        needed = [*states, num_layers]
        if lacking := [layer_id for layer_id in needed if layer_id not in ids]:
            raise ValueError(
                f"features.vllm_layers is {ids}, without {lacking}: feature layer i is vLLM's id i + 1, and "
                f"{num_layers} is the last state; start vLLM with eagle_aux_hidden_state_layer_ids={needed}"
            )
        self.folder, self.count = folder, len(ids)
        self.layers, self.last = [ids.index(state) for state in states], ids.index(num_layers)
        self.files: dict[bytes, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.files[_key(_read(file, TOKENS).tolist())] = file
        if not self.files:
            raise ValueError(f"{folder}: holds no .safetensors files of vLLM; give their folder as features.vllm")

    def row(self, packed: Packed, row: int, norm: nn.Module, width: int) -> States:
        """Return the states of a packed row, zeros on padding; the last one is on the norm's device, for the lm_head.

        Raises:
            ValueError: a document was not given to vLLM, or its file has another shape.
        """
        length = packed.token.shape[1]
        weight: Any = norm.weight
        hidden = torch.zeros(1, length, len(self.layers), width)
        last = torch.zeros(1, length, width, device=weight.device)
        for piece in pieces(packed, row):
            states = self._states(piece, width)
            span = slice(piece.start, piece.start + len(piece.token))
            hidden[0, span] = states[:, self.layers].float()
            with torch.no_grad():
                last[0, span] = norm(states[:, self.last].to(weight.device, weight.dtype)).float()
        return States(hidden, last)

    def _states(self, piece: Piece, width: int) -> Float[Tensor, "T L D"]:
        file = self.files.get(_key(piece.token))
        if file is None:
            raise ValueError(
                f"{self.folder}: no file is of the {len(piece.token)} tokens of row {piece.row} from position "
                f"{piece.start} on; give vLLM the prompts that vllm_prompts=FILE writes for this data and data.length"
            )
        states = _read(file, STATES)
        if states.shape != (len(piece.token), self.count, width):
            raise ValueError(
                f"{file}: hidden states of shape {list(states.shape)}, not {[len(piece.token), self.count, width]} "
                "(tokens, layer ids, width); check features.vllm_layers and the target, and let vLLM write it again"
            )
        return states


def _key(token: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(token, dtype="<i4").tobytes()).digest()


def _read(file: Path, name: str) -> Tensor:
    """Return a tensor of a file, once vLLM has finished writing it."""
    lock = file.with_name(f"{file.name}.lock")
    try:
        if lock.exists():
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH)
        with safe_open(file, "pt") as opened:
            return opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: not a hidden-state file of vLLM ({reason}); remove it, or write it again") from error
