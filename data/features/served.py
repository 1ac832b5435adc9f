"""Features from vLLM servers, computed during training.

The servers run vLLM's `extract_hidden_states` method, a request a document, and write the states to files in shared
memory, which are removed after reading. Documents of the next micro-batches are requested in order, at most
`features.endpoint.concurrency` at a time. Replies may arrive in any order.
"""

import os
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from data.answers.client import Client, EndpointError
from data.batches import Batch, Batches
from data.features.coding import States
from data.features.source import FeatureRequest, FeaturesConfig, ReadAhead
from data.features.vllm_features import STATES, TOKENS, LayerIds, Piece, lock_of, normed, pieces, read_tensors
from heads.base import Embeddings, Features, to_device
from heads.common.untrusted import inside

SETUP = "start vLLM as docs/data_features.md has it"
NEAR = 0.5  # how far, in standard deviations, the logit of a server's token may be below our largest
Result = list[Tensor]  # tokens, and their states


class SharedFolder:
    """Reads the files of vLLM's ExampleHiddenStatesConnector, under this machine's path of their folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_read = False  # whether a file has been found there

    def read(self, answer: dict[str, Any], seconds: float) -> Result:
        """Wait for a file; return its tensors and remove it."""
        path = answer.get("hidden_states_path")
        if not isinstance(path, str):
            raise ValueError(f"features.vllm={self.folder}: a server's answer names no file of hidden states; {SETUP}")
        file = inside(self.folder, Path(path).name)
        if not (self.has_read or file.exists() or lock_of(file).exists()):
            raise ValueError(f"features.vllm={self.folder}: a server has written {path}, which is not there; {SETUP}")
        try:
            result = read_tensors(file, seconds, TOKENS, STATES)
            self.has_read = True
            return result
        except ValueError as error:
            raise EndpointError("file", str(error), retry=True) from error
        finally:
            _remove(file)
            _remove(lock_of(file))


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"{file}: cannot be removed ({error.strerror}); run vLLM and the training as one user"
        ) from error


class VllmServers:
    """vLLM servers of one target; `states` may be called from several threads."""

    def __init__(self, config: FeaturesConfig, ids: LayerIds, width: int) -> None:
        """Ask nothing yet; `check` comes first."""
        self.endpoint, self.ids, self.width = config.endpoint, ids, width
        key = os.environ.get(self.endpoint.api_key_env)
        self.clients = [Client(url, self.endpoint, key, "features.url", "features.endpoint") for url in config.url]
        self.urls = [client.url for client in self.clients]
        self.reader = SharedFolder(Path(str(config.vllm)))
        self.models: list[str] = []  # the names by which the servers serve the target
        self.name = (
            f"headstart-{uuid.uuid4().hex}"  # the prefix of each request's name, which is part of its file's name
        )

    def check(self, longest: Piece, norm: nn.Module, embeddings: Embeddings) -> None:
        """Check every server with the longest document.

        Raises:
            ValueError: a server does not answer, takes no such document, sends its states elsewhere or sends others, or
                its next token is none that our norm and lm_head expect: it serves another target.
        """
        for number, client in enumerate(self.clients):
            model, context = client.served()
            self.models.append(model)
            if len(longest.token) >= context:
                raise ValueError(
                    f"{client.url}: takes {context} tokens, and a document of {len(longest.token)} with its next token "
                    "is longer: start vLLM with a larger max_model_len, or give a smaller data.length"
                )

            def ask(_: int, at: int = number) -> tuple[Tensor, Any]:
                return self._ask(longest, at, shows_token=True)

            try:
                states, token = client.retried(ask, self.endpoint.retries)
            except EndpointError as failure:
                raise ValueError(f"{client.url}: {failure.cause} ({failure.detail}); {SETUP}") from failure
            logits = embeddings.logits(normed(states[-1, self.ids.last], norm)).float()
            if token not in (logits > logits.max() - NEAR * logits.std()).nonzero().flatten().tolist():
                raise ValueError(
                    f"{client.url}: {model} goes on otherwise than this target would by the last state that it sent: "
                    "give its own model.path, and features.vllm_layers in the order that vLLM was started with"
                )

    def states(self, piece: Piece) -> Float[Tensor, "T L D"]:
        """Return the states of a document, in the order of vLLM's layer ids.

        Raises:
            EndpointError: every attempt failed, each at the next server.
            ValueError: the server refuses the request, or has sent another document's states.
        """
        states, _ = self.clients[0].retried(lambda n: self._ask(piece, piece.sequence_index + n), self.endpoint.retries)
        return states

    def sweep(self) -> None:
        """Remove files that arrived after their requests had failed."""
        for file in self.reader.folder.glob(f"*{self.name}*"):
            _remove(file)

    def _ask(self, piece: Piece, number: int, *, shows_token: bool = False) -> tuple[Float[Tensor, "T L D"], Any]:
        """Return the states of a document, and on request the server's next token."""
        turn = number % len(self.clients)
        body = {
            "model": self.models[turn], "prompt": piece.token, "max_tokens": 1, "temperature": 0.0,
            "request_id": f"{self.name}-{uuid.uuid4().hex}", "return_token_ids": shows_token, **self.endpoint.extra,
        }  # fmt: skip
        reply = self.clients[turn].once("POST", "/completions", body)
        answer = reply.get("kv_transfer_params")
        token, states = self.reader.read(answer if isinstance(answer, dict) else {}, self.endpoint.timeout)
        where = f"{self.urls[turn]}: sequence {piece.sequence_index} from position {piece.start} on"
        if token.tolist() != list(piece.token):
            raise ValueError(f"{where}: the states that it sent are those of other tokens; {SETUP}")
        self.ids.check(states, len(piece.token), self.width, where)
        with suppress(LookupError, TypeError):
            return states, reply["choices"][0]["token_ids"][0]
        return states, None


class ArrivingSequence(NamedTuple):
    """A packed sequence: its states on the host, the last one before the final norm, and its pending documents."""

    sequence_index: int
    states: States
    documents: list[Future[None]]


class ServedFeatures(ReadAhead[list[ArrivingSequence]]):
    """A run's features from checked servers."""

    def __init__(
        self, servers: VllmServers, batches: Batches, request: FeatureRequest, norm: nn.Module, device: torch.device,
        ahead: int,
    ) -> None:  # fmt: skip
        """Request nothing yet."""
        super().__init__(batches, request, device, ahead)
        self.servers, self.norm = servers, norm
        self.served = 0  # sequences
        self._pool = ThreadPoolExecutor(servers.endpoint.concurrency)

    def begin(self, batch: Batch) -> list[ArrivingSequence]:
        """Request a micro-batch's documents."""
        return [self._arriving(index) for index in batch.index.clamp_min(0).tolist()]  # or a filler's

    def finish(self, batch: Batch, job: list[ArrivingSequence]) -> Features:
        """Wait for a micro-batch's states and return its features."""
        hidden, last = (torch.cat(parts) for parts in zip(*map(self._whole, job), strict=True))
        token, document = to_device(batch.token, self.device), to_device(batch.document, self.device)
        return Features(token, hidden, last, document)

    def close(self) -> str:
        """Stop, remove files that still arrive, and return the number of sequences."""
        self.servers.clients[0].stop.set()  # ends the pauses before retries
        self._pool.shutdown(cancel_futures=True)
        self.servers.sweep()
        return f"features: {self.served} sequences served"

    def _arriving(self, index: int) -> ArrivingSequence:
        length, width, pin = self.batches.packed.token.shape[1], self.servers.width, self.device.type == "cuda"
        zeros = partial(torch.zeros, dtype=self.request.dtype, pin_memory=pin)
        states = States(zeros(1, length, len(self.request.layers), width), zeros(1, length, width))
        documents = [self._pool.submit(self._fetch, piece, states) for piece in pieces(self.batches.packed, index)]
        return ArrivingSequence(index, states, documents)

    def _fetch(self, piece: Piece, into: States) -> None:
        """Write a document's states to its positions in the sequence."""
        states = self.servers.states(piece)
        into.hidden[0, piece.span] = states[:, self.servers.ids.layers].to(into.hidden.dtype)
        into.last_hidden[0, piece.span] = states[:, self.servers.ids.last].to(into.last_hidden.dtype)

    def _whole(self, sequence: ArrivingSequence) -> States:
        """Wait for a sequence's states and return them on the device."""
        begin = time.perf_counter()
        try:
            for document in sequence.documents:
                document.result()
        except EndpointError as failure:
            raise ValueError(
                f"{', '.join(self.servers.urls)}: {failure.cause} ({failure.detail}), so sequence "
                f"{sequence.sequence_index} has no states; start the server again, and resume=true goes on"
            ) from failure
        finally:
            self.stall += time.perf_counter() - begin
        self.served += 1
        hidden, last = (to_device(states, self.device) for states in sequence.states)
        return States(hidden, normed(last, self.norm).to(self.request.dtype))
