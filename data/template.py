"""The tokenizer's side of a text: its chat template, its encoding, and the tokens that end a turn."""

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.records import Message

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TEMPLATE_DATE = "26 Jul 2024"  # Llama 3's own default; without it a resumed run would see the new day's tokens
NOTHING: Mapping[str, Any] = MappingProxyType({})


def is_tagged(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template marks its answers by {% generation %}."""
    return GENERATION.search(tokenizer.get_chat_template()) is not None


def render(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    generation_prompt: bool,
    options: Mapping[str, Any] = NOTHING,
) -> str:
    """Return the chat in the template's words, ready for the target's answer if `generation_prompt`.

    `options` are further values for the template, such as `tools` or `enable_thinking`.
    """
    values = {"date_string": TEMPLATE_DATE, **options}
    return str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt, **values)
    )


def render_tagged(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the chat's tokens, and 1 for each inside a {% generation %} block of the template, else 0."""
    made: Any = tokenizer.apply_chat_template(
        messages,
        return_assistant_tokens_mask=True,
        return_dict=True,
        date_string=TEMPLATE_DATE,
        tokenizer_kwargs={"verbose": False},
    )
    return list(made["input_ids"]), list(made["assistant_masks"])


def encode(rendered: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of rendered chats, which hold their special tokens already."""
    encoded: Any = tokenizer(rendered, add_special_tokens=False, verbose=False)
    return list(encoded["input_ids"])


def encode_plain(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of running text, with the special tokens that the tokenizer begins it with."""
    encoded: Any = tokenizer(text, verbose=False)
    return list(encoded["input_ids"])


@lru_cache(maxsize=8)
def turn_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special tokens, any of which may end a turn; the unknown one stands for words, and ends none."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    unknown = {tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    return frozenset((added | set(tokenizer.all_special_ids)) - unknown)
