"""An OpenAI-compatible endpoint as the one who answers: several chats in flight, each turn after turn.

A chat that failed is left for another call; after several in a row the job stops. Nothing that was answered is lost.
"""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.answers.chats import AnswerSettings, Conversation, Outcome, Reply, Talk
from data.answers.client import Client, EndpointError, read_reply

SEEDS = 2**31  # of the seeds that every server takes


class Endpoint:
    """The target behind a URL."""

    def __init__(self, client: Client, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"by={client.url}: the tokenizer of {tokenizer.name_or_path} has no chat template, and an endpoint "
                "answers chats; give model.path= of the model that is served, or by=engine"
            )
        self.client, self.tokenizer, self.settings = client, tokenizer, settings
        self.template = settings.options(tokenizer)
        self.lock = threading.Lock()  # of the tokenizer, which is not for several threads, and of `seen`
        self.seen: set[str] = set()  # ids of replies
        self.model, self.context = client.served()

    def answer(self, talks: Iterable[Talk]) -> Iterator[Outcome]:
        """Answer all chats. Where the job stops, requests in flight are waited for and kept.

        Raises:
            ValueError: too many chats in a row failed, the endpoint refuses every request, or a text is no chat.
        """
        source, in_a_row = iter(talks), 0
        stopped: ValueError | None = None
        with ThreadPoolExecutor(self.client.config.concurrency) as pool:
            running: set[Future[Outcome]] = set()
            try:
                while True:
                    room = 0 if stopped else self.client.config.concurrency - len(running)
                    running |= {pool.submit(self._converse, talk) for talk in islice(source, room)}
                    if not running:
                        break
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        if isinstance(error := future.exception(), ValueError):
                            stopped = stopped or error
                            continue
                        outcome = future.result()
                        in_a_row = in_a_row + 1 if outcome.failed else 0
                        yield outcome
                        if in_a_row >= self.client.config.max_failures:
                            stopped = stopped or self._tired(in_a_row, outcome)
                    if stopped:
                        self.client.stop.set()
            finally:
                self.client.stop.set()
        if stopped:
            raise stopped

    def describe(self) -> dict[str, Any]:
        """Return the model's names there and here, and what else each request says."""
        return {
            "by": "endpoint",
            "target": {"served_as": self.model, "tokenizer": self.tokenizer.name_or_path},
            "extra": self.client.config.extra,
        }

    def _tired(self, in_a_row: int, last: Outcome) -> ValueError:
        return ValueError(
            f"{self.client.url}: {in_a_row} chats in a row failed, the last one, {last.id}, by {last.cause} "
            f"({last.detail}); what was answered is kept: mend the endpoint and run the same command again"
        )

    def _converse(self, talk: Talk) -> Outcome:
        """Ask for every answer of a chat."""
        if not isinstance(talk, Conversation):
            raise ValueError(f"record {talk.id} is no chat, and an endpoint answers chats; remove it, or use by=engine")
        try:
            while True:
                with self.lock:
                    if talk.ask() is None:
                        return talk.outcome()
                reply = self._reply(talk)
                with self.lock:
                    talk.take(reply)
        except EndpointError as failure:
            return Outcome(talk.id, None, 0, failure.cause, True, failure.detail)

    def _reply(self, talk: Conversation) -> Reply:
        body = {
            "model": self.model,
            "messages": talk.asked,
            "temperature": self.settings.temperature,
            "top_p": self.settings.top_p if self.settings.temperature else 1.0,
            "max_tokens": self.settings.max_new_tokens,
            "seed": talk.seed() % SEEDS,
            "n": 1,
            "stream": False,
            **({"tools": talk.tools} if talk.tools else {}),
            **({"chat_template_kwargs": self.template} if self.template else {}),
            **self.client.config.extra,
        }
        data = self.client.request("POST", "/chat/completions", body)
        with self.lock:
            if (number := str(data.get("id"))) in self.seen and data.get("id") is not None:
                raise EndpointError("duplicate", f"a second reply has the id {number}")
            self.seen.add(number)
        return read_reply(data, self.model)
