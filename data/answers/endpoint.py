"""Answers by an OpenAI-compatible endpoint, several chats at a time.

A later call answers failed chats; several consecutive failures stop the job, and finished answers are kept.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.answers.chats import AnswerSettings, Conversation, Outcome, Talk
from data.answers.client import Client, EndpointError, read_reply
from data.text.exact import logged_answers
from heads.common.progress import tick

log = logging.getLogger(__name__)

MOST_FAILURES = 8  # consecutive failures that stop the job
SEEDS = 2**31  # the largest seed that every server accepts
TOKENS = {"return_token_ids": True, "return_prompt_token_ids": True}  # SGLang needs the second in chats


class Endpoint:
    """An answerer that sends chats to a served target."""

    def __init__(self, client: Client, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"by={client.url}: the tokenizer of {tokenizer.name_or_path} has no chat template, and an endpoint "
                "answers chats; give model.path= of the model that is served, or by=engine"
            )
        self.client, self.tokenizer, self.settings = client, tokenizer, settings
        self.template = settings.options(tokenizer)
        self.lock = threading.Lock()  # guards the tokenizer, which is not thread-safe
        self.model, self.context = client.served()

    def answer(self, talks: Iterable[Talk]) -> Iterator[Outcome]:
        """Answer all chats, and yield their outcomes.

        A job that stops, also by Ctrl-C, waits for the requests in flight and keeps the chats that they complete.

        Raises:
            ValueError: too many consecutive chats failed, the endpoint refuses every request, or a record is no chat.
        """
        source, failures = iter(talks), 0
        stopped: ValueError | KeyboardInterrupt | None = None
        with ThreadPoolExecutor(self.client.config.concurrency) as pool:
            running: set[Future[Outcome]] = set()
            try:
                while True:
                    room = 0 if stopped else self.client.config.concurrency - len(running)
                    running |= {pool.submit(self._converse, talk) for talk in islice(source, room)}
                    if not running:
                        break
                    try:
                        done, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                        tick()
                    except KeyboardInterrupt as interrupt:
                        log.warning("stopping: waiting for the %d requests in flight", len(running))
                        done, stopped = set(), interrupt
                    for future in done:
                        if isinstance(error := future.exception(), ValueError):
                            stopped = stopped or error
                            continue
                        outcome = future.result()
                        failures = failures + 1 if outcome.failed else 0
                        yield outcome
                        if failures >= MOST_FAILURES:
                            stopped = stopped or ValueError(
                                f"{self.client.url}: {failures} chats in a row failed, the last one, {outcome.id}, by "
                                f"{outcome.cause} ({outcome.detail}); finished answers are kept: fix the endpoint and "
                                "run the same command again"
                            )
                    if stopped:
                        self.client.stop.set()
            finally:
                self.client.stop.set()
        if stopped:
            raise stopped

    def describe(self) -> dict[str, Any]:
        """Return the names of the served model and tokenizer, and the requests' extra fields."""
        return {
            "by": "endpoint",
            "target": {"served_as": self.model, "tokenizer": self.tokenizer.name_or_path},
            "extra": self.client.config.extra,
        }

    def _converse(self, talk: Talk) -> Outcome:
        """Request every answer of a chat, and return the chat's outcome."""
        if not isinstance(talk, Conversation):
            raise ValueError(f"record {talk.id} is no chat, and an endpoint answers chats; remove it, or use by=engine")
        try:
            while True:
                with self.lock:
                    if talk.ask() is None:
                        return talk.outcome()
                if self.client.stop.is_set():
                    raise EndpointError("stopped", "the job stopped before the chat's end")
                body = {
                    "model": self.model,
                    "messages": talk.prompt,
                    "temperature": self.settings.temperature,
                    "top_p": self.settings.top_p if self.settings.temperature else 1.0,
                    "max_tokens": self.settings.max_new_tokens,
                    "seed": talk.seed() % SEEDS,
                    "n": 1,
                    "stream": False,
                    **({"tools": talk.tools} if talk.tools else {}),
                    **(TOKENS if self.settings.save_tokens else {}),
                    **({"chat_template_kwargs": self.template} if self.template else {}),
                    **self.client.config.extra,
                }
                data = self.client.request("POST", "/chat/completions", body)
                reply = read_reply(data, self.model)
                if self.settings.save_tokens:
                    try:
                        (logged,) = logged_answers(data, "the reply")
                    except ValueError as error:
                        raise EndpointError(
                            "tokens", f"no tokens of prompt and answer ({error}): save_tokens=false, or a newer server"
                        ) from error
                    reply = reply._replace(logged=logged)
                with self.lock:
                    talk.take(reply)
        except EndpointError as failure:
            return Outcome(talk.id, None, 0, failure.cause, True, failure.detail)
