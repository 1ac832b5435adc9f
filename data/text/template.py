"""Chat templates and tokenizers: rendering, encoding, and the tokens that end a turn."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from data.text.parts import Message, Messages, content_text, parsed
from inference.target.tokenizer import RenderError, rendering, tokenize

Span = tuple[int, int]

COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TEMPLATE_DAY = datetime(2024, 7, 26)  # Llama 3's own default; with today's date a resumed run would see other tokens
DATE: dict[str, Any] = {"date_string": TEMPLATE_DAY.strftime("%d %b %Y")}
NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
MEDIA_TOKEN = re.compile(r"image|video|audio|IMG")
NOTHING: Mapping[str, Any] = MappingProxyType({})


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the hash of the chat template, None without a template, so that a later change is noticed."""
    template: Any = tokenizer.chat_template
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def render(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    generation_prompt: bool,
    tools: Sequence[Message] = (),
    options: Mapping[str, Any] = NOTHING,
) -> str:
    """Return the chat as the template renders it, with more values for it in `options`, or raise RenderError."""
    text, _ = _rendered(messages, tokenizer, tools, {**options, "add_generation_prompt": generation_prompt})
    return text


def render_tagged(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message] = ()
) -> tuple[str, list[Span] | None]:
    """Return the chat as `render` does, and the spans of its {% generation %} blocks; None for a template without."""
    is_tagged = _is_tagged(_template(tokenizer, tools))
    return _rendered(messages, tokenizer, tools, {"return_assistant_tokens_mask": is_tagged})


def _rendered(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message], values: Mapping[str, Any]
) -> tuple[str, list[Span] | None]:
    """Render a chat with tool calls' arguments as objects, which transformers documents, or else as JSON text.

    Some templates (DeepSeek-V3) concatenate them with strings. Content in parts is passed as text: a template that only
    knows text would print the list. The tokenizer's method would copy the chat once more.
    """
    template = _template(tokenizer, tools)
    if any(message["role"] == "developer" for message in messages) and not _writes_developer(tokenizer, template):
        messages = [
            {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
        ]

    def call(as_text: bool) -> tuple[str, list[Span] | None]:
        output: Any = render_jinja_template(
            conversations=[[_converted(message, as_text) for message in messages]],
            tools=list(tools) or None,
            chat_template=template,
            **{**tokenizer.special_tokens_map, **DATE, **values},
        )
        (text,), blocks = output
        return text, [(start, end) for start, end in blocks[0]] if blocks else None

    with rendering(tokenizer):
        if not messages:
            raise ValueError("it has no messages before the answer")
        try:
            return call(as_text=False)
        except TypeError:
            return call(as_text=True)


@lru_cache(maxsize=8)
def _writes_developer(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether the chat template renders messages of the role developer; some silently drop them."""
    chat = [{"role": "developer", "content": "WRITTEN"}, {"role": "user", "content": "why"}]
    try:
        with rendering(tokenizer):
            return "WRITTEN" in str(tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, **DATE))
    except RenderError:
        return False


def with_opening(messages: Messages, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message] = ()) -> Messages:
    """Return a chat with the assistant's turns before the first question, if the chat template renders them."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    opening = [message for message in messages[:first] if message["role"] == "assistant"]
    if not opening:
        return messages
    try:
        text = render(messages[: first + 1], tokenizer, True, tools)
    except RenderError:
        text = ""
    if all(content_text(message).strip() in text for message in opening) and text:
        return messages
    return [message for message in messages[:first] if message["role"] != "assistant"] + messages[first:]


def _converted(message: Message, as_text: bool) -> Message:
    converted = {**message, "content": content_text(message)}
    if message.get("tool_calls"):
        converted["tool_calls"] = [_call(call, as_text) for call in message["tool_calls"]]
    return converted


def _call(call: Message, as_text: bool) -> Message:
    function = call.get("function") or call
    given = function.get("arguments") or {}
    if as_text:
        given = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    function = {**function, "arguments": given if as_text else parsed(given)}
    return {**call, "function": function} if call.get("function") else function


def _template(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message]) -> str:
    """Return the template with a constant date instead of calls for the current time, which it cannot be given."""
    return _of_a_day(tokenizer.get_chat_template(tools=list(tools) or None))


@lru_cache(maxsize=8)
def _of_a_day(template: str) -> str:
    return NOW.sub(lambda call: repr(TEMPLATE_DAY.strftime(call[2])), template)


@lru_cache(maxsize=8)
def _is_tagged(template: str) -> bool:
    return GENERATION.search(COMMENT.sub("", template)) is not None


def encode(rendered: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of rendered chats, with their special tokens; raise UnicodeEncodeError at a lone surrogate."""
    encoded: Any = tokenize(tokenizer, rendered, add_special_tokens=False)
    return list(encoded["input_ids"])


@lru_cache(maxsize=8)
def turn_end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special tokens, any of which may end a turn; excluding the unknown token, which replaces words."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    unknown = {tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    return frozenset((added | set(tokenizer.all_special_ids)) - unknown)


@lru_cache(maxsize=1 << 12)
def is_space(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether a token is white space alone."""
    return not str(tokenizer.decode(token)).strip()


@lru_cache(maxsize=8)
def last_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's largest token id."""
    return max(tokenizer.get_vocab().values())


@lru_cache(maxsize=8)
def media_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the special tokens that stand for images or sound, by their ids."""
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {index: text for index, text in added.items() if MEDIA_TOKEN.search(text)}


class Ends(NamedTuple):
    """Patterns of the special tokens that end a turn."""

    turn: re.Pattern[str]  # one of these tokens, after optional whitespace
    text: re.Pattern[str]  # the end token at the end of a text whose last turn has already ended
    rest: re.Pattern[str]  # everything that a template writes after an answer's text: special tokens and whitespace


@lru_cache(maxsize=8)
def ends_of(tokenizer: PreTrainedTokenizerBase) -> Ends:
    """Return a tokenizer's patterns."""
    special = [str(text) for text in tokenizer.convert_ids_to_tokens(sorted(turn_end_tokens(tokenizer)))]
    longest_first = sorted(special, key=len, reverse=True)
    one = rf"(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'})"
    end = re.escape(str(tokenizer.eos_token)) if tokenizer.eos_token else "(?!)"
    patterns = rf"\s*{one}", rf"{one}\s+{end}\Z", rf"(?:\s*{one})*\s*\Z"
    return Ends(*map(re.compile, patterns))
