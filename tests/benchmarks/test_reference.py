"""The comparison with other trainers: its statistics, its fingerprints, and the exact conversion of their heads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import reference, references
from data.batches import Batches, pack
from data.features.source import LiveFeatures
from data.text.masks import Sample
from tests import toys

SAMPLES = [Sample("a", [5, 6, 7, 8, 9], [0, 0, 1, 1, 1]), Sample("b", [3, 4, 2], [0, 1, 1])]


def head(name: str, seed: int, pairs: list[list[int]], rows: str = "a") -> dict[str, Any]:
    return {"name": name, "seed": seed, "rows": rows, "passes": {"chain": pairs}}


def test_a_ratio_is_the_median_of_pairs_and_not_of_each_side() -> None:
    middle, low, high = reference.ratio([4.0, 2.0, 30.0], [2.0, 2.0, 10.0])
    assert middle == 2.0
    assert 1.0 <= low < middle < high <= 3.0


def test_tau_pools_all_seeds_and_its_ratio_takes_those_that_both_have() -> None:
    ours = [head("ours", 1, [[30, 10], [20, 10]]), head("ours", 2, [[90, 10], [80, 10]])]
    theirs = [head("theirs", 1, [[15, 10], [10, 10]])]
    assert reference.tau(ours, "chain")[0] == 220 / 40
    assert reference.paired(ours, theirs, "chain") == "2.00 [2.00, 2.00]"
    later = [head("theirs", 2, [[45, 10], [40, 10]]), *theirs]
    assert reference.paired(ours, later, "chain") == "2.00 [2.00, 2.00]"


def recorded(samples: list[Sample]) -> list[str]:
    source = reference.Recorded(LiveFeatures(toys.target(), Batches(pack(samples, 10), 1, 1, 0, 0, 1), ()))
    source(0)
    return source.rows


@pytest.mark.parametrize(
    "other",
    [
        [Sample("a", [5, 6, 7, 8, 1], SAMPLES[0].loss_mask), SAMPLES[1]],
        [Sample("a", SAMPLES[0].token, [0, 0, 0, 1, 1]), SAMPLES[1]],
        [Sample("a", SAMPLES[0].token + SAMPLES[1].token, SAMPLES[0].loss_mask + SAMPLES[1].loss_mask)],
    ],
)
def test_a_fingerprint_sees_tokens_masks_and_documents(other: list[Sample]) -> None:
    assert recorded(SAMPLES) == recorded(SAMPLES)
    assert recorded(SAMPLES) != recorded(other)


@pytest.mark.slow
@pytest.mark.skipif(not references.available(), reason="needs speculators, as benchmarks/reference.py says")
def test_a_head_of_speculators_is_converted_exactly_and_takes_our_rows(tmp_path: Path) -> None:
    job = reference.Job()
    theirs = job.reference("speculators", 3, 2, seed=0)
    rows = reference.Recorded(LiveFeatures(job.target, Batches(job.packed, 1, 1, 0, 0, 1), ()))
    rows(0)
    batch = job.collated(theirs, job.target, job.row(0, 0))
    assert [references.fingerprint(theirs.trained(batch))] == rows.rows
    for parameter in theirs.model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save(tmp_path)
    converted: Any = reference.load_published(tmp_path, job.target.embeddings)
    same, compared = reference.agreement(job, theirs, converted, job.row(0, 0))
    assert same == compared > 1000
    converted.first.norm_before_residual = False
    assert reference.agreement(job, theirs, converted, job.row(0, 0))[0] < compared
