"""The spans of a chat's answers in the text that the chat template renders."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from data.config import DataConfig
from data.text.reasoning import close_prompt, reasoning_of, skip, under_all_names, without
from data.text.records import Message, Record, content_text
from data.text.template import Span, is_tagged, render, render_tagged, text_end, turn_end

MOST_ANSWERS = 1_000  # of a chat


class BadSampleError(ValueError):
    """A record that no exact mask exists for."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(f"{message}, or set data.on_bad=drop")
        self.cause = cause


@dataclass(frozen=True)
class Turn:
    """A chat up to the end of one of its answers: the rendering, and the character spans that this answer trains."""

    text: str
    spans: list[Span]


def turns_of(record: Record, tokenizer: PreTrainedTokenizerBase, config: DataConfig, seen: Counter[str]) -> list[Turn]:
    """Return the chat up to each answer that is trained on."""
    roles = [message["role"] for message in record.messages]
    answers = [i for i, role in enumerate(roles) if role == "assistant"]
    if not answers:
        raise BadSampleError("no answer", "the loss mask is all zeros, for the chat has no answer; remove the sample")
    if len(answers) > MOST_ANSWERS:  # the chat is rendered anew for each
        message = f"it has {len(answers)} answers, at most {MOST_ANSWERS} are read; cut it"
        raise BadSampleError("too many answers", message)
    if config.turns == "last":
        question = max((i for i, role in enumerate(roles[: answers[-1]]) if role == "user"), default=-1)
        answers = [i for i in answers if i > question]
    change = without if config.reasoning == "cut" else under_all_names
    messages = [change(message) for message in record.messages]
    turns = [_turn(messages, i, tokenizer, record.tools, config.reasoning == "cut", seen) for i in answers]
    lost = [i for i, turn in zip(answers, turns, strict=True) if reasoning_of(messages[i]).strip() not in turn.text]
    seen["whose reasoning the chat template leaves out"] += bool(lost)
    return turns


def _turn(
    messages: list[Message],
    answer: int,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Message],
    cut: bool,
    seen: Counter[str],
) -> Turn:
    """Find one answer in the chat that ends with it: behind the target's prompt, up to the chat's end.

    A template's own blocks stand as they are, but the target also writes the blanks before them, and the token that
    ends the turn.
    """
    before = messages[:answer]
    prompt = render(before, tokenizer, True, tools)
    if is_tagged(tokenizer, tools):
        text, blocks = render_tagged(messages[: answer + 1], tokenizer, tools)
    else:
        text, blocks = render(messages[: answer + 1], tokenizer, False, tools), None
    text = _ended(text, before, tokenizer, tools)
    start = len(prompt) if text.startswith(prompt) else None
    if start is None:
        start = _start(prompt, text, render(before, tokenizer, False, tools), content_text(before[-1]).strip())
    if blocks is not None:
        least = _common(prompt, text) if start is None else start
        spans = _widened([block for block in blocks if block[1] >= least], least, text, tokenizer)
    elif start is None:
        raise BadSampleError(
            "answer not behind its generation prompt",
            "the chat template writes the answer otherwise than after its generation prompt, so there is no exact "
            "loss mask; put {% generation %} and {% endgeneration %} around the answer in the template",
        )
    else:
        spans = [(start, len(text))]
    seen["with an answer behind another text than its generation prompt"] += not text.startswith(close_prompt(prompt))
    return Turn(text, [(skip(text, a, b, cut), b) for a, b in spans])


def _start(generation_prompt: str, text: str, chat: str, question: str) -> int | None:
    """Return the start of the answer to `question`, the end of `chat`: behind the prompt, or behind a suffix of it.

    Some templates shorten earlier messages once there is an answer: Mistral's system prompt, gpt-oss's reasoning before
    a tool call. The suffix is then the longest that the text holds, and has all of `question` in it.
    """
    for prompt in (generation_prompt, close_prompt(generation_prompt)):
        if text.startswith(prompt):
            return len(prompt)
        if question and prompt.startswith(chat):
            sizes = range(len(prompt) + 1)
            size = bisect_left(sizes, True, key=lambda size: prompt[len(prompt) - size :] not in text) - 1
            if question in chat[len(prompt) - size :]:
                return text.rfind(prompt[len(prompt) - size :]) + size
    return None


def _widened(blocks: list[Span], least: int, text: str, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """Let an answer's blocks begin with the blanks before them and end with the token that ends the turn."""
    if not blocks:
        return []
    spans = list(blocks)
    start, end = spans[0]
    if least < start and not text[least:start].strip():
        spans[0] = least, end
    start, end = spans[-1]
    ended = turn_end(tokenizer).match(text, end)
    spans[-1] = start, ended.end() if ended else end
    return spans


def _ended(text: str, before: list[Message], tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message]) -> str:
    """Return the text without the end token that some templates (Phi-3) append to any last turn that has ended."""
    doubled = text_end(tokenizer)
    if doubled.search(text) and doubled.search(render(before, tokenizer, False, tools)):
        return text.removesuffix(str(tokenizer.eos_token))
    return text


def _common(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))


def joined(turns: list[Turn]) -> list[tuple[str, list[Span]]]:
    """Join the answers of chats that are prefixes of each other into one text with all their spans.

    Some templates render earlier turns differently (Qwen3 drops their reasoning); then each answer stands where the
    target meets it, at the end of a text of its own.
    """
    texts: list[tuple[str, list[Span]]] = []
    for turn in reversed(turns):
        home = next((spans for text, spans in texts if text.startswith(turn.text)), None)
        if home is None:
            texts.append((turn.text, list(turn.spans)))
        else:
            home[:0] = turn.spans
    return [(text, _apart(spans)) for text, spans in reversed(texts)]


def _apart(spans: list[Span]) -> list[Span]:
    """Join spans that overlap, as those of blocks around more than an answer do."""
    apart: list[Span] = []
    for start, end in sorted(spans):
        if apart and start < apart[-1][1]:
            apart[-1] = apart[-1][0], max(end, apart[-1][1])
        else:
            apart.append((start, end))
    return apart
