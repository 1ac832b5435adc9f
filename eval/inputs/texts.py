"""Texts to measure along: prompts with the target's own answers, or with those that a log has recorded."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from data.config import DataConfig
from data.text.exact import Exact
from data.text.masks import samples_of
from data.text.prompts import prompt_of, split_text
from data.text.records import Message, Record, content_text
from data.text.template import check_media, encode_plain
from inference.decode import Settings, autoregress
from inference.target.target import Target
from inference.target.tokenizer import tokenize

NO_ANSWER = "it has no answer to play back: give a log with answers, or text=own, for which the target writes them"


@dataclass(frozen=True)
class Text:
    """A prompt and its answer as tokens, the answer's start, and the most tokens that it was allowed."""

    token: list[int]
    start: int
    limit: int

    @property
    def prompt(self) -> list[int]:
        """The tokens before the answer."""
        return self.token[: self.start]

    @property
    def generated(self) -> int:
        """The number of the answer's tokens."""
        return len(self.token) - self.start


class RecordedText(NamedTuple):
    """A text of a log, with its record's id and category."""

    id: str
    category: str
    text: Text


def write(target: Target, prompts: Sequence[list[int]], settings: Settings) -> list[Text]:
    """Let the target answer by itself; answers of one token, which no step adds to, are left out."""
    texts = [of_answer(target, prompt, autoregress(target, prompt, settings).tokens, settings) for prompt in prompts]
    return [text for text in texts if text.generated > 1]


def of_answer(target: Target, prompt: list[int], answer: list[int], settings: Settings) -> Text:
    """Return the text of a prompt and its answer."""
    return Text(prompt + answer, len(prompt), min(settings.max_new_tokens, target.context - len(prompt)))


def recorded(record: Record, target: Target, turns: str, most: int) -> Iterator[RecordedText]:
    """Yield the first or all answers of a log's record, each after all messages before it, cut to `most` tokens.

    Tokens that the record gives are taken as they are. Other chats have those of the whole chat as the template renders
    it, and an answer is what training would mask as one, its end token included. Without a template the texts stand
    one after another.

    Raises:
        ValueError: it has no answer, or none that can be distinguished from its prompt.
    """
    answers = list(_answers(record, target))
    for number, (token, start) in enumerate(answers if turns == "all" else answers[:1], 1):
        if len(token) == start:
            raise ValueError(f"record {record.id}: {NO_ANSWER}")
        if not start:
            raise ValueError(f"record {record.id}: its answer follows nothing: give its prompt too")
        id_ = f"{record.id}.{number}" if turns == "all" and len(answers) > 1 else record.id
        yield RecordedText(id_, record.category, Text(token[: start + most], start, most))


def _answers(record: Record, target: Target) -> Iterator[tuple[list[int], int]]:
    """Yield the tokens up to the end of each answer, and the index of the answer's first."""
    if record.exact:
        spans = [(document, span) for document in record.exact for span in document.answers()]
        if not spans:
            raise ValueError(f"record {record.id}: {NO_ANSWER}")
        yield from ((document.token[:end], start) for document, (start, end) in spans)
        return
    tokenizer: Any = target.tokenizer
    if not record.messages:
        prompt = prompt_of(record, tokenizer).token
        _, rest = split_text(record.text, tokenizer)
        if not rest:
            raise ValueError(f"record {record.id}: a text of {len(prompt)} token has no answer")
        yield prompt + rest, len(prompt)
    elif all(message["role"] != "assistant" for message in record.messages):
        raise ValueError(f"record {record.id}: {NO_ANSWER}")
    elif tokenizer.chat_template:
        yield from _rendered(record, tokenizer)
    else:
        yield from _joined(record.messages, target)


def _rendered(record: Record, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], int]]:
    """Yield the answers of a chat, found by its loss mask."""
    dropped: Counter[str] = Counter()
    samples = samples_of(record, tokenizer, "workload", _masking(), dropped)
    if not samples:
        cause = next(iter(+dropped), "no answer").removeprefix("dropped, ")
        raise ValueError(f"record {record.id}: no answer can be told from its prompt ({cause}): fix it")
    for sample in samples:
        yield from ((sample.token[:end], start) for start, end in Exact(sample.token, sample.mask).answers())


def _joined(messages: Sequence[Message], target: Target) -> Iterator[tuple[list[int], int]]:
    """Yield the answers of a chat for a tokenizer without a template, its texts one after another."""
    tokenizer: Any = target.tokenizer
    check_media(list(messages))
    before: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            prompt = encode_plain("\n\n".join(before), tokenizer)
            answer = tokenize(tokenizer, content_text(message), add_special_tokens=False)["input_ids"]
            yield prompt + answer + sorted(target.eos)[:1], len(prompt)
        before.append(content_text(message))


def _masking() -> DataConfig:
    """Return the settings of loss masks here: all answers whole, records without one left out."""
    return DataConfig(
        path="workload", weights=None, seed=0, streaming=False, split="", length=2, limit=None, prompts="", held_out=0,
        max_tokens=2**31, min_tokens=1, dedup=False, contamination=None, cache=None, turns="all", reasoning="keep",
        on_bad="drop",
    )  # fmt: skip
