"""A refactor must leave the losses of a seeded run bit-identical (make same-loss).

The recorded losses belong to one machine's arithmetic, so they are recorded where they are compared: the first call on
a clean tree records, later ones compare. Delete the file, or change the numerics on purpose, to record again.
"""

import json
from pathlib import Path

import pytest

from tests.train import jobs

RECORDED = jobs.ROOT / ".same_loss.json"


@pytest.mark.slow
@pytest.mark.parametrize("head", ["eagle", "medusa"])
def test_losses_are_the_recorded_ones(head: str, tmp_path: Path) -> None:
    overrides = [*jobs.make(tmp_path), f"head={head}", "trainer.steps=12"]
    jobs.finish(jobs.start([*overrides, f"out={tmp_path / 'once'}"]))
    found = {str(step): loss for step, loss in jobs.losses(tmp_path / "once").items()}
    assert len(found) == 12
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if head not in recorded:
        RECORDED.write_text(json.dumps({**recorded, head: found}, indent=1) + "\n")
        pytest.skip(f"recorded the losses of {head} in {RECORDED.name}: change the code, and run this again")
    assert found == recorded[head]
