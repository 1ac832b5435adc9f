"""A training step on an accelerator with a live target makes the host wait once, and sends what it knows on the way."""

import json
import subprocess
import sys
from typing import Any

import pytest

from heads import HEADS
from tests.train import device_step

NAMES = [*HEADS, "block of DSpark", "eagle3 injected", "eagle pruned"]
DOCUMENTS, MICRO_BATCHES = (1, 2, 8), (1, 3)
CASES = [f"{name}:2:1" for name in NAMES] + [
    f"{name}:{documents}:{count}" for name in ("eagle3", "block") for documents in DOCUMENTS for count in MICRO_BATCHES
]
# Tokens, documents and where they begin, the rows' weights, the chunks of the loss, the keys of the noise and the
# anchors; and once a step how many rows are trained.
SENT = 7


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    run = subprocess.run([sys.executable, device_step.__file__, *CASES], capture_output=True, text=True, check=True)
    found: dict[str, Any] = {}
    for line in run.stdout.splitlines():
        found |= json.loads(line)
    assert found.keys() == {*CASES}
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_once_a_step(counts: dict[str, Any], case: str) -> None:
    """Whatever the head, the documents in a row, one of which fills it, and the micro-batches; the loss included."""
    assert counts[case]["waits"] == ["step:read"]


@pytest.mark.parametrize("case", CASES)
def test_each_micro_batch_is_sent_in_the_same_copies(counts: dict[str, Any], case: str) -> None:
    assert counts[case]["sent"] == 1 + SENT * int(case.split(":")[2])
