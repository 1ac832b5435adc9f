"""The watch on streams that stay as they were, and on streams whose traffic changes: false alarms, and the delay.

python benchmarks/watch.py quiet=FILE [shifted=FILE] [runs=100] [requests=1500] [reference=300] [rate=0.01]
Files are logs with accepted counts: quiet.jsonl and domain/new.jsonl of benchmarks/loop.py. A run samples requests of
the first, with replacement; from `change` on, of the second. Quiet runs go on for `requests` behind the reference.
"""

import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loop import records_of, words_of
from eval.measures.metrics import SpecDecodingStats
from heads.common.typed import from_yaml
from ops.watch import Alarm, WatchConfig, WatcherConfig, counts_in
from ops.watch import watched as watch


def observations(file: str) -> list[SpecDecodingStats]:
    """Return the requests of a log that counts them."""
    counts = [counts_in(record) for record in records_of(Path(file))]
    return [passes for passes in counts if passes is not None and passes.steps]


def watched(
    quiet: list[SpecDecodingStats],
    shifted: list[SpecDecodingStats],
    change: int,
    most: int,
    config: WatcherConfig,
    seed: int,
) -> Alarm | None:
    """Watch one stream."""
    rng = np.random.default_rng(seed)
    pools = (quiet if index < change else shifted for index in range(most))
    return watch((pool[rng.integers(len(pool))] for pool in pools), config).alarm


def main() -> None:
    """Simulate and print."""
    words = words_of(sys.argv[1:], quiet="", shifted="", runs="100", requests="1500", reference="300", rate="0.01")
    runs, requests, reference = (int(words[key]) for key in ("runs", "requests", "reference"))
    rate = float(words["rate"])
    config = from_yaml(WatchConfig, "ops/watch", log="log", reference=reference, alarm_rate=rate)
    quiet = observations(words["quiet"])
    most = reference + requests
    alarms = [watched(quiet, quiet, most, most, config, seed) for seed in range(runs)]
    print(f"quiet: {sum(alarm is not None for alarm in alarms)} alarms in {runs} runs of {requests:,} requests each")
    if not words["shifted"]:
        return
    shifted = observations(words["shifted"])
    for after in (0, 1000):
        change = reference + after
        delays = [
            alarm.at - change + 1
            for seed in range(runs // 4)
            if (alarm := watched(quiet, shifted, change, change + 2000, config, 1000 + seed)) is not None
        ]
        means = [statistics.fmean(one.accepted / one.steps for one in pool) for pool in (quiet, shifted)]
        if delays:
            print(
                f"accepted tokens per pass {means[0]:.2f} -> {means[1]:.2f}, {after:,} requests behind the reference: "
                f"alarm in {len(delays)} of {runs // 4} runs, after {statistics.median(delays):.0f} requests in the "
                f"middle, {min(delays)} to {max(delays)}"
            )


if __name__ == "__main__":
    main()
