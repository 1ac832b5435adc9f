"""Features from vLLM servers, computed during training.

The servers run vLLM's `extract_hidden_states` method, one request per document, and write the states to files in shared
memory, which are removed after reading. Documents of the next micro-batches are requested in order, at most
`features.endpoint.concurrency` at a time. Replies may arrive in any order.

The `ExampleHiddenStatesConnector` writes one safetensors file per request, `token_ids` [tokens] and `hidden_states`
[tokens, layer ids, width], and holds a lock on FILE.lock while it writes (vLLM 0.32:
vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py). The layer ids are those with which
vLLM was started, in that order. Id 0 is the input of the first decoder layer and id i the output of layer i - 1, so our
layer i is its i + 1. The id equal to the number of layers is the last layer's output before the final norm.
"""

import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from data.answers.client import Client, EndpointError
from data.batches import Batch, Batches, Packed
from data.features.source import FeaturesConfig, ReadAhead
from data.features.store import FeatureRequest, States
from data.text.streams import at
from heads.base import Embeddings, Features, Layers, to_device
from heads.common.untrusted import inside, regular
from heads.formats.published.plan import as_states
from heads.shapes import Sequences
from inference.target.attention import spans_of

SETUP = "start vLLM as docs/data_features.md has it"
NEAR = 0.5  # how far the logit of a server's token may be below our largest, in standard deviations
TOKENS, STATES = "token_ids", "hidden_states"
FLOATS = torch.bfloat16, torch.float16, torch.float32
LOCK = ".lock"  # suffix of a lock file
PAUSE = 0.002  # seconds between checks of a lock


class Piece(NamedTuple):
    """A document of a packed sequence: the sequence's index, the document's first position there, and its tokens."""

    sequence_index: int
    start: int
    token: tuple[int, ...]

    @property
    def span(self) -> slice:
        """Its positions in the sequence."""
        return slice(self.start, self.start + len(self.token))


def pieces(packed: Packed, index: int) -> Iterator[Piece]:
    """Yield the documents of a packed sequence."""
    token, document = packed.token[index].tolist(), packed.document[index]
    for _, begin, end in spans_of(document[None]):
        if document[begin] >= 0:
            yield Piece(index, begin, tuple(token[begin:end]))


class LayerIds(NamedTuple):
    """The layer ids that vLLM was started with: their number, and the indices of feature layers and last state."""

    size: int
    layers: list[int]
    last: int

    @classmethod
    def of(cls, ids: list[int], layers: Layers, num_layers: int) -> "LayerIds":
        """Find our layers among vLLM's ids; refuse ids that lack one of them."""
        states = as_states(layers)
        needed = list(dict.fromkeys([*states, num_layers]))
        if missing := [layer_id for layer_id in needed if layer_id not in ids]:
            raise ValueError(
                f"features.vllm_layers is {ids}, without {missing}: feature layer i is vLLM's id i + 1, and "
                f"{num_layers} is the last state; start vLLM with eagle_aux_hidden_state_layer_ids={needed}"
            )
        return cls(len(ids), [ids.index(state) for state in states], ids.index(num_layers))

    def check(self, states: Tensor, tokens: int, width: int, where: object) -> None:
        """Refuse states of a document with another shape, or quantised states."""
        if states.shape != (tokens, self.size, width) or states.dtype not in FLOATS:
            raise ValueError(
                f"{where}: hidden states of shape {list(states.shape)} in {states.dtype}, not "
                f"{[tokens, self.size, width]} (tokens, layer ids, width) in 16 or 32 bits; check features.vllm_layers "
                "and the target, and let vLLM write it again, by its ExampleHiddenStatesConnector"
            )


def normed(last: Float[Tensor, "*n D"], norm: nn.Module) -> Float[Tensor, "*n D"]:
    """Return last hidden states after the final norm, on the norm's device and in its dtype."""
    weight: Any = norm.weight
    with torch.no_grad():
        states: Tensor = norm(last.to(weight.device, weight.dtype))
    return states


def read_tensors(file: Path, seconds: float, *names: str) -> list[Tensor]:
    """Wait at most `seconds` for a file that vLLM writes, and return its tensors; refuse a damaged file."""
    deadline = time.monotonic() + seconds
    try:
        while not _is_written(file):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not written within {seconds:g} s")
            time.sleep(PAUSE)
        with safe_open(regular(file), "pt") as opened:
            return [opened.get_tensor(name) for name in names]
    except (OSError, SafetensorError, IndexError, TypeError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: not a hidden-state file of vLLM ({reason}); remove it, or write it again") from error


def _is_written(file: Path) -> bool:
    """Return whether vLLM has released the file's lock, or the file exists without a lock."""
    try:
        with lock_of(file).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return file.exists()
    except BlockingIOError:
        return False
    return True


def lock_of(file: Path) -> Path:
    """Return the lock file that vLLM holds while it writes a file."""
    return file.with_name(file.name + LOCK)


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
        """Send no request yet; call `check` first."""
        self.endpoint, self.ids, self.width = config.endpoint, ids, width
        key = os.environ.get(self.endpoint.api_key_env)
        self.clients = [Client(url, self.endpoint, key, "features.url", "features.endpoint") for url in config.url]
        self.urls = [client.url for client in self.clients]
        self.folder = Path(str(config.vllm))  # where the servers write, as a path on this machine
        self.has_read = False  # whether a file was found in it
        self.models: list[str] = []  # the names under which the servers serve the target
        self.name = (
            f"headstart-{uuid.uuid4().hex}"  # the prefix of each request's name, which becomes part of its file's name
        )

    def check(self, longest: Piece, norm: nn.Module, embeddings: Embeddings) -> None:
        """Check every server with the longest document.

        Raises:
            ValueError: a server does not answer, rejects such a document, writes its states elsewhere or writes others,
                or serves another target: its next token is not the one that our norm and lm_head expect.
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
                    f"{client.url}: {model} predicts another next token than this target from its last state: "
                    "give its own model.path, and features.vllm_layers in the order that vLLM was started with"
                )

    def states(self, piece: Piece) -> Float[Tensor, "T L D"]:
        """Return the states of a document, in the order of vLLM's layer ids.

        Raises:
            EndpointError: every attempt failed; each goes to the next server.
            ValueError: the server refuses the request, or returned another document's states.
        """
        states, _ = self.clients[0].retried(lambda n: self._ask(piece, piece.sequence_index + n), self.endpoint.retries)
        return states

    def sweep(self) -> None:
        """Remove files that arrived after their requests had failed."""
        for file in self.folder.glob(f"*{self.name}*"):
            _remove(file)

    def _ask(self, piece: Piece, number: int, *, shows_token: bool = False) -> tuple[Float[Tensor, "T L D"], Any]:
        """Return the states of a document, and on request the server's next token."""
        turn = number % len(self.clients)
        body = {
            "model": self.models[turn], "prompt": piece.token, "max_tokens": 1, "temperature": 0.0,
            "request_id": f"{self.name}-{uuid.uuid4().hex}", "return_token_ids": shows_token, **self.endpoint.extra,
        }  # fmt: skip
        reply = self.clients[turn].once("POST", "/completions", body)
        path = at(reply, "kv_transfer_params/hidden_states_path")
        if not isinstance(path, str):
            raise ValueError(f"features.vllm={self.folder}: a server's answer names no file of hidden states; {SETUP}")
        file = inside(self.folder, Path(path).name)
        if not (self.has_read or file.exists() or lock_of(file).exists()):
            raise ValueError(f"features.vllm={self.folder}: a server has written {path}, which is not there; {SETUP}")
        try:
            token, states = read_tensors(file, self.endpoint.timeout, TOKENS, STATES)
            self.has_read = True
        except ValueError as error:
            raise EndpointError("file", str(error), retry=True) from error
        finally:
            _remove(file)
            _remove(lock_of(file))
        where = f"{self.urls[turn]}: sequence {piece.sequence_index} from position {piece.start} on"
        if token.tolist() != list(piece.token):
            raise ValueError(f"{where}: the states that it sent are those of other tokens; {SETUP}")
        self.ids.check(states, len(piece.token), self.width, where)
        with suppress(LookupError, TypeError):
            return states, reply["choices"][0]["token_ids"][0]
        return states, None


# A packed sequence's index, its states on the host, the last one before the final norm, and its pending documents.
PendingSequence = tuple[int, States, list[Future[None]]]


class ServedFeatures(ReadAhead[list[PendingSequence]]):
    """The features of a run, from checked servers."""

    def __init__(
        self, servers: VllmServers, batches: Batches, request: FeatureRequest, norm: nn.Module, device: torch.device,
        ahead: int,
    ) -> None:  # fmt: skip
        super().__init__(batches, request, device, ahead)
        self.servers, self.norm = servers, norm
        self.served = 0  # number of finished sequences
        self._pool = ThreadPoolExecutor(servers.endpoint.concurrency)

    def begin(self, batch: Batch) -> list[PendingSequence]:
        """Request a micro-batch's documents."""
        length, width, pin = self.batches.packed.token.shape[1], self.servers.width, self.device.type == "cuda"
        zeros, pending = partial(torch.zeros, dtype=self.request.dtype, pin_memory=pin), []
        for index in batch.index.clamp_min(0).tolist():  # -1 pads with the first sequence
            states = States(zeros(1, length, len(self.request.layers), width), zeros(1, length, width))
            documents = [self._pool.submit(self._fetch, piece, states) for piece in pieces(self.batches.packed, index)]
            pending.append((index, states, documents))
        return pending

    def finish(self, token: Sequences, document: Sequences, job: list[PendingSequence]) -> Features:
        """Wait for a micro-batch's states and return its features."""
        hidden, last = (torch.cat(parts) for parts in zip(*map(self._whole, job), strict=True))
        return Features(token, hidden, last, document)

    def close(self) -> str:
        """Stop, remove files that still arrive, and return a line with the number of sequences."""
        self.servers.clients[0].stop.set()  # ends the pauses before retries
        self._pool.shutdown(cancel_futures=True)
        self.servers.sweep()
        return f"features: {self.served} sequences served"

    def _fetch(self, piece: Piece, into: States) -> None:
        """Write a document's states to its positions in the sequence, in the sequence's dtype."""
        states = self.servers.states(piece)
        into.hidden[0, piece.span] = states[:, self.servers.ids.layers]
        into.last_hidden[0, piece.span] = states[:, self.servers.ids.last]

    def _whole(self, sequence: PendingSequence) -> States:
        """Wait for a sequence's states and return them on the device."""
        sequence_index, arrived, documents = sequence
        begin = time.perf_counter()
        try:
            for document in documents:
                document.result()
        except EndpointError as failure:
            raise ValueError(
                f"{', '.join(self.servers.urls)}: {failure.cause} ({failure.detail}), so sequence "
                f"{sequence_index} has no states; start the server again, and resume=true continues"
            ) from failure
        finally:
            self.stall += time.perf_counter() - begin
        self.served += 1
        hidden, last = (to_device(states, self.device) for states in arrived)
        return States(hidden, normed(last, self.norm).to(self.request.dtype))
