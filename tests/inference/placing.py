"""One process of several that hold a target together: compares it with the target on one device, writes what it found.

torchrun … tests/inference/placing.py FOLDER OUT KIND:SIZE … : SIZE is of the tensor-parallel group, 0 for all.
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed

from heads.base import Features
from inference.decode import RequestParams, autoregress
from inference.target.placement import Placement, whole
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import toys


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def compared(ours: Target, alone: Target) -> dict[str, float | bool]:
    rank = distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    token = torch.randint(toys.VOCAB, (1 + rank, 20), generator=generator)  # every process has rows of its own
    document = (torch.arange(20) > 6).long().expand_as(token)
    found, expected = ours.features(token, document, (0, 2)), alone.features(token, document, (0, 2))
    assert isinstance(found, Features)
    layer = dict(whole(ours.decoder_layers[-1]))
    answers = [autoregress(each, toys.prompt(0), RequestParams(12, GREEDY)).tokens for each in (ours, alone)]
    return {
        "hidden": error(found.hidden, expected.hidden),
        "last": error(found.last_hidden, expected.last_hidden),
        "spec": ours.spec == alone.spec,
        "trees": ours.takes_trees,
        "ends": ours.embeddings.lm_head_weight().equal(alone.embeddings.lm_head_weight())
        and ours.embeddings.embed(token).equal(alone.embeddings.embed(token)),
        "layer": all(layer[name].equal(value) for name, value in alone.decoder_layers[-1].named_parameters()),
        "answer": answers[0] == answers[1],
        "share": sum(each.to_local().numel() for each in ours.model.parameters() if hasattr(each, "to_local"))
        / sum(each.numel() for each in alone.model.parameters()),
    }


def main() -> None:
    folder, out, *kinds = sys.argv[1:]
    distributed.init_process_group("gloo")
    alone = Target.load(folder, "float32", "cpu")
    found = {}
    for kind in kinds:
        name, size = kind.split(":")
        where = Placement(name, int(size) or None, None, "cpu", None)
        found[kind] = compared(Target.load(folder, "float32", "cpu", placement=where), alone)
    Path(out, f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
