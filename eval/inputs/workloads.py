"""Prompts to measure on: the bundled workload by its name, the user's own log, or a published benchmark's file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from data.text.benchmarks import readable
from data.text.filters import WORD
from data.text.prompts import WORKLOADS, Prompt, locate, prompt_of
from data.text.records import Message, Record, content_text, parse
from data.text.sources import open_source
from data.text.template import encode, encode_plain, render
from eval.inputs.texts import NO_ANSWER, TOKENS, Text, TokenLog, Told, recorded
from eval.measures import metrics
from inference.chat_template import RenderError
from inference.target.target import Target
from inference.target.tokenizer import Reads

# Below this, generation would end at the context's edge and not at the answer's, and measure next to nothing.
ROOM = 8
LOOKED = 10_000  # records, at most, among which prompts of all categories are looked for
LONG = 32  # words of a plain text, half of which is a prompt that differs from others

Answer = Callable[[list[int]], str]  # of the target, to a prompt
Readable = Record | Prompt | TokenLog
Placed = tuple[int, Readable]


@dataclass(frozen=True)
class Selection:
    """Which prompts of a workload to take.

    Attributes:
        prompts: questions to measure on, at most; with all turns a question gives several prompts.
        warmup: further prompts, to run before anything counts.
        truncate: shorten prompts that leave no room to their end, rather than refuse them.
        turns: "first" or "all" questions of a dialogue.
        balanced: take as many of each category as there are, rather than the first ones.
    """

    prompts: int
    warmup: int
    truncate: bool
    turns: str
    balanced: bool


class Workload(NamedTuple):
    """What reports call it, where it is, the prompts to measure on, and those before; `fresh` if these are its own.

    `conversations` has a number for each prompt, the same one for all turns of a dialogue and for copies of a prompt.
    """

    name: str
    path: str
    prompts: list[Prompt]
    warmup: list[Prompt]
    fresh: bool
    conversations: list[int]

    @property
    def distinct(self) -> int:
        """How many of the prompts differ."""
        return len({tuple(prompt.token) for prompt in self.prompts})

    def categories(self) -> dict[str, list[int]]:
        """Return the places of each category's prompts; nothing where all are of one."""
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(self.prompts):
            places.setdefault(prompt.category, []).append(place)
        return {name or "other": each for name, each in places.items()} if len(places) > 1 else {}


def load_workload(name: str, target: Target, limit: int, truncate: bool = False) -> list[Prompt]:
    """Return the first prompts of a workload as tokens of the target, as `read_workload` does."""
    return read_workload(name, target, Selection(limit, 0, truncate, "first", False)).prompts


def read_workload(name: str, target: Target, wanted: Selection, answer: Answer | None = None) -> Workload:
    """Read a workload's prompts as tokens of the target.

    Warm-up prompts are the workload's next ones; where it has no more, those that are measured, their halves swapped.

    Args:
        name: a key of `WORKLOADS`, a file, a folder, a glob, or a Hub name.
        target: whose tokenizer and context count.
        wanted: which of its prompts.
        answer: what the target writes, for the turns of a dialogue whose answers nobody has recorded.

    Raises:
        ValueError: unknown workload or shape, no prompts, text that must be fetched first, or a prompt that is empty,
            another target's, or leaves no room in the context.
    """
    measured, spare = chosen(name, wanted)

    def fitting(prompt: Prompt) -> Prompt:
        return fit(prompt, name, target, wanted.truncate)

    prompts: list[Prompt] = []
    places: list[int] = []
    for place, record in measured:
        for prompt in _named(name, record, target, wanted.turns, lambda token: answer(token) if answer else ""):
            prompts.append(fitting(prompt))
            places.append(place)
    warmup = [fitting(prompt) for record in spare for prompt in _named(name, record, target, "first", None)]
    fresh = len(warmup) == wanted.warmup
    missing = wanted.warmup - len(warmup)
    warmup += [swapped(prompts[-1 - i % len(prompts)]) for i in range(missing)]
    conversations = metrics.clustered([prompt.token for prompt in prompts], places)
    return Workload(short_name(name), name, prompts, warmup, fresh, conversations)


def read_log(name: str, reads: Reads, wanted: Selection, most: int) -> tuple[Workload, list[Text]]:
    """Read a log's prompts, and the texts that were recorded after them, as tokens.

    Args:
        name: as for `read_workload`.
        reads: the tokenizer, and the tokens that end an answer.
        wanted: which of its records; nothing runs before, so there is no warm-up.
        most: tokens of an answer.

    Raises:
        ValueError: as `read_workload`, or a record without an answer.
    """
    told: list[Told] = []
    places: list[int] = []
    for place, record in chosen(name, wanted)[0]:
        if isinstance(record, Prompt):
            raise ValueError(f"workload {name}, prompt {record.id}: {NO_ANSWER}")
        told += recorded(record, name, reads, wanted.turns, most)
        places += [place] * (len(told) - len(places))
    prompts = [Prompt(each.id, each.text.token[: each.text.start], each.category) for each in told]
    conversations = metrics.clustered([prompt.token for prompt in prompts], places)
    return Workload(short_name(name), name, prompts, [], False, conversations), [each.text for each in told]


def chosen(name: str, wanted: Selection) -> tuple[list[Placed], list[Readable]]:
    """Return the records to measure on with their places, in the workload's own order, and those for a warm-up.

    Raises:
        ValueError: unknown workload or shape, or no prompts.
    """
    found = list(_records(locate(name), wanted))
    if not found:
        raise ValueError(f"workload {name} has no prompts: give a file with one prompt a line")
    picked = spread(found, wanted.prompts + wanted.warmup) if wanted.balanced else found
    measured = sorted(picked[: wanted.prompts], key=lambda each: each[0])
    return measured, [record for _, record in picked[wanted.prompts : wanted.prompts + wanted.warmup]]


def fit(prompt: Prompt, name: str, target: Target, truncate: bool) -> Prompt:
    """Return a prompt that has tokens of the target's and leaves room for an answer.

    Raises:
        ValueError: it does not, or may not be shortened.
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
    """Check that a target knows all tokens.

    Raises:
        ValueError: it does not; the text they are from is named by `where`.
    """
    known = range(target.spec.vocab_size)
    if not all(token in known for token in tokens):
        raise ValueError(
            f"{where}: its tokens are none of the target's {len(known)}: give text, or the prompts of a run of this "
            "target"
        )


def swapped(prompt: Prompt) -> Prompt:
    """Return a prompt of the same length that is not the same text: its second half, and then its first."""
    half = len(prompt.token) // 2
    return prompt._replace(id=f"{prompt.id} swapped", token=prompt.token[half:] + prompt.token[:half])


def spread(found: Sequence[Placed], count: int) -> list[Placed]:
    """Return records of all categories in turn, the first of each, then the second, and so on."""
    kinds: dict[str, list[Placed]] = {}
    for place, record in found:
        kinds.setdefault(record.category, []).append((place, record))
    kinds = {name: apart(each, count) for name, each in kinds.items()}
    longest = max(map(len, kinds.values()))
    turns = [each[i] for i in range(longest) for each in kinds.values() if i < len(each)]
    return turns[:count]


def apart(found: list[Placed], count: int) -> list[Placed]:
    """Return the records, of plain texts different ones from all over the source, long ones where it has any.

    A text's neighbours are often its like, and of a short one there is no prompt to tell it from others by.
    """
    texts: dict[str, Placed] = {}
    for place, record in found:
        if not isinstance(record, Record) or record.messages:
            return found
        texts.setdefault(record.text, (place, record))
    each = [texts[text] for text in texts if len(WORD.findall(text)) >= LONG] or list(texts.values())
    count = min(count, len(each))
    return [each[i * len(each) // count] for i in range(count)]


def short_name(name: str) -> str:
    """Return what reports call a workload: its name, a file's name without its folder, or the Hub's name."""
    path = Path(name).expanduser()
    known = [key for key, bundled in WORKLOADS.items() if path.resolve() == bundled]
    return known[0] if known else path.name if path.is_file() else name


def _records(path: str, wanted: Selection) -> Iterator[Placed]:
    """Yield the workload's records with their places, as many as must be looked at."""
    source, seen = open_source(path, split=""), set[str]()
    limit = LOOKED if wanted.balanced else wanted.prompts + wanted.warmup
    for place, raw in enumerate(islice(source, limit)):
        if set(raw) == set(Prompt._fields):
            yield place, Prompt.read(raw, place, path)
            continue
        if set(TOKENS) <= set(raw):
            yield place, TokenLog.read(raw, place, path)
            continue
        read = parse(readable(raw, place, path), place, path)
        name = f"{read.id}@{place}" if read.id in seen else read.id
        seen.add(name)
        yield place, read._replace(id=name)


def _named(name: str, record: Readable, target: Target, turns: str, answer: Answer | None) -> Iterator[Prompt]:
    """Yield a record's prompts; what is wrong with them is told with the workload's name."""
    try:
        yield from _prompts(record, target, turns, answer)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"workload {name}, prompt {record.id}: holds half a surrogate pair, which is no text; remove it"
        ) from error
    except RenderError as error:
        raise ValueError(f"workload {name}, prompt {record.id}: {error}; mend or remove the record") from error
    except ValueError as error:
        raise ValueError(f"workload {name}, {error}") from error


def _prompts(record: Readable, target: Target, turns: str, answer: Answer | None) -> Iterator[Prompt]:
    """Yield a record's prompts: its first question, or every one after all that was said before it."""
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
    said: list[Message] = []
    turn, last = 0, Prompt(record.id, [], record.category)
    for message in record.messages:
        asked = message["role"] == "user"
        if asked and said and said[-1]["role"] == "user":
            said.append({"role": "assistant", "content": answer(last.token)})
        said.append(message)
        if asked:
            turn += 1
            last = Prompt(f"{record.id}.{turn}", _encoded(said, record, target), record.category, content_text(message))
            yield last


def _encoded(said: Sequence[Message], record: Record, target: Target) -> list[int]:
    """Return a dialogue's tokens up to the answer; without a chat template, its texts one after another."""
    if target.tokenizer.chat_template:
        return encode([render(list(said), target.tokenizer, True, record.tools)], target.tokenizer)[0]
    return encode_plain("\n\n".join(content_text(message) for message in said), target.tokenizer)
