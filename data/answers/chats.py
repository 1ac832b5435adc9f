"""The state of a chat that is being answered: the user's turns with the target's answers in between.

Our engine and an endpoint use the same class, so both keep, refuse and count the same text.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from data.text.masks import OPENED, THOUGHT, is_plain, split_reasoning
from data.text.parts import Message
from data.text.prompts import prompt_of
from data.text.records import LoggedAnswer, Record
from data.text.template import encode, render, turn_end_tokens, with_opening
from heads.common.ranges import Amount, Count, Number, Within
from inference.target.tokenizer import UNFINISHED, RenderError
from inference.verification.rng import hashed

FIXED = ("messages", "tools", "add_generation_prompt")  # the template's values that are the chat's

TopP = Annotated[float, Within(0, 1, above=True)]

# The causes of an early end of a chat. A chat without any answer is left out.
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
    top_p: TopP
    max_new_tokens: Count
    keep_unfinished: bool
    save_tokens: bool
    seed: Number
    thinking: bool | None
    template_args: dict[str, Any] | None

    def options(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the chat template's extra values; refuse one that it does not read."""
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
    """The target's reply in its parts; `finished` if it has an end token.

    `logged` are all tokens of prompt and answer with end tokens, if the settings ask for them.
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
    chat: dict[str, Any] | None  # the record to train on; None if it is left out
    answers: int = 0  # number of answers in the chat
    cause: str = ""  # why the chat ends early, a key of CAUSES or an answerer's failure; empty for a complete chat
    failed: bool = False  # whether the answerer failed: a later call answers the chat again
    detail: str = ""  # the failure's message


class Conversation:
    """A chat that is being answered: `ask` and `take` in turn until `ask` returns None, then `outcome`.

    Recorded answers and tool results are dropped, system prompts and tool definitions stay.
    """

    def __init__(
        self, record: Record, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings, context: int
    ) -> None:
        self.id, self.tools = record.id, list(record.tools)
        self.tokenizer, self.settings = tokenizer, settings
        self.room = context - settings.max_new_tokens
        self.options: Mapping[str, Any] = settings.options(tokenizer)
        self.turns = deque(turns_of(with_opening(record.messages, tokenizer, record.tools)))
        self.cause = "" if self.turns else "no_question"
        self.messages: list[Message] = []  # up to the last answer
        self.prompt: list[Message] = []  # and with the current turn
        self.logged: list[LoggedAnswer] = []
        self.answers, self.opened = 0, False

    def ask(self) -> list[int] | None:
        """Return the tokens of the chat with the next turn; None after the last one."""
        if self.cause or not self.turns:
            return None
        self.prompt = [*self.messages, *self.turns.popleft()]
        try:
            rendered = render(self.prompt, self.tokenizer, True, self.tools, self.options)
            rendered.encode()  # refuses lone surrogates
        except (RenderError, UnicodeEncodeError):  # a template is a program and may fail
            self.cause = "refused"
            return None
        self.opened = OPENED.search(rendered) is not None
        (token,) = encode([rendered], self.tokenizer)
        if len(token) > self.room:
            self.cause = "context"
            return None
        return token

    def take(self, reply: Reply) -> None:
        """Add the answer, or set the cause for which the chat ends before it."""
        reasoning, text = reply.reasoning, reply.text
        if not reasoning:
            reasoning, text = split_reasoning(text, self.opened)
        if self.opened and not (reasoning or reply.finished or THOUGHT in reply.text):
            reasoning, text = text, ""  # cut off in the reasoning that the template opened
        if not reply.finished:
            self.cause = "unfinished"
            if not self.settings.keep_unfinished:
                return
        if not (text.strip() or reply.tool_calls or (reasoning.strip() and not reply.finished)):
            self.cause = self.cause or "empty"
            return
        calls = [json.dumps(call, ensure_ascii=False) for call in reply.tool_calls]
        readable = all(round_trips(piece, self.tokenizer) for piece in (text, reasoning))
        if not readable or not all(is_text(call, self.tokenizer) for call in calls):
            self.cause = "round_trip"
            return
        message: Message = {"role": "assistant", "content": text}
        if reasoning.strip():
            message["reasoning_content"] = reasoning
        if not reply.finished:
            message["finish_reason"] = "length"
        if reply.tool_calls:
            message["tool_calls"] = list(reply.tool_calls)
            self.cause = self.cause or ("called" if self.turns else "")
        self.messages = [*self.prompt, message]
        self.logged += [reply.logged] if reply.logged else []
        self.answers += 1

    def outcome(self) -> Outcome:
        """Return the chat up to its last answer."""
        if not self.answers:
            return Outcome(self.id, None, 0, self.cause)
        chat = {"id": self.id, "messages": self.messages} | ({"tools": self.tools} if self.tools else {})
        chat |= logged(self.logged)
        return Outcome(self.id, chat, self.answers, self.cause)

    def seed(self) -> int:
        """Return the seed of the next answer."""
        return hashed(f"{self.settings.seed} {self.id} {self.answers}")


class Document:
    """A plain text whose first half the target continues, or a chat's first question without a chat template."""

    def __init__(
        self, record: Record, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings, context: int
    ) -> None:
        self.id, self.tokenizer, self.settings = record.id, tokenizer, settings
        self.room = context - settings.max_new_tokens
        self.answer, self.text, self.prompted = "", "", False
        self.ended: dict[str, str] = {}
        self.logged: list[LoggedAnswer] = []
        self.cause = "" if record.text.strip() or turns_of(record.messages) else "no_question"
        try:
            self.prompt = prompt_of(record, tokenizer)
        except ValueError:
            self.cause = self.cause or "refused"

    def ask(self) -> list[int] | None:
        """Return the prompt, once."""
        if self.prompted or self.cause:
            return None
        self.prompted = True
        if len(self.prompt.token) > self.room:
            self.cause = "context"
            return None
        return self.prompt.token

    def take(self, reply: Reply) -> None:
        """Add the continuation, or set the cause for which it is left out."""
        if not reply.finished:
            self.cause = "unfinished"
            if not self.settings.keep_unfinished:
                return
        # Decoded together: many tokenizers drop the space before a text's first word.
        text = str(self.tokenizer.decode([*self.prompt.token, *reply.token], skip_special_tokens=True))
        if not reply.text.strip():
            self.cause = self.cause or "empty"
        elif not round_trips(reply.text, self.tokenizer):
            self.cause = "round_trip"
        else:
            self.answer, self.text = reply.text, text if reply.finished else text.rstrip(UNFINISHED)
            self.logged = [reply.logged] if reply.logged else []
            self.ended = {} if reply.finished else {"finish_reason": "length"}

    def outcome(self) -> Outcome:
        """Return prompt, answer and text; with a chat template only the text, since readers would see a chat."""
        if not self.answer:
            return Outcome(self.id, None, 0, self.cause)
        parts = {} if self.tokenizer.chat_template else {"prompt": self.prompt.text, "answer": self.answer}
        chat = {"id": self.id, **parts, "text": self.text, **self.ended, **logged(self.logged)}
        return Outcome(self.id, chat, 1, self.cause)

    def seed(self) -> int:
        """Return the seed of the answer."""
        return hashed(f"{self.settings.seed} {self.id} 0")


Talk = Conversation | Document


def talk_of(record: Record, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings, context: int) -> Talk:
    """Return the state for answering a record: a document or a conversation."""
    plain = is_plain(record, tokenizer) or not tokenizer.chat_template
    return (Document if plain else Conversation)(record, tokenizer, settings, context)


@runtime_checkable
class Answerer(Protocol):
    """An answerer; chats are rendered for its tokenizer and its context (in tokens)."""

    tokenizer: PreTrainedTokenizerBase
    context: int

    def answer(self, talks: Iterable[Talk]) -> Iterator[Outcome]:
        """Answer all records, several at a time, and yield the outcomes as they finish."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the settings that affect the answers, for their provenance."""
        ...


def logged(answers: list[LoggedAnswer]) -> dict[str, Any]:
    """Return the field of a chat with its answers' tokens; empty without any."""
    return {"tokens": [answer._asdict() for answer in answers]} if answers else {}


def turns_of(messages: list[Message]) -> list[list[Message]]:
    """Return the messages before each answer, without answers and tool results."""
    turns: list[list[Message]] = []
    turn: list[Message] = []
    for message in [*messages, {"role": "assistant"}]:
        has_question = any(earlier["role"] == "user" for earlier in turn)
        if message["role"] not in ("assistant", "tool") or not (has_question or turns):
            turn.append(message)
        elif has_question:
            turns.append(turn)
            turn = []
    return turns


def round_trips(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text survives encoding and decoding, except outer blanks, and has no special token."""
    if not is_text(text, tokenizer):
        return False
    (token,) = encode([text], tokenizer)
    return str(tokenizer.decode(token, clean_up_tokenization_spaces=False)).strip() == text.strip()


def is_text(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a string has no lone surrogate, and the tokenizer finds no special token in it."""
    try:
        (token,) = encode([text], tokenizer)
    except UnicodeEncodeError:
        return False
    return not turn_end_tokens(tokenizer) & set(token)
