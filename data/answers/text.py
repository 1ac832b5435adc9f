"""The text of chats and answers: a chat's turns, an answer's reasoning, and the text that survives tokenising."""

from transformers import PreTrainedTokenizerBase

from data.text.records import Message
from data.text.template import encode, turn_end_tokens

OPEN, CLOSE = "<think>", "</think>"


def turns_of(messages: list[Message]) -> list[list[Message]]:
    """Return the messages before each answer, a user's message in each; answers and tool results are left out."""
    turns: list[list[Message]] = []
    open_: list[Message] = []
    for message in [*messages, {"role": "assistant"}]:
        if message["role"] not in ("assistant", "tool"):
            open_.append(message)
        elif any(earlier["role"] == "user" for earlier in open_):
            turns.append(open_)
            open_ = []
    return turns


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning in a think block and the answer behind it; some templates open the block themselves."""
    if CLOSE not in text and not text.lstrip().startswith(OPEN):
        return "", text
    reasoning, _, answer = text.partition(CLOSE)
    return reasoning.lstrip().removeprefix(OPEN).strip("\n"), answer.lstrip("\n")


def round_trips(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer gives a text back as it is, outer blanks aside, and reads no special token in it."""
    if not is_text(text, tokenizer):
        return False
    (token,) = encode([text], tokenizer)
    return str(tokenizer.decode(token, clean_up_tokenization_spaces=False)).strip() == text.strip()


def is_text(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a string has no half of a surrogate pair, and the tokenizer reads no special token in it."""
    try:
        (token,) = encode([text], tokenizer)
    except UnicodeEncodeError:
        return False
    return not turn_end_tokens(tokenizer) & set(token)
