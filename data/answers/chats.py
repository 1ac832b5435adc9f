"""The state of a chat that is being answered: the user's turns with the target's answers in between.

Our engine and an endpoint use the same class, so both save, refuse and count the same text.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from data.text.masks import OPENED, THOUGHT, is_plain, split_reasoning
from data.text.parts import Message, Messages
from data.text.prompts import Prompt, prompt_of
from data.text.records import LoggedAnswer, Record
from data.text.template import encode, render, turn_end_tokens, with_opening
from heads.common.typed import Amount, Count, Json, Number, Share
from inference.target.tokenizer import UNFINISHED, RenderError
from inference.verification.rng import hashed

FIXED = ("messages", "tools", "add_generation_prompt")  # template values that the chat itself sets

# Why a chat ends early. A chat without an answer is left out.
CAUSES = {
    "context": "the next prompt leaves no room for max_new_tokens in the context",
    "unfinished": "max_new_tokens cut the answer off",
    "refused": "the chat template, the tokenizer or the target refuses the messages",
    "empty": "the answer is empty",
    "round_trip": "the tokenizer does not give the answer's text back, or reads a special token in it",
    "called": "the answer calls a tool, and no tool is there to reply",
    "no_question": "it has no message of a user, and is no text",
}


@dataclass(frozen=True)
class AnswerSettings:
    """The settings of the target's answers (top_p: Holtzman et al., 2020); conf/data.yaml explains the keys."""

    temperature: Amount
    top_p: Share
    max_new_tokens: Count
    keep_unfinished: bool
    save_tokens: bool
    seed: Number
    thinking: bool | None
    template_args: Json | None

    def options(self, tokenizer: PreTrainedTokenizerBase) -> Json:
        """Return the chat template's extra values; refuse a value that the template does not read."""
        thinking = {} if self.thinking is None else {"enable_thinking": self.thinking}
        options = {**thinking, **(self.template_args or {})}
        template = tokenizer.get_chat_template() if options and tokenizer.chat_template else ""
        for key in options:
            if key in FIXED or not re.search(rf"\b{re.escape(key)}\b", template):
                raise ValueError(
                    f"{'thinking' if key in thinking else f'template_args.{key}'}: the chat template of "
                    f"{tokenizer.name_or_path} reads no {key}; leave it out, or name the switch that it has: "
                    "template_args={NAME: VALUE}"
                )
        return options


class Reply(NamedTuple):
    """The target's reply in its parts; `finished` says whether it has an end token.

    `logged` holds all tokens of prompt and answer, EOS tokens included, if the settings request them.
    """

    text: str
    finished: bool
    reasoning: str = ""
    tool_calls: tuple[Any, ...] = ()
    token: tuple[int, ...] = ()
    logged: LoggedAnswer | None = None


class Outcome(NamedTuple):
    """The outcome of a chat."""

    id: str  # the record's id
    chat: Json | None  # the record to train on; None if it is left out
    answers: int = 0  # number of answers in the chat
    cause: str = ""  # why the chat ends early: a key of CAUSES or an answerer's failure; empty for a complete chat
    failed: bool = False  # whether the answerer failed; a later call then answers the chat again
    detail: str = ""  # the message of the failure


class OngoingChat:
    """A record that is being answered: call `ask` and `take` in turn until `ask` returns None, then `outcome`."""

    def __init__(
        self, record: Record, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings, context: int
    ) -> None:
        self.record, self.id, self.tokenizer, self.settings = record, record.id, tokenizer, settings
        self.max_prompt = context - settings.max_new_tokens
        self.cause = ""
        self.answers = 0
        self.chat: Json = {}  # the record to train on, up to the last answer
        self.logged: list[LoggedAnswer] = []

    def ask(self) -> list[int] | None:
        """Return the tokens of the next prompt; None after the last one."""
        token = None if self.cause else self.next_prompt()
        if token is not None and len(token) > self.max_prompt:
            self.cause, token = "context", None
        return token

    def take(self, reply: Reply) -> None:
        """Add the answer, or set the cause for which the record ends."""
        if not reply.finished:
            self.cause = "unfinished"
        if (reply.finished or self.settings.keep_unfinished) and self.add(reply):
            self.logged += [reply.logged] if reply.logged else []
            self.answers += 1

    def next_prompt(self) -> list[int] | None:
        """Return the tokens of the next prompt, without a limit of length; None after the last one."""
        raise NotImplementedError

    def add(self, reply: Reply) -> bool:
        """Add a reply's answer to `chat` and return True, or set the cause and return False."""
        raise NotImplementedError

    def outcome(self) -> Outcome:
        """Return the record up to its last answer."""
        tokens = {"tokens": [answer._asdict() for answer in self.logged]} if self.logged else {}
        return Outcome(
            self.id, {"id": self.id, **self.chat, **tokens} if self.answers else None, self.answers, self.cause
        )

    def seed(self) -> int:
        """Return the seed of the next answer."""
        return hashed(f"{self.settings.seed} {self.id} {self.answers}")


class Conversation(OngoingChat):
    """A chat. Recorded answers and tool results are dropped, system prompts and tool definitions stay."""

    def __init__(
        self, record: Record, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings, context: int
    ) -> None:
        super().__init__(record, tokenizer, settings, context)
        self.tools, self.options = list(record.tools), settings.options(tokenizer)
        self.turns = deque(turns_of(with_opening(record.messages, tokenizer, record.tools)))
        self.cause = "" if self.turns else "no_question"
        self.prompt: Messages = []  # messages up to the current turn
        self.opened = False

    def next_prompt(self) -> list[int] | None:
        """Return the tokens of the chat with the next turn."""
        if not self.turns:
            return None
        self.prompt = self.chat.get("messages", []) + self.turns.popleft()
        try:
            rendered = render(self.prompt, self.tokenizer, True, self.tools, self.options)
            rendered.encode()  # refuses lone surrogates
        except (RenderError, UnicodeEncodeError):  # a template is a program, so it may fail
            self.cause = "refused"
            return None
        self.opened = OPENED.search(rendered) is not None
        return encode([rendered], self.tokenizer)[0]

    def add(self, reply: Reply) -> bool:
        """Add the answer as a message."""
        reasoning, text = reply.reasoning, reply.text
        if not reasoning:
            reasoning, text = split_reasoning(text, self.opened)
        if self.opened and not (reasoning or reply.finished or THOUGHT in reply.text):
            reasoning, text = text, ""  # cut off in reasoning that the template opened
        if not (text.strip() or reply.tool_calls or (reasoning.strip() and not reply.finished)):
            self.cause = self.cause or "empty"
            return False
        calls = [json.dumps(call, ensure_ascii=False) for call in reply.tool_calls]
        readable = all(round_trips(piece, self.tokenizer) for piece in (text, reasoning))
        if not readable or not all(round_trips(call, self.tokenizer, exact=False) for call in calls):
            self.cause = "round_trip"
            return False
        message: Message = {"role": "assistant", "content": text}
        if reasoning.strip():
            message["reasoning_content"] = reasoning
        if not reply.finished:
            message["finish_reason"] = "length"
        if reply.tool_calls:
            message["tool_calls"] = list(reply.tool_calls)
            self.cause = self.cause or ("called" if self.turns else "")
        self.chat = {"messages": [*self.prompt, message]} | ({"tools": self.tools} if self.tools else {})
        return True


class Document(OngoingChat):
    """A plain text whose first half the target continues, or a chat's first question without a chat template."""

    prompt: Prompt | None = None

    def next_prompt(self) -> list[int] | None:
        """Return the prompt, once."""
        if self.prompt is not None:
            return None
        try:
            self.prompt = prompt_of(self.record, self.tokenizer)
        except ValueError:
            has_text = self.record.text.strip() or turns_of(self.record.messages)
            self.cause = "refused" if has_text else "no_question"
            return None
        return self.prompt.token

    def add(self, reply: Reply) -> bool:
        """Add the continuation; with a chat template only the whole text, so that readers see no chat."""
        assert self.prompt is not None
        # Decoded together: many tokenizers drop the space before a text's first word.
        text = str(self.tokenizer.decode([*self.prompt.token, *reply.token], skip_special_tokens=True))
        if not reply.text.strip():
            self.cause = self.cause or "empty"
            return False
        if not round_trips(reply.text, self.tokenizer):
            self.cause = "round_trip"
            return False
        self.chat = {} if self.tokenizer.chat_template else {"prompt": self.prompt.text, "answer": reply.text}
        self.chat["text"] = text if reply.finished else text.rstrip(UNFINISHED)
        if not reply.finished:
            self.chat["finish_reason"] = "length"
        return True


def start_chat(
    record: Record, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings, context: int
) -> OngoingChat:
    """Return the state for answering a record: a document or a conversation."""
    plain = is_plain(record, tokenizer) or not tokenizer.chat_template
    return (Document if plain else Conversation)(record, tokenizer, settings, context)


@runtime_checkable
class Answerer(Protocol):
    """An answerer; chats are rendered for its tokenizer and its context (in tokens)."""

    tokenizer: PreTrainedTokenizerBase
    context: int

    def answer(self, chats: Iterable[OngoingChat]) -> Iterator[Outcome]:
        """Answer all records, several at a time, and yield the outcomes as they finish."""

    def describe(self) -> Json:
        """Return the settings that affect the answers, for their provenance."""


def turns_of(messages: Messages) -> list[Messages]:
    """Return the messages before each answer, without the answers and tool results themselves."""
    turns: list[Messages] = []
    turn: Messages = []
    for message in [*messages, {"role": "assistant"}]:
        has_question = any(earlier["role"] == "user" for earlier in turn)
        if message["role"] not in ("assistant", "tool") or not (has_question or turns):
            turn.append(message)
        elif has_question:
            turns.append(turn)
            turn = []
    return turns


def round_trips(text: str, tokenizer: PreTrainedTokenizerBase, *, exact: bool = True) -> bool:
    """Return whether a text has no lone surrogates and special tokens, and survives encoding but for outer spaces."""
    try:
        (token,) = encode([text], tokenizer)
    except UnicodeEncodeError:
        return False
    decoded = str(tokenizer.decode(token, clean_up_tokenization_spaces=False)) if exact else text
    return decoded.strip() == text.strip() and not turn_end_tokens(tokenizer) & set(token)
