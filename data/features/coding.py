"""Conversion between features and the tensors of a store's row: quantised hidden states."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from data.features.source import FeatureRequest
from data.features.store import Coded, RowTensors, StoreSpec, decode, encode
from heads.base import Features
from inference.target.target import Target

HIDDEN, LAST = "hidden", "last"
SCALE = "_scale"


class States(NamedTuple):
    """Hidden states of packed sequences: those of the feature layers, and the last one after the final norm."""

    hidden: Float[Tensor, "B T L D"]
    last_hidden: Float[Tensor, "B T D"]


class Copying(NamedTuple):
    """Rows on their way to the host; their device may still be computing them."""

    rows: RowTensors
    finite: Bool[Tensor, ""]  # whether all their states are, on the host like them
    copied: "torch.cuda.Event | None"  # what comes behind the last copy; None: they are there
    name: str  # the target's

    def result(self) -> RowTensors:
        """Wait for the rows; refuse a state that is not finite."""
        if self.copied is not None:
            self.copied.synchronize()
        if not self.finite:
            raise ValueError(
                f"{self.name}: a hidden state is not finite, so nothing is kept of it; load the target in bfloat16 or "
                "float32 (model.dtype)"
            )
        return self.rows


def compute(target: Target, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], spec: StoreSpec) -> RowTensors:
    """Return the tensors that a store of this kind holds of packed sequences, by a forward pass of the target."""
    return start(target, token, document, spec).result()


def start(target: Target, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], spec: StoreSpec) -> Copying:
    """Start what `compute` does; the host does not wait for a GPU."""
    features = target.features(token, document, spec.layers)
    return copying(States(features.hidden, features.last_hidden), spec)


def copying(states: States, spec: StoreSpec) -> Copying:
    """Encode hidden states on their device, and start the copy of what a store of this kind holds of them."""
    bounds = [bound for x in (states.hidden, states.last_hidden) if x.numel() for bound in x.aminmax()]
    finite, on_gpu = torch.stack(bounds).isfinite().all(), states.last_hidden.device.type == "cuda"

    def copy(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=on_gpu)  # a GPU's to pinned memory

    rows: RowTensors = {}
    for name, tensor in {**({HIDDEN: states.hidden} if spec.layers else {}), LAST: states.last_hidden}.items():
        coded = encode(tensor, spec.dtype)
        rows[name] = copy(coded.value)
        if coded.scale is not None:
            rows[name + SCALE] = copy(coded.scale)
    finite = copy(finite)
    copied = torch.cuda.current_stream(states.last_hidden.device).record_event() if on_gpu else None
    return Copying(rows, finite, copied, spec.name)


def join(rows: Iterable[RowTensors]) -> RowTensors:
    """Return the tensors of several rows as one."""
    listed = list(rows)
    return {name: torch.cat([row[name] for row in listed]) for name in listed[0]}


def decode_rows(
    rows: RowTensors, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], request: FeatureRequest, spec: StoreSpec
) -> Features:
    """Decode stored rows to features, on their device, with the layers of the request."""
    if request.layers:
        indices = [spec.layers.index(layer) for layer in request.layers]
        chosen = slice(None) if request.layers == spec.layers else indices
        scale = rows.get(HIDDEN + SCALE)
        coded = Coded(rows[HIDDEN][:, :, chosen], None if scale is None else scale[:, :, chosen])
        hidden = decode(coded, request.dtype)
    else:
        hidden = torch.zeros(*token.shape, 0, spec.width, dtype=request.dtype, device=token.device)
    last = decode(Coded(rows[LAST], rows.get(LAST + SCALE)), request.dtype)
    return Features(token, hidden, last, document)
