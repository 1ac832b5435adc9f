"""Hidden states from vLLM servers that run its `extract_hidden_states` method: a request a document."""

import os
import time
import uuid
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from data.answers.client import Client, EndpointError
from data.features.source import FeaturesConfig
from data.features.vllm_features import LOCKED, LayerIds, Piece, normed
from data.features.vllm_transfer import REQUEST, SETUP, SharedFolder
from heads.base import Embeddings

NEAR = 0.5  # standard deviations by which the logit of a server's own choice may be below the largest, by our lm_head


class VllmServers:
    """Servers of one target; `states` may be called from several threads."""

    def __init__(self, config: FeaturesConfig, ids: LayerIds, width: int) -> None:
        """Ask nothing yet; `check` comes first."""
        self.endpoint, self.ids, self.width = config.endpoint, ids, width
        key = os.environ.get(self.endpoint.api_key_env)
        self.clients = [Client(url, self.endpoint, key, "features.url", "features.endpoint") for url in config.url]
        self.urls = [client.url for client in self.clients]
        self.reader = SharedFolder(Path(str(config.vllm)))
        self.models: list[str] = []  # the names by which the servers serve the target
        self.failures = 0  # documents that have failed one after another
        self._abandoned: dict[str, float] = {}  # when requests were given up whose results may still come

    def check(self, longest: Piece, norm: nn.Module, embeddings: Embeddings) -> None:
        """Ask every server for the longest document.

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
            states, token = self._sample(number, longest)
            logits = embeddings.logits(normed(states[-1, self.ids.last], norm)).float()
            if token not in (logits > logits.max() - NEAR * logits.std()).nonzero().flatten().tolist():
                raise ValueError(
                    f"{client.url}: {model} goes on otherwise than this target would by the last state that it sent: "
                    "give its own model.path, and features.vllm_layers in the order that vLLM was started with"
                )

    def states(self, piece: Piece, *, patient: bool) -> Float[Tensor, "T L D"]:
        """Return the states of a document, in the order of vLLM's layer ids.

        Raises:
            EndpointError: every attempt failed, each at the next server. There is one alone where `max_failures`
                documents have failed one after another, unless the caller is `patient`.
            ValueError: the server refuses the request, or has sent another document's states.
        """
        retries = self.endpoint.retries if patient or self.failures < self.endpoint.max_failures else 0
        try:
            states, _ = self.clients[0].retried(lambda n: self._ask(piece, piece.row + n), retries)
        except EndpointError:
            self.failures += 1
            raise
        self.failures = 0
        return states

    def stop(self) -> None:
        """End the pauses before retries."""
        self.clients[0].stop.set()

    def sweep(self) -> None:
        """Remove the results of requests that were given up, as far as they have come; of old ones none will."""
        swept, now = self.reader.sweep(self._abandoned), time.monotonic()
        for request, given_up in list(self._abandoned.items()):
            if request in swept or now - given_up > LOCKED:
                self._abandoned.pop(request, None)

    def _sample(self, number: int, piece: Piece) -> tuple[Float[Tensor, "T L D"], Any]:
        """Return a document's states and the token that a server puts behind it."""
        client = self.clients[number]
        try:
            return client.retried(lambda _: self._ask(piece, number, shows_token=True), self.endpoint.retries)
        except EndpointError as failure:
            raise ValueError(f"{client.url}: {failure.cause} ({failure.detail}); {SETUP}") from failure

    def _ask(self, piece: Piece, number: int, *, shows_token: bool = False) -> tuple[Float[Tensor, "T L D"], Any]:
        """Return the states of a document, and if asked for the token that one of the servers puts behind it."""
        request, turn = REQUEST + uuid.uuid4().hex, number % len(self.clients)
        body = {
            "model": self.models[turn], "prompt": piece.token, "max_tokens": 1, "temperature": 0.0,
            "request_id": request, "return_token_ids": shows_token, **self.endpoint.extra,
        }  # fmt: skip
        self.sweep()
        try:
            reply = self.clients[turn].once("POST", "/completions", body)
            answer = reply.get("kv_transfer_params")
            token, states = self.reader.read(answer if isinstance(answer, dict) else {}, self.endpoint.timeout)
        except EndpointError:
            self._abandoned[request] = time.monotonic()
            raise
        where = f"{self.urls[turn]}: row {piece.row} from position {piece.start} on"
        if token.tolist() != list(piece.token):
            raise ValueError(f"{where}: the states that it sent are those of other tokens; {SETUP}")
        self.ids.check(states, len(piece.token), self.width, where)
        return states, _next_token(reply)


def _next_token(reply: dict[str, Any]) -> Any:
    try:
        return reply["choices"][0]["token_ids"][0]
    except (LookupError, TypeError):
        return None
