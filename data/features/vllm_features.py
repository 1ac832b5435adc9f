"""Files of hidden states that vLLM writes for a request.

vLLM's `extract_hidden_states` method with the `ExampleHiddenStatesConnector` writes one safetensors file a request,
`token_ids` [tokens] and `hidden_states` [tokens, layer ids, width], and while it writes holds a lock on FILE.lock (as
of vLLM 0.32: docs/features/speculative_decoding/extract_hidden_states.md and
vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py).

Layer ids are not in the file: they are those that vLLM was started with, in that order. Id 0 is the input of the first
decoder layer and id i the output of layer i - 1, so our layer i is its i + 1. The number of layers as an id is the last
layer's output before the final norm ("not normalized using the output norm"); our last state is that one normed.
"""

import fcntl
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from data.batches import Packed
from heads.common.untrusted import regular
from heads.formats.published.plan import as_states

TOKENS, STATES = "token_ids", "hidden_states"
FLOATS = torch.bfloat16, torch.float16, torch.float32
LOCK = ".lock"  # suffix of a lock file
PAUSE = 0.002  # seconds between checks of a lock


class Piece(NamedTuple):
    """A document of a packed sequence: the sequence's index, the document's first position there, and its tokens."""

    sequence_index: int
    start: int
    token: tuple[int, ...]

    @property
    def span(self) -> slice:
        """Its positions in the sequence."""
        return slice(self.start, self.start + len(self.token))


def pieces(packed: Packed, index: int) -> Iterator[Piece]:
    """Yield the documents of a packed sequence."""
    start, token = 0, packed.token[index].tolist()
    for document, group in groupby(packed.document[index].tolist()):
        count = len(list(group))
        if document >= 0:
            yield Piece(index, start, tuple(token[start : start + count]))
        start += count


class LayerIds(NamedTuple):
    """The layer ids that vLLM was started with: their number, and the indices of feature layers and last state."""

    size: int
    layers: list[int]
    last: int

    @classmethod
    def of(cls, ids: list[int], layers: tuple[int, ...], num_layers: int) -> "LayerIds":
        """Find our layers among vLLM's ids; refuse ids without one of them."""
        states = as_states(layers)
        needed = list(dict.fromkeys([*states, num_layers]))
        if lacking := [layer_id for layer_id in needed if layer_id not in ids]:
            raise ValueError(
                f"features.vllm_layers is {ids}, without {lacking}: feature layer i is vLLM's id i + 1, and "
                f"{num_layers} is the last state; start vLLM with eagle_aux_hidden_state_layer_ids={needed}"
            )
        return cls(len(ids), [ids.index(state) for state in states], ids.index(num_layers))

    def check(self, states: Tensor, tokens: int, width: int, where: object) -> None:
        """Refuse the states of a document that have another shape, or were quantised."""
        if states.shape != (tokens, self.size, width) or states.dtype not in FLOATS:
            raise ValueError(
                f"{where}: hidden states of shape {list(states.shape)} in {states.dtype}, not "
                f"{[tokens, self.size, width]} (tokens, layer ids, width) in 16 or 32 bits; check features.vllm_layers "
                "and the target, and let vLLM write it again, by its ExampleHiddenStatesConnector"
            )


def normed(last: Float[Tensor, "*n D"], norm: nn.Module) -> Float[Tensor, "*n D"]:
    """Return last hidden states after the final norm, on its device and in its dtype."""
    weight: Any = norm.weight
    with torch.no_grad():
        states: Tensor = norm(last.to(weight.device, weight.dtype))
    return states


def read_tensors(file: Path, seconds: float, *names: str) -> list[Tensor]:
    """Wait for a file of vLLM's at most `seconds` and return its tensors; refuse damaged files."""
    deadline = time.monotonic() + seconds
    try:
        while not _is_written(file):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not written within {seconds:g} s")
            time.sleep(PAUSE)
        with safe_open(regular(file), "pt") as opened:
            return [opened.get_tensor(name) for name in names]
    except (OSError, SafetensorError, IndexError, TypeError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: not a hidden-state file of vLLM ({reason}); remove it, or write it again") from error


def _is_written(file: Path) -> bool:
    """Whether vLLM has released a file's lock, or the file exists without one."""
    try:
        with lock_of(file).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return file.exists()
    except BlockingIOError:
        return False
    return True


def lock_of(file: Path) -> Path:
    """Return the lock file that vLLM holds while it writes a file."""
    return file.with_name(file.name + LOCK)
