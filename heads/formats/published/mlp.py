"""The MLP speculator: `emb.{i}`, `proj.{i}`, `ln.{i}`, `head.{i}`, with or without the prefix `speculator.`.

With tied weights all steps share one tensor, written once or once per step.
"""

import re

import torch

from heads.base import Embeddings
from heads.formats.published.plan import PublishedHead, TensorMapping, check_width

SIGNATURE = (r"emb\.0\.weight", r"proj\.0\.weight", r"head\.0\.weight")
STEP = re.compile(r"(emb|proj|ln|head)\.(\d+)\.(weight|bias)")


def read(source: PublishedHead, embeddings: Embeddings) -> TensorMapping:
    """Return the mapping, of each tensor to its own name."""
    steps = {name: match for name in source.tensors if (match := STEP.fullmatch(name))}
    heads = 1 + max(int(match[2]) for match in steps.values())
    # Two projections remain: the first reads the target's feature, the others the previous state.
    duplicates = {name for name, match in steps.items() if int(match[2]) > (match[1] == "proj")}
    tied = heads > 1
    for name in duplicates:
        match = steps[name]
        first = source.tensors.get(f"{match[1]}.{int(match[1] == 'proj')}.{match[3]}")
        tied = tied and first is not None and torch.equal(source.tensors[name], first)
    recorded = source.config.get("n_predict")
    if tied and not duplicates and isinstance(recorded, int):
        heads = max(heads, recorded)  # tied tensors that are written once do not show the number of steps
    check_width(source, "proj.0.weight", embeddings, dim=1)
    inner, scale_input = len(source.tensors["proj.0.weight"]), bool(source.config.get("scale_input"))
    config = {"heads": heads, "inner": inner, "tied": tied, "scale_input": scale_input}
    return TensorMapping("mlp", config, unread=duplicates if tied else set())
