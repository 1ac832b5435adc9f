"""Where a chat's answers stand in the text that the chat template makes of it."""

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
    """A record that no exact mask can be drawn for."""

    def __init__(self, cause: str, what: str) -> None:
        super().__init__(f"{what}, or set data.on_bad=drop")
        self.cause = cause


@dataclass(frozen=True)
class Turn:
    """A chat up to the end of one of its answers: the rendering, and the characters of it that this answer trains."""

    text: str
    spans: list[Span]


def turns_of(record: Record, tokenizer: PreTrainedTokenizerBase, config: DataConfig, seen: Counter[str]) -> list[Turn]:
    """Return the chat up to each answer that is trained on."""
    roles = [message["role"] for message in record.messages]
    answers = [i for i, role in enumerate(roles) if role == "assistant"]
    if not answers:
        raise BadSampleError("no answer", "the loss mask is all zeros, for the chat has no answer; remove the sample")
    if len(answers) > MOST_ANSWERS:  # the chat is rendered anew for each
        what = f"it has {len(answers)} answers, at most {MOST_ANSWERS} are read; cut it"
        raise BadSampleError("too many answers", what)
    if config.turns == "last":
        asked = max((i for i, role in enumerate(roles[: answers[-1]]) if role == "user"), default=-1)
        answers = [i for i in answers if i > asked]
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
    """Find one answer in the chat that ends with it: behind what the target is given, up to the chat's end.

    A template's own blocks stand as they are, but for what the target writes too: the blanks before them, and the token
    that ends the turn.
    """
    asked = messages[:answer]
    given = render(asked, tokenizer, True, tools)
    if is_tagged(tokenizer, tools):
        text, blocks = render_tagged(messages[: answer + 1], tokenizer, tools)
    else:
        text, blocks = render(messages[: answer + 1], tokenizer, False, tools), None
    text = _ended(text, asked, tokenizer, tools)
    start = len(given) if text.startswith(given) else None
    if start is None:
        start = _start(given, text, render(asked, tokenizer, False, tools), content_text(asked[-1]).strip())
    if blocks is not None:
        known = _common(given, text) if start is None else start
        spans = _widened([block for block in blocks if block[1] >= known], known, text, tokenizer)
    elif start is None:
        raise BadSampleError(
            "answer not behind its generation prompt",
            "the chat template writes the answer otherwise than after its generation prompt, so no loss mask "
            "can be drawn; put {% generation %} and {% endgeneration %} around the answer in the template",
        )
    else:
        spans = [(start, len(text))]
    seen["with an answer behind another text than its generation prompt"] += not text.startswith(close_prompt(given))
    return Turn(text, [(skip(text, a, b, cut), b) for a, b in spans])


def _start(given: str, text: str, asked: str, told: str) -> int | None:
    """Return where the answer to `told`, the end of `asked`, starts in the text: behind the prompt, or behind its end.

    Some templates shorten what came before once there is an answer: Mistral's system prompt, gpt-oss's reasoning before
    a tool call. The prompt's end is then the longest that the text holds, and has all of `told` in it.
    """
    for prompt in (given, close_prompt(given)):
        if text.startswith(prompt):
            return len(prompt)
        if told and prompt.startswith(asked):
            sizes = range(len(prompt) + 1)
            size = bisect_left(sizes, True, key=lambda size: prompt[len(prompt) - size :] not in text) - 1
            if told in asked[len(prompt) - size :]:
                return text.rfind(prompt[len(prompt) - size :]) + size
    return None


def _widened(blocks: list[Span], known: int, text: str, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """Let an answer's blocks begin with the blanks before them and end with the token that ends the turn."""
    if not blocks:
        return []
    spans = list(blocks)
    start, end = spans[0]
    if known < start and not text[known:start].strip():
        spans[0] = known, end
    start, end = spans[-1]
    ended = turn_end(tokenizer).match(text, end)
    spans[-1] = start, ended.end() if ended else end
    return spans


def _ended(text: str, asked: list[Message], tokenizer: PreTrainedTokenizerBase, tools: Sequence[Message]) -> str:
    """Return the text without the end token that some templates (Phi-3) put behind any last turn that has ended."""
    ends_twice = text_end(tokenizer)
    if ends_twice.search(text) and ends_twice.search(render(asked, tokenizer, False, tools)):
        return text.removesuffix(str(tokenizer.eos_token))
    return text


def _common(a: str, b: str) -> int:
    """Return how many characters two texts begin alike with."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))


def joined(turns: list[Turn]) -> list[tuple[str, list[Span]]]:
    """Join answers whose chats begin alike to one text with all their spans.

    Some templates write a turn otherwise once it is past (Qwen3 drops its reasoning); then each answer stands where the
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
