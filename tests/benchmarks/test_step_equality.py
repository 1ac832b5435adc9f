"""The comparison of the device step with the reference engine: what it counts as what, and that it runs."""

import subprocess
import sys
from typing import Any

import pytest

from benchmarks import step_equality
from inference.decode import Settings
from inference.verification.sample import GREEDY
from tests import toys
from tests.eval.stubs import generation

OURS = generation([5, 6, 7], gaps=[2.0, 3.0, 1e-6])


@pytest.mark.parametrize(
    ("tokens", "changes", "kind"),
    [
        ([5, 6, 7], {}, "identical"),
        ([5, 6, 8], {}, "near_tie"),
        ([5, 7, 7], {}, "failed"),
        ([5, 6], {}, "failed"),
        ([5, 6, 7], {"finish": "eos"}, "failed"),
    ],
)
def test_texts_are_counted_by_where_they_part(tokens: list[int], changes: dict[str, Any], kind: str) -> None:
    theirs = generation(tokens)
    for name, value in changes.items():
        setattr(theirs, name, value)
    found = step_equality.compare(toys.target(), [([1], Settings(3, GREEDY))], [OURS], [theirs])
    assert found.counts == {"tokens": len(tokens), kind: 1}
    assert [line.split(":")[0] for line in found.first] == [kind] * (kind != "identical")


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [[], ["--static"]])
def test_a_head_of_random_weights_writes_the_references_texts(shapes: list[str]) -> None:
    words = [step_equality.__file__, "--tokens", "300", "--batch", "2", *shapes]
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    assert "'identical': 32}" in run.stdout.splitlines()[-1]
