"""Conversion between features and a store's tensors: quantised hidden states."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from data.features.source import FeatureRequest
from data.features.store import Coded, SequenceTensors, StoreSpec, decode, encode
from heads.base import Features
from inference.target.target import Target

HIDDEN, LAST = "hidden", "last"
SCALE = "_scale"


class States(NamedTuple):
    """Hidden states of packed sequences: those of the feature layers, and the last one after the final norm."""

    hidden: Float[Tensor, "B T L D"]
    last_hidden: Float[Tensor, "B T D"]


class Copying(NamedTuple):
    """Sequences being copied to the host, asynchronously."""

    sequences: SequenceTensors
    finite: Bool[Tensor, ""]  # whether all states are finite
    copied: "torch.cuda.Event | None"  # an event after the last copy; None on a CPU
    name: str  # the target's name

    def result(self) -> SequenceTensors:
        """Wait for the sequences; refuse a state that is not finite."""
        if self.copied is not None:
            self.copied.synchronize()
        if not self.finite:
            raise ValueError(
                f"{self.name}: a hidden state is not finite, so nothing is kept of it; load the target in bfloat16 or "
                "float32 (model.dtype)"
            )
        return self.sequences


def compute(
    target: Target, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], spec: StoreSpec
) -> SequenceTensors:
    """Return packed sequences' tensors for a store, by a forward pass of the target."""
    return start(target, token, document, spec).result()


def start(target: Target, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], spec: StoreSpec) -> Copying:
    """Do what `compute` does, asynchronously on a GPU."""
    features = target.features(token, document, spec.layers)
    return copying(States(features.hidden, features.last_hidden), spec)


def copying(states: States, spec: StoreSpec) -> Copying:
    """Encode hidden states on their device, and start copying them to the host."""
    bounds = [bound for x in (states.hidden, states.last_hidden) if x.numel() for bound in x.aminmax()]
    finite, on_gpu = torch.stack(bounds).isfinite().all(), states.last_hidden.device.type == "cuda"

    def copy(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=on_gpu)  # from a GPU to pinned memory

    sequences: SequenceTensors = {}
    for name, tensor in {**({HIDDEN: states.hidden} if spec.layers else {}), LAST: states.last_hidden}.items():
        coded = encode(tensor, spec.dtype)
        sequences[name] = copy(coded.value)
        if coded.scale is not None:
            sequences[name + SCALE] = copy(coded.scale)
    finite = copy(finite)
    copied = torch.cuda.current_stream(states.last_hidden.device).record_event() if on_gpu else None
    return Copying(sequences, finite, copied, spec.name)


def join(sequences: Iterable[SequenceTensors]) -> SequenceTensors:
    """Concatenate the tensors of several sequences."""
    listed = list(sequences)
    return {name: torch.cat([sequence[name] for sequence in listed]) for name in listed[0]}


def decode_sequences(
    sequences: SequenceTensors,
    token: Int[Tensor, "B T"],
    document: Int[Tensor, "B T"],
    request: FeatureRequest,
    spec: StoreSpec,
) -> Features:
    """Decode stored sequences to features with the requested layers, on their device."""
    if request.layers:
        indices = [spec.layers.index(layer) for layer in request.layers]
        chosen = slice(None) if request.layers == spec.layers else indices
        scale = sequences.get(HIDDEN + SCALE)
        coded = Coded(sequences[HIDDEN][:, :, chosen], None if scale is None else scale[:, :, chosen])
        hidden = decode(coded, request.dtype)
    else:
        hidden = torch.zeros(*token.shape, 0, spec.width, dtype=request.dtype, device=token.device)
    last = decode(Coded(sequences[LAST], sequences.get(LAST + SCALE)), request.dtype)
    return Features(token, hidden, last, document)
