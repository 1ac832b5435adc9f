"""A training run whose features of one packed row are not numbers: `python tests/train/poison.py ROW OVERRIDES`."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from data.features.source import FeatureSource, MicroBatch
from heads.base import Features
from train import build, run


class Poisoned:
    """Features as they are but for one row's, some of which are NaN."""

    def __init__(self, inner: FeatureSource, row: int) -> None:
        self.inner, self.batches, self.row, self.stall = inner, inner.batches, row, 0.0

    def __call__(self, step: int) -> list[MicroBatch]:
        return [micro._replace(read=partial(self.poisoned, micro)) for micro in self.inner(step)]

    def poisoned(self, micro: MicroBatch) -> Features:
        features = micro.read()
        for position in (micro.batch.index == self.row).nonzero()[:, 0].tolist():
            features.last_hidden[position, 3:9] = float("nan")
        return features

    def close(self) -> str:
        return self.inner.close()


def poison(row: int) -> Any:
    """Return what takes the place of `train.build.source_for`."""
    inner = build.source_for
    return lambda *given: Poisoned(inner(*given), row)


if __name__ == "__main__":
    build.source_for = poison(int(sys.argv.pop(1)))
    run.main()
