"""The MLP speculator: `emb.{i}`, `proj.{i}`, `ln.{i}`, `head.{i}`, with or without `speculator.` before them.

With tied weights the steps' tensors are one and the same, written once or for each step.
"""

import re
from collections.abc import Set

import torch

from heads.base import Embeddings
from heads.formats.published.plan import Plan, Source

STEP = re.compile(r"(emb|proj|ln|head)\.(\d+)\.(weight|bias)")


def matches(names: Set[str]) -> bool:
    """Say whether the names are of this format."""
    return {"emb.0.weight", "proj.0.weight", "head.0.weight"} <= names


def read(source: Source, embeddings: Embeddings) -> Plan:
    """Return where each tensor goes: under its own name."""
    steps = {name: found for name in source.tensors if (found := STEP.fullmatch(name))}
    heads = 1 + max(int(found[2]) for found in steps.values())
    # Of the projections the first two stay: the first reads the target's feature, the others a state.
    copies = {name for name, found in steps.items() if int(found[2]) > (found[1] == "proj")}
    tied = heads > 1 and all(_is_copy(source, steps[name]) for name in copies)
    said = source.config.get("n_predict")
    if tied and not copies and isinstance(said, int):
        heads = max(heads, said)  # written once, the tensors do not say how many steps they are for
    source.settle("n_predict", heads)
    source.settle("tie_weights", tied)
    inner, width = source.tensor("proj.0.weight").shape[:2]
    if width != embeddings.hidden_size:
        raise source.error(
            f"proj.0.weight reads {width} numbers, expected {embeddings.hidden_size}, the width of the target; choose "
            "the head's own target with model.path"
        )
    source.settle("inner_dim", inner)
    config = {
        "heads": heads,
        "inner": inner,
        "tied": tied,
        "scale_input": bool(source.config.get("scale_input")),
        "draft_vocab": None,
    }
    return Plan("mlp", config, lambda name: name, {}, copies if tied else set(), None)


def _is_copy(source: Source, found: re.Match[str]) -> bool:
    first = f"{found[1]}.{int(found[1] == 'proj')}.{found[3]}"
    return first in source.tensors and torch.equal(source.tensors[found[0]], source.tensors[first])
