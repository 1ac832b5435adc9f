"""Text of prompts and answers: user turns, reasoning, round trips through the tokenizer."""

from transformers import PreTrainedTokenizerBase

from data.text.records import Message
from data.text.template import encode, turn_end_tokens

OPEN, CLOSE = "<think>", "</think>"


def turns_of(messages: list[Message]) -> list[list[Message]]:
    """Return the messages before each answer, a user's among them; answers and tool results are left out."""
    turns: list[list[Message]] = []
    turn: list[Message] = []
    for message in [*messages, {"role": "assistant"}]:
        if message["role"] not in ("assistant", "tool"):
            turn.append(message)
        elif any(earlier["role"] == "user" for earlier in turn):
            turns.append(turn)
            turn = []
    return turns


def split_reasoning(text: str) -> tuple[str, str]:
    """Split a text into the reasoning of a think block, which the template may have opened, and the answer."""
    if CLOSE not in text and not text.lstrip().startswith(OPEN):
        return "", text
    reasoning, _, answer = text.partition(CLOSE)
    return reasoning.lstrip().removeprefix(OPEN).strip("\n"), answer.lstrip("\n")


def round_trips(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text survives encoding and decoding, outer blanks aside, and holds no special token."""
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
