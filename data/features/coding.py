"""Conversion between features and the tensors of a store's row: quantised hidden states, and the teacher."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from data.features.quantize import Coded, decode, encode
from data.features.source import TrainingInput, forward
from data.features.store import Row, StoreSpec
from heads.base import Embeddings, Features
from heads.modules.top_k import TopLogProbs, top_log_probs
from inference.target.target import Target

HIDDEN, LAST, IDS, LOG_P = "hidden", "last", "ids", "log_p"
SCALE = "_scale"


class States(NamedTuple):
    """Hidden states of packed rows: those of the feature layers, and the last one after the final norm."""

    hidden: Float[Tensor, "B T L D"]
    last: Float[Tensor, "B T D"]


class FeatureRequest(NamedTuple):
    """A head's request: feature layers, and the dtype of the floats."""

    layers: tuple[int, ...]
    dtype: torch.dtype


def compute(target: Target, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], spec: StoreSpec) -> Row:
    """Return what `to_row` does of packed rows, by a forward pass of the target."""
    features = forward(target, token, document, spec.layers)
    return to_row(States(features.hidden, features.last), target.embeddings, spec)


def to_row(states: States, embeddings: Embeddings, spec: StoreSpec) -> Row:
    """Return the tensors that a store of this kind holds of hidden states; refuse one that is not finite."""
    floats = {HIDDEN: states.hidden} if spec.layers else {}
    row: Row = {}
    if spec.teacher == "state":
        floats[LAST] = states.last
    else:  # a row's logits at once, not a batch's
        tops = [top_log_probs(embeddings.logits(last), spec.k) for last in states.last]
        row[IDS] = torch.stack([top.ids for top in tops]).int().cpu()
        row[LOG_P] = torch.stack([top.log_p for top in tops]).cpu()
    for name, tensor in floats.items():
        if not tensor.isfinite().all():
            raise ValueError(
                f"{spec.name}: a hidden state is not finite, so nothing is kept of it; load the target in bfloat16 or "
                "float32 (model.dtype)"
            )
        value, scale = encode(tensor, spec.dtype)
        row[name] = value.cpu()
        if scale is not None:
            row[name + SCALE] = scale.cpu()
    return row


def join(rows: Iterable[Row]) -> Row:
    """Return the tensors of several rows as one."""
    listed = list(rows)
    return {name: torch.cat([row[name] for row in listed]) for name in listed[0]}


def split(rows: Row) -> list[Row]:
    """Return the tensors of each row."""
    count = len(next(iter(rows.values())))
    return [{name: tensor[i : i + 1] for name, tensor in rows.items()} for i in range(count)]


def decode_rows(
    rows: Row, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], request: FeatureRequest, spec: StoreSpec
) -> TrainingInput:
    """Decode stored rows to a head's training input, on their device, with the layers of the request."""
    if request.layers:
        indices = [spec.layers.index(layer) for layer in request.layers]
        chosen = slice(None) if request.layers == spec.layers else indices
        scale = rows.get(HIDDEN + SCALE)
        coded = Coded(rows[HIDDEN][:, :, chosen], None if scale is None else scale[:, :, chosen])
        hidden = decode(coded, request.dtype)
    else:
        hidden = torch.zeros(*token.shape, 0, spec.width, dtype=request.dtype, device=token.device)
    if spec.teacher == "state":
        last = decode(Coded(rows[LAST], rows.get(LAST + SCALE)), request.dtype)
        return TrainingInput(Features(token, hidden, last, document), None)
    last = torch.zeros(*token.shape, 0, dtype=request.dtype, device=token.device)
    return TrainingInput(Features(token, hidden, last, document), TopLogProbs(rows[IDS].long(), rows[LOG_P]))
