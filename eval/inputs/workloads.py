"""Prompts to measure on: the bundled workload by its name, the user's own log, or a published benchmark's file."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from data.text.filters import WORD
from data.text.prompts import WORKLOADS, Prompt, locate, prompt_of
from data.text.records import Message, Record, content_text, parse, readable
from data.text.sources import open_source
from data.text.template import encode, encode_plain, render
from eval.config import Selection
from eval.inputs.texts import NO_ANSWER, TOKENS, RecordedText, Text, TokenLog, recorded
from eval.measures import metrics
from inference.chat_template import RenderError
from inference.target.target import Target
from inference.target.tokenizer import Reads

# Below this, generation would end at the context's edge and not at the answer's, and measure next to nothing.
ROOM = 8
SEARCHED = 10_000  # the most records among which prompts of all categories are searched
LONG = 32  # words of a plain text from which on half of it is a prompt unlike others

Answer = Callable[[list[int]], str]  # the target's answer to a prompt
Readable = Record | Prompt | TokenLog
Indexed = tuple[int, Readable]


class Workload(NamedTuple):
    """A workload: its name in reports, its path, the prompts to measure on, and those of the warm-up.

    `fresh` says that the warm-up's prompts are not among those measured. `conversations` has a number for each prompt,
    the same one for all turns of a dialogue and for equal prompts.
    """

    name: str
    path: str
    prompts: list[Prompt]
    warmup: list[Prompt]
    fresh: bool
    conversations: list[int]

    @property
    def distinct(self) -> int:
        """The number of different prompts."""
        return len({tuple(prompt.token) for prompt in self.prompts})

    def categories(self) -> dict[str, list[int]]:
        """Return the indices of each category's prompts; nothing where all are of one."""
        return by_category([prompt.category for prompt in self.prompts])


def load_workload(name: str, target: Target, limit: int, truncate: bool = False) -> list[Prompt]:
    """Return the first prompts of a workload as tokens of the target, as `read_workload` does."""
    return read_workload(name, target, Selection(limit, 0, truncate, "first", False)).prompts


def read_workload(name: str, target: Target, selection: Selection, answer: Answer | None = None) -> Workload:
    """Read a workload's prompts as tokens of the target.

    Warm-up prompts are the workload's next ones; where it has no more, those that are measured, their halves swapped.

    Args:
        name: a key of `WORKLOADS`, a file, a folder, a glob, or a Hub name.
        target: the target, whose tokenizer and context are used.
        selection: which of its prompts.
        answer: the target's answers, for the turns of a dialogue that have none recorded.

    Raises:
        ValueError: unknown workload or shape, no prompts, text that must be fetched first, or a prompt that is empty,
            another target's, or leaves no room in the context.
    """
    measured, spare = chosen(name, selection, selection.warmup)

    def fitting(prompt: Prompt) -> Prompt:
        return fit(prompt, name, target, selection.truncate)

    prompts: list[Prompt] = []
    indices: list[int] = []
    for index, record in measured:
        for prompt in _named(name, record, target, selection.turns, lambda token: answer(token) if answer else ""):
            prompts.append(fitting(prompt))
            indices.append(index)
    warmup = [fitting(prompt) for record in spare for prompt in _named(name, record, target, "first", None)]
    fresh = len(warmup) == selection.warmup
    missing = selection.warmup - len(warmup)
    warmup += [swapped(prompts[-1 - i % len(prompts)]) for i in range(missing)]
    conversations = metrics.clustered([prompt.token for prompt in prompts], indices)
    return Workload(short_name(name), name, prompts, warmup, fresh, conversations)


def read_log(name: str, reads: Reads, selection: Selection, most: int) -> tuple[Workload, list[Text]]:
    """Read a log's prompts, and the texts that were recorded after them, as tokens.

    Args:
        name: as for `read_workload`.
        reads: the tokenizer and the end tokens.
        selection: which of its records; there is no warm-up.
        most: tokens of an answer.

    Raises:
        ValueError: as `read_workload`, or a record without an answer.
    """
    texts: list[RecordedText] = []
    indices: list[int] = []
    for index, record in chosen(name, selection, 0)[0]:
        if isinstance(record, Prompt):
            raise ValueError(f"workload {name}, prompt {record.id}: {NO_ANSWER}")
        texts += recorded(record, name, reads, selection.turns, most)
        indices += [index] * (len(texts) - len(indices))
    prompts = [Prompt(id_, text.token[: text.start], category) for id_, category, text in texts]
    conversations = metrics.clustered([prompt.token for prompt in prompts], indices)
    return Workload(short_name(name), name, prompts, [], False, conversations), [entry.text for entry in texts]


def chosen(name: str, selection: Selection, warmup: int) -> tuple[list[Indexed], list[Readable]]:
    """Return the records to measure on with their indices, in the workload's order, and those for the warm-up.

    Raises:
        ValueError: unknown workload or shape, or no prompts.
    """
    most = selection.prompts + warmup
    records = list(_records(locate(name), SEARCHED if selection.balanced else most))
    if not records:
        raise ValueError(f"workload {name} has no prompts: give a file with one prompt a line")
    picked = in_turn(records, most) if selection.balanced else records
    measured = sorted(picked[: selection.prompts], key=lambda record: record[0])
    return measured, [record for _, record in picked[selection.prompts : most]]


def fit(prompt: Prompt, name: str, target: Target, truncate: bool) -> Prompt:
    """Return a prompt that leaves room for an answer in the target's context, shortened where that is allowed.

    Raises:
        ValueError: it is empty, has tokens that the target does not know, or is too long.
    """
    if not prompt.token:
        raise ValueError(f"workload {name}, prompt {prompt.id}: is empty: remove it")
    check_known(prompt.token, f"workload {name}, prompt {prompt.id}", target)
    room = target.context - ROOM
    if truncate:
        return prompt._replace(token=prompt.token[-room:])
    if len(prompt.token) > room:
        raise ValueError(
            f"workload {name}, prompt {prompt.id}: {len(prompt.token)} tokens, but the target's context of "
            f"{target.context} leaves room for {room}: shorten it, or set truncate=true to keep each prompt's end"
        )
    return prompt


def check_known(tokens: Sequence[Any], where: str, target: Target) -> None:
    """Check that all tokens are in a target's vocabulary.

    Raises:
        ValueError: some are not; `where` names the text in the message.
    """
    vocabulary = range(target.spec.vocab_size)
    if not all(token in vocabulary for token in tokens):
        raise ValueError(
            f"{where}: its tokens are none of the target's {len(vocabulary)}: give text, or the prompts of a run of "
            "this target"
        )


def swapped(prompt: Prompt) -> Prompt:
    """Return another prompt of the same length: its second half before its first."""
    half = len(prompt.token) // 2
    return prompt._replace(id=f"{prompt.id} swapped", token=prompt.token[half:] + prompt.token[:half])


def by_category(categories: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of each category; nothing where there is only one."""
    indices: dict[str, list[int]] = {}
    for index, category in enumerate(categories):
        indices.setdefault(category or "other", []).append(index)
    return indices if len(indices) > 1 else {}


def in_turn(records: Sequence[Indexed], count: int) -> list[Indexed]:
    """Return records of all categories in turn: the first of each, then the second, and so on."""
    groups: dict[str, list[Indexed]] = {}
    for index, record in records:
        groups.setdefault(record.category, []).append((index, record))
    columns = [varied(group, count) for group in groups.values()]
    longest = max(map(len, columns))
    return [column[i] for i in range(longest) for column in columns if i < len(column)][:count]


def varied(records: list[Indexed], count: int) -> list[Indexed]:
    """Return the records; of plain texts, different ones evenly spaced in the source, long ones where it has any.

    Neighbouring texts are often alike, and half of a short one does not distinguish it from others.
    """
    texts: dict[str, Indexed] = {}
    for index, record in records:
        if not isinstance(record, Record) or record.messages:
            return records
        texts.setdefault(record.text, (index, record))
    picked = [texts[text] for text in texts if len(WORD.findall(text)) >= LONG] or list(texts.values())
    count = min(count, len(picked))
    return [picked[i * len(picked) // count] for i in range(count)]


def short_name(name: str) -> str:
    """Return a workload's name in reports: its key, a file's name without its folder, or the Hub's name."""
    path = Path(name).expanduser()
    keys = [key for key, bundled in WORKLOADS.items() if path.resolve() == bundled]
    return keys[0] if keys else path.name if path.is_file() else name


def _records(path: str, limit: int) -> Iterator[Indexed]:
    """Yield the workload's first records with their indices."""
    source, seen = open_source(path, split=""), set[str]()
    for index, raw in enumerate(islice(source, limit)):
        if set(raw) == set(Prompt._fields):
            yield index, Prompt.read(raw, index, path)
            continue
        if set(TOKENS) <= set(raw):
            yield index, TokenLog.read(raw, index, path)
            continue
        read = parse(readable(raw, index, path), index, path)
        name = f"{read.id}@{index}" if read.id in seen else read.id
        seen.add(name)
        yield index, read._replace(id=name)


def _named(name: str, record: Readable, target: Target, turns: str, answer: Answer | None) -> Iterator[Prompt]:
    """Yield a record's prompts; errors in them name the workload."""
    try:
        yield from _prompts(record, target, turns, answer)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"workload {name}, prompt {record.id}: holds half a surrogate pair, which is no text; remove it"
        ) from error
    except RenderError as error:
        raise ValueError(f"workload {name}, prompt {record.id}: {error}; fix or remove the record") from error
    except ValueError as error:
        raise ValueError(f"workload {name}, {error}") from error


def _prompts(record: Readable, target: Target, turns: str, answer: Answer | None) -> Iterator[Prompt]:
    """Yield a record's prompts: its first question, or every one after all messages before it."""
    if isinstance(record, Prompt):
        yield record
    elif isinstance(record, TokenLog):
        yield Prompt(record.id, record.prompt, record.category)
    elif turns == "first" or sum(message["role"] == "user" for message in record.messages) < 2:
        yield prompt_of(record, target.tokenizer)
    else:
        assert answer is not None
        yield from _turns(record, target, answer)


def _turns(record: Record, target: Target, answer: Answer) -> Iterator[Prompt]:
    """Yield a prompt for each question of a dialogue; the target writes the answers that are not recorded."""
    chat: list[Message] = []
    turn, last = 0, Prompt(record.id, [], record.category)
    for message in record.messages:
        question = message["role"] == "user"
        if question and chat and chat[-1]["role"] == "user":
            chat.append({"role": "assistant", "content": answer(last.token)})
        chat.append(message)
        if question:
            turn += 1
            last = Prompt(f"{record.id}.{turn}", _encoded(chat, record, target), record.category, content_text(message))
            yield last


def _encoded(chat: Sequence[Message], record: Record, target: Target) -> list[int]:
    """Return a dialogue's tokens up to the answer; without a chat template, its texts one after another."""
    if target.tokenizer.chat_template:
        return encode([render(list(chat), target.tokenizer, True, record.tools)], target.tokenizer)[0]
    return encode_plain("\n\n".join(content_text(message) for message in chat), target.tokenizer)
