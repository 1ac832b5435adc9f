"""Between features and the tensors that a store keeps of a row: hidden states in fewer bits, and the teacher."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from data.features.quantize import Coded, decode, encode
from data.features.source import Given, forward
from data.features.store import Row, StoreSpec
from heads.base import Embeddings, Features
from heads.modules.top_k import TopLaw, top_log_probs
from inference.target.target import Target

HIDDEN, LAST, IDS, LOG_P = "hidden", "last", "ids", "log_p"
SCALE = "_scale"


class States(NamedTuple):
    """Hidden states of packed rows: those of the feature layers, and the last one after the final norm."""

    hidden: Float[Tensor, "B T L D"]
    last: Float[Tensor, "B T D"]


class Wanted(NamedTuple):
    """What a head reads: feature layers, and floats of a dtype."""

    layers: tuple[int, ...]
    dtype: torch.dtype


def compute(target: Target, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], spec: StoreSpec) -> Row:
    """Return what a store of this kind keeps of packed rows, by a pass of the target.

    Raises:
        ValueError: a hidden state is not finite.
    """
    made = forward(target, token, document, spec.layers)
    return to_row(States(made.hidden, made.last), target.embeddings, spec)


def to_row(states: States, embeddings: Embeddings, spec: StoreSpec) -> Row:
    """Return what a store of this kind keeps of hidden states.

    Raises:
        ValueError: one is not finite.
    """
    parts = {HIDDEN: states.hidden} if spec.layers else {}
    kept: Row = {}
    if spec.teacher == "state":
        parts[LAST] = states.last
    else:
        laws = [
            top_log_probs(embeddings.logits(last), spec.k) for last in states.last
        ]  # a row's logits at once, not a batch's
        kept[IDS] = torch.stack([law.ids for law in laws]).int().cpu()
        kept[LOG_P] = torch.stack([law.log_p for law in laws]).cpu()
    for name, part in parts.items():
        if not part.isfinite().all():
            raise ValueError(
                f"{spec.name}: a hidden state is not finite, so nothing is kept of it; load the target in bfloat16 or "
                "float32 (model.dtype)"
            )
        value, scale = encode(part, spec.dtype)
        kept[name] = value.cpu()
        if scale is not None:
            kept[name + SCALE] = scale.cpu()
    return kept


def join(rows: Iterable[Row]) -> Row:
    """Return the tensors of several rows as one."""
    listed = list(rows)
    return {name: torch.cat([row[name] for row in listed]) for name in listed[0]}


def split(rows: Row) -> list[Row]:
    """Return the tensors of each row."""
    count = len(next(iter(rows.values())))
    return [{name: part[i : i + 1] for name, part in rows.items()} for i in range(count)]


def to_given(
    rows: Row, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], wanted: Wanted, spec: StoreSpec
) -> Given:
    """Return kept rows as what a head trains on, on the device that they are on; of the layers the wanted ones."""
    if wanted.layers:
        places = [spec.layers.index(layer) for layer in wanted.layers]
        chosen = slice(None) if wanted.layers == spec.layers else places
        scale = rows.get(HIDDEN + SCALE)
        coded = Coded(rows[HIDDEN][:, :, chosen], None if scale is None else scale[:, :, chosen])
        hidden = decode(coded, wanted.dtype)
    else:
        hidden = torch.zeros(*token.shape, 0, spec.width, dtype=wanted.dtype, device=token.device)
    if spec.teacher == "state":
        last = decode(Coded(rows[LAST], rows.get(LAST + SCALE)), wanted.dtype)
        return Given(Features(token, hidden, last, document), None)
    last = torch.zeros(*token.shape, 0, dtype=wanted.dtype, device=token.device)
    return Given(Features(token, hidden, last, document), TopLaw(rows[IDS].long(), rows[LOG_P]))
