"""Writing the features that a hybrid run computes: gathered to shards, written beside training, within a budget."""

import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

from data.features.coding import join
from data.features.store import FeatureStore, Row
from data.features.store_files import claim

log = logging.getLogger(__name__)
LOCK = "keep"
WAITING = 2  # shards that wait to be written at most, so that a disk slower than the target does not fill the memory


class StoreWriter:
    """Gathers rows to shards and writes those one at a time, among all processes.

    Attributes:
        pending: the rows that wait to be written, or are being written.
        rows_written: how many rows this process has added to the store.
        is_full: whether the budget or the disk is used up, after which nothing more is written.
    """

    def __init__(self, store: FeatureStore, budget: float | None) -> None:
        """Take a store object of its own, since it is used in another thread, and the limit of the store's bytes."""
        self.store, self.budget = store, budget
        self.pending: dict[int, Row] = {}
        self.rows_written, self.is_full = 0, False
        self._gathered: list[int] = []
        self._writer = ThreadPoolExecutor(1)
        self._written: list[Future[None]] = []

    def keep(self, rows: dict[int, Row]) -> None:
        """Add rows, and write a shard once there are enough; wait while too many shards are still to be written."""
        for done in [future for future in self._written if future.done()]:
            self._written.remove(done)
            done.result()
        if self.is_full:
            return
        fresh = {row: tensors for row, tensors in rows.items() if row not in self.pending}
        self.pending.update(fresh)
        self._gathered += list(fresh)
        while len(self._gathered) >= self.store.spec.shard_rows:
            if len(self._written) >= WAITING:
                self._written.pop(0).result()
            self._submit(self.store.spec.shard_rows)

    def close(self) -> str:
        """Write the pending rows, and describe how many rows were written."""
        if self._gathered and not self.is_full:
            self._submit(len(self._gathered))
        self._writer.shutdown()
        for future in self._written:
            future.result()
        return f", {self.rows_written} kept in {self.store.folder}"

    def _submit(self, size: int) -> None:
        rows, self._gathered = self._gathered[:size], self._gathered[size:]
        self._written.append(self._writer.submit(self._write, rows))

    def _write(self, rows: list[int]) -> None:
        try:
            with claim(self.store.lock(LOCK), wait=True):
                self.store.refresh()
                fresh = [row for row in rows if not self.store.has(row)]
                if fresh and self._fits(len(fresh)):
                    self.store.write(self._name(), fresh, join(self.pending[row] for row in fresh))
                    self.rows_written += len(fresh)
        except (ValueError, OSError) as error:
            self.is_full = True
            log.warning("%s; training goes on, and keeps no more", error)
        for row in rows:
            self.pending.pop(row, None)

    def _name(self) -> str:
        """Return the first free name: entries may have been removed, so their number may be a name that is taken."""
        taken = self.store.entries.keys() | self.store.damaged.keys()
        return next(name for name in (f"{LOCK}-{number:06d}" for number in count()) if name not in taken)

    def _fits(self, rows: int) -> bool:
        size = rows * self.store.spec.row_bytes
        left = shutil.disk_usage(self.store.folder).free
        if self.budget is not None:
            left = min(left, int(self.budget) - self.store.bytes())
        if size > left and not self.is_full:
            self.is_full = True
            log.warning("%s: the disk budget is used up; training goes on, and keeps no more", self.store.folder)
        return not self.is_full
