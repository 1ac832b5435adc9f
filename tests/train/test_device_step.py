"""A training step on an accelerator with a live target makes the host wait once, and sends what it knows on the way."""

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from heads import HEADS
from tests.train import device_step

NAMES = [*HEADS, "block of DSpark", "eagle3 injected", "eagle pruned"]
DOCUMENTS, MICRO_BATCHES = (1, 2, 8), (1, 3)
CASES = [f"{name}:2:1" for name in NAMES] + [
    f"{name}:{documents}:{count}"
    for name in ("eagle3", "block of DSpark")
    for documents in DOCUMENTS
    for count in MICRO_BATCHES
]
# Tokens, documents and where they begin, the rows' weights, the chunks of the loss, the keys of the noise and the
# anchors; and once a step how many rows are trained.
SENT = 7


QUICK = ("eagle3:2:1", "medusa:2:1", "eagle pruned:2:1", "block of DSpark:8:3")
EACH = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)


@cache
def counted(cases: tuple[str, ...]) -> dict[str, Any]:
    """Return the counts of cases, from a process of their own."""
    run = subprocess.run([sys.executable, device_step.__file__, *cases], capture_output=True, text=True, check=True)
    counts: dict[str, Any] = {}
    for line in run.stdout.splitlines():
        counts |= json.loads(line)
    assert counts.keys() == {*cases}
    return counts


@pytest.fixture
def counts(case: str) -> dict[str, Any]:
    return counted(QUICK if case in QUICK else tuple(other for other in CASES if other not in QUICK))[case]


@EACH
def test_the_host_waits_once_a_step(counts: dict[str, Any]) -> None:
    """Whatever the head, the documents in a row, one of which fills it, and the micro-batches; the loss included."""
    assert counts["waits"] == ["step:read"]


@EACH
def test_each_micro_batch_is_sent_in_the_same_copies(counts: dict[str, Any], case: str) -> None:
    assert counts["sent"] == 1 + SENT * int(case.split(":")[2])
