"""Features that vLLM servers compute while training goes on; a store may stand in for rows that they fail to give.

The documents of the micro-batches to come are asked for in their order, which follows from (seed, step), as many at a
time as `features.endpoint.concurrency` says. Answers may arrive in any order: each is written to its place in its row.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from data.answers.client import EndpointError
from data.batches import Batch, Batches
from data.features.coding import States, decode_rows
from data.features.source import FeatureRequest, ReadAhead
from data.features.store import FeatureStore
from data.features.vllm_features import Piece, normed, pieces
from data.features.vllm_server import VllmServers
from heads.base import Features, to_device


class ArrivingRow(NamedTuple):
    """A packed row, its states on the host, the last one not yet normed, and its documents that are still to come."""

    row: int
    states: States
    documents: list[Future[None]]


class Served(ReadAhead[list[ArrivingRow]]):
    """Features of the rows of a run, from servers that have been checked."""

    def __init__(
        self, servers: VllmServers, batches: Batches, form: FeatureRequest, norm: nn.Module, device: torch.device,
        ahead: int, store: FeatureStore | None,
    ) -> None:  # fmt: skip
        """Ask for nothing yet. A row that is neither served nor in the store is an error."""
        super().__init__(batches, form, device, ahead)
        self.servers, self.norm, self.store = servers, norm, store
        self.served = self.stored = 0  # rows, by the servers and from the store
        self._pool = ThreadPoolExecutor(servers.endpoint.concurrency)

    def begin(self, batch: Batch) -> list[ArrivingRow]:
        """Ask for a micro-batch's documents."""
        return [self._row(row) for row in batch.index.clamp_min(0).tolist()]  # a filler has the first row's tokens

    def finish(self, batch: Batch, job: list[ArrivingRow]) -> Features:
        """Return the features of a micro-batch, once all its states have arrived."""
        hidden, last = (torch.cat(parts) for parts in zip(*map(self._whole, job), strict=True))
        token, document = to_device(batch.token, self.device), to_device(batch.document, self.device)
        return Features(token, hidden, last, document)

    def close(self) -> str:
        """Ask for no more, remove what still arrives, and return how many rows came from where."""
        self.servers.stop()
        self._pool.shutdown(cancel_futures=True)
        self.servers.sweep()
        return f"features: {self.served} rows served, {self.stored} from the store"

    def _row(self, row: int) -> ArrivingRow:
        length, width, pin = self.batches.packed.token.shape[1], self.servers.width, self.device.type == "cuda"
        zeros = partial(torch.zeros, dtype=self.form.dtype, pin_memory=pin)
        states = States(zeros(1, length, len(self.form.layers), width), zeros(1, length, width))
        documents = [self._pool.submit(self._fetch, piece, states) for piece in pieces(self.batches.packed, row)]
        return ArrivingRow(row, states, documents)

    def _fetch(self, piece: Piece, into: States) -> None:
        """Write the states of a document to its positions of a row."""
        patient = self.store is None or not self.store.has(piece.row)
        states = self.servers.states(piece, patient=patient)
        into.hidden[0, piece.span] = states[:, self.servers.ids.layers].to(into.hidden.dtype)
        into.last[0, piece.span] = states[:, self.servers.ids.last].to(into.last.dtype)

    def _whole(self, row: ArrivingRow) -> States:
        """Return the states of a row, once they have all arrived, on the device."""
        begin = time.perf_counter()
        try:
            for document in row.documents:
                document.result()
        except EndpointError as failure:
            return self._from_store(row.row, failure)
        finally:
            self.stall += time.perf_counter() - begin
        self.served += 1
        hidden, last = (to_device(states, self.device) for states in row.states)
        return States(hidden, normed(last, self.norm).to(self.form.dtype))

    def _from_store(self, row: int, failure: EndpointError) -> States:
        why = f"{', '.join(self.servers.urls)}: {failure.cause} ({failure.detail})"
        if self.store is None or not self.store.has(row):
            raise ValueError(
                f"{why}; start the server again, and resume=true goes on; or give features.path, a store that has the "
                f"rows that a server fails to give, of which row {row} is one"
            ) from failure
        self.warn(why, f"rows are taken from {self.store.folder}")
        self.stored += 1
        tensors = {name: to_device(tensor, self.device) for name, tensor in self.store.read(row).items()}
        token, document, _ = (to_device(field[row : row + 1].long(), self.device) for field in self.batches.packed)
        features = decode_rows(tensors, token, document, self.form, self.store.spec)
        return States(features.hidden, features.last)
