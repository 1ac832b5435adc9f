"""A target's reasoning before its answer: a field of a message, or the block that its text begins with."""

import re

from data.text.records import REASONING, Message, content_text

OPEN = r"(?:<think>|\[THINK\]|<\|START_THINKING\|>|<seed:think>)"
CLOSE = r"(?:</think>|\[/THINK\]|<\|END_THINKING\|>|</seed:think>)"
EMPTY = re.compile(rf"\s*{OPEN}\s*{CLOSE}\s*")
EMPTY_REST = re.compile(rf"\s*{CLOSE}\s*")
BLOCK = re.compile(rf"\s*{OPEN}.*?{CLOSE}\s*", re.DOTALL)
REST = re.compile(rf".*?{CLOSE}\s*", re.DOTALL)
ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?:<\|start\|>assistant)?", re.DOTALL)
THINK, THOUGHT = "<think>", "</think>"  # the one block that servers leave in an answer
OPENED = re.compile(rf"{OPEN}\s*\Z")


def reasoning_of(message: Message) -> str:
    """Return the reasoning that comes with an answer, empty if none does."""
    field = next((str(message[name]) for name in REASONING if message.get(name)), "")
    block = BLOCK.match(message["content"]) if isinstance(message["content"], str) else None
    return field or (re.sub(rf"{OPEN}|{CLOSE}", "", block[0]) if block else "")


def under_all_names(message: Message) -> Message:
    """Return the message with its reasoning under each name that templates look for."""
    field = next((message[name] for name in REASONING if message.get(name)), None)
    return message if field is None else {**message, "reasoning_content": field, "thinking": field}


def without(message: Message) -> Message:
    """Return the message without its reasoning, be it a field or the block that its content begins with."""
    answer = {key: value for key, value in message.items() if key not in REASONING}
    if message["role"] == "assistant" and isinstance(answer["content"], str) and BLOCK.match(answer["content"]):
        answer["content"] = BLOCK.sub("", answer["content"], count=1)
    return answer


def is_empty(message: Message) -> bool:
    """Whether an answer has neither text nor tool calls nor reasoning."""
    text = content_text(without(message)) + reasoning_of(message)
    return not (text.strip() or message.get("tool_calls"))


def skip(text: str, start: int, end: int, cut: bool) -> int:
    """Return where training starts in the answer text[start:end].

    A block without reasoning is the template's, not the target's: servers put it into the prompt to switch thinking
    off. With `cut`, blocks with reasoning go too: some templates write them from other fields.
    """
    opened = OPENED.search(text, 0, start) is not None
    patterns = [EMPTY_REST if opened else EMPTY]
    if cut:
        patterns += [REST if opened else BLOCK, ANALYSIS]
    return next((match.end() for pattern in patterns if (match := pattern.match(text, start, end))), start)


def close_prompt(prompt: str) -> str:
    """Return a generation prompt without the reasoning block that it opens."""
    return OPENED.sub("", prompt)


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Split a text into the reasoning of a think block, which it begins with or its prompt opened, and the answer.

    Where there is no such block, an end of one is the answer's own: it may quote it.
    """
    if not text.lstrip().startswith(THINK) and not (opened and THOUGHT in text):
        return "", text
    reasoning, _, answer = text.partition(THOUGHT)
    return reasoning.lstrip().removeprefix(THINK).strip("\n"), answer.lstrip("\n")
