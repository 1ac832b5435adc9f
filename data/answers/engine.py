"""Answers by our engine: a continuous batch over chats, with or without a drafter.

The rule is `coupled` at every temperature: a token is a function of the preceding tokens and the request's seed,
independent of drafts and batch, and its distribution is the target's (arXiv 2408.07978). The batch only affects
rounding, which may flip a near tie.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from data.answers.chats import AnswerSettings, OngoingChat, Outcome, Reply
from data.text.records import LoggedAnswer
from heads.common.progress import update_bar
from heads.formats.hub import resolve_head
from inference.batch import batch_of
from inference.drafters.head import load_drafter, saved_trees
from inference.drafters.plain import Baseline
from inference.drafters.registry import configured, make
from inference.protocol import Drafter
from inference.request import Generation, RequestParams
from inference.target.target import Target, check_prompt
from inference.target.tokenizer import UNFINISHED
from inference.verification.rules import COUPLED
from inference.verification.sample import Sampling

Options = Mapping[str, Any]  # of a drafter, or of a tree
Answering = tuple[OngoingChat, list[int], Generation]  # with the prompt's tokens and the answer being decoded


class Engine:
    """An answerer that decodes `batch_size` chats at a time with our engine."""

    def __init__(self, target: Target, drafter: Drafter, settings: AnswerSettings, batch_size: int) -> None:
        if not target.eos and not settings.keep_unfinished:
            raise ValueError("the target has no end token, so no answer ever ends; set keep_unfinished=true")
        self.target, self.settings = target, settings
        self.tokenizer: PreTrainedTokenizerBase = target.tokenizer
        self.context = target.max_model_len
        self.sampling = Sampling(settings.temperature, 0, settings.top_p)
        self.batch = batch_of(target, drafter, batch_size)
        self.tokens = 0  # number of tokens of finished answers

    def answer(self, chats: Iterable[OngoingChat]) -> Iterator[Outcome]:
        """Answer all chats; the next turn of a running chat comes before a new chat."""
        source, waiting = iter(chats), deque[OngoingChat]()
        answering = []
        while True:
            while self.batch.free:
                chat = waiting.popleft() if waiting else next(source, None)
                if chat is None:
                    break
                token = chat.ask()
                if token is not None:
                    try:
                        check_prompt(self.target, token)
                    except ValueError:  # the tokenizer may have tokens beyond the target's embedding
                        chat.cause, token = "refused", None
                if token is None:
                    yield chat.outcome()
                    continue
                request = RequestParams(self.settings.max_new_tokens, self.sampling, seed=chat.seed(), rule=COUPLED)
                with torch.inference_mode():
                    answering.append((chat, token, self.batch.admit(0, token, request)))
                self._release(answering, waiting)
            if not answering:
                return
            with torch.inference_mode():
                self.batch.step()
            update_bar(f"{self.tokens + sum(len(generation.tokens) for *_, generation in answering):,} tokens")
            self._release(answering, waiting)

    def describe(self) -> dict[str, Any]:
        """Return the target's specification and dtype, without its name."""
        spec = {key: value for key, value in asdict(self.target.spec).items() if key != "name"}
        return {"by": "engine", "target": {**spec, "dtype": str(self.target.dtype)}}

    @torch.inference_mode()
    def _release(self, answering: list[Answering], waiting: deque[OngoingChat]) -> None:
        """Pass finished answers to their chats and free their slots."""
        for chat, prompt, generation in [entry for entry in answering if entry[2].finish_reason]:
            finished = generation.finish_reason == "eos"
            token = generation.tokens[:-1] if finished else generation.tokens
            text = str(self.tokenizer.decode(token, clean_up_tokenization_spaces=False))
            logged = LoggedAnswer(prompt, generation.tokens) if self.settings.save_tokens else None
            chat.take(Reply(text if finished else text.rstrip(UNFINISHED), finished, token=tuple(token), logged=logged))
            waiting.append(chat)
            self.tokens += len(generation.tokens)
        answering[:] = [entry for entry in answering if not entry[2].finish_reason]
        self.batch.release()


def check_drafter(options: Options, run: str | None, tree: Options) -> tuple[str, Any]:
    """Return the configured drafter's name and options, checked without loading the target.

    Args:
        options: the configuration's `drafter`: one drafter's name, and its options.
        run: the folder or Hub id of a head that drafts.
        tree: the head's tree, where None takes the saved value.

    Raises:
        ValueError: no drafter or several, an unknown drafter, a run without a head, or both a run and another drafter.
    """
    if len(options) != 1:
        raise ValueError(f"drafter={list(options)}: one source drafts the answers; name one, or plain for none")
    ((name, values),) = options.items()
    if name == "head" and run is None:
        raise ValueError("run is missing: drafter=head needs run=outputs/NAME")
    if run is not None:
        if name not in ("plain", "head"):
            raise ValueError(f"run={run} has its head draft, and drafter={name} another source: give one of the two")
        saved_trees(resolve_head(run), tree)
    elif name != "plain":
        configured(name, values)
    return name, values


def drafter_of(options: Options, run: str | None, tree: Options, target: Target) -> Drafter:
    """Load the configured drafter for a target, after `check_drafter`; refuse a head of another target."""
    name, values = check_drafter(options, run, tree)
    if run is None:
        return Baseline(target.device) if name == "plain" else make(name, values, target)
    return load_drafter(resolve_head(run), tree, target, "head")
