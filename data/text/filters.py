"""Filters with counts: duplicates, and contamination by evaluation text."""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from data.config import DataConfig
from data.text.masks import reasoning_of, without_reasoning
from data.text.parts import content_text
from data.text.records import Record
from heads.common.typed import Json

# A word is a run of letters, digits, _ and combining marks (\w lacks vowel signs). In scripts written without spaces
# (Thai, Lao, Burmese, Khmer, kana and Chinese) every character is a word.
SPACELESS = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uff66-\uff9f"
    r"\U00020000-\U0003ffff"
)
MARKS = re.sub(f"[{SPACELESS}]", "", "".join(chr(i) for i in range(1 << 16) if unicodedata.category(chr(i))[0] == "M"))
WORD = re.compile(rf"[^\W{SPACELESS}]+(?:[{MARKS}]+[^\W{SPACELESS}]*)*|[{SPACELESS}]")
BETWEEN = dict.fromkeys(re.sub(rb"\w", b"", bytes(range(128))), " ")  # ASCII characters that are in no word

COUNTERS = "records", "kept", "chats", "shapes"
NOT_REPEATED = {"weight", "finish_reason"}  # keys of an answer that a later request does not have
SEEN = "with answers of earlier records as context"  # clients send them again in each request

Gram = tuple[str, ...]  # consecutive words


@dataclass
class Counts:
    """The counts of a run's records; `records` and `kept` are keyed by the source's name.

    `checked` counts the evaluation prompts that were checked for contamination, `unchecked` those with too few words;
    `chats` counts dropped and truncated chats by cause, `shapes` records by shape.
    """

    records: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    held_out: int = 0
    duplicates: int = 0
    contaminated: int = 0
    checked: int = 0
    unchecked: int = 0
    chats: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    short: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0

    @classmethod
    def read(cls, values: Json) -> "Counts":
        """Return the counts from a dict that `asdict` returned."""
        return cls(**values | {name: Counter(values[name]) for name in COUNTERS})

    def line(self, config: DataConfig) -> str:
        """Return one line for the terminal, without `chats`."""
        read = ", ".join(f"{name} {self.kept[name]:,} of {n:,} records" for name, n in self.records.items())
        words = config.contamination
        unchecked = f" ({self.unchecked} of them too short to look for)" if self.unchecked else ""
        dropped = [f"{self.duplicates:,} duplicates"] if config.dedup else []
        if words is not None:
            prompts = self.checked + self.unchecked
            dropped += [f"{self.contaminated:,} with {words} words of one of {prompts:,} evaluation prompts{unchecked}"]
        dropped += [f"{self.short:,} under {config.min_tokens} tokens"] if config.min_tokens > 1 else []
        begin = f"{self.held_out:,} held out; of the others " if self.held_out else ""
        begin = f"measured on {config.prompts}; " if config.prompts else begin
        return (
            f"data: {begin}{read}; dropped: {', '.join(dropped) or 'nothing'}; "
            f"kept: {self.samples:,} samples, {self.tokens:,} tokens, "
            f"{self.trained / max(1, self.tokens):.0%} trained on"
        )

    def report(self) -> Json:
        """Return the counts for JSON."""
        return {**asdict(self), **{name: dict(+getattr(self, name)) for name in COUNTERS}}


class Filters:
    """A filter that drops duplicates and evaluation text from records, and counts them."""

    def __init__(self, config: DataConfig, held_out: Iterable[Record], evaluation: Sequence[str]) -> None:
        """Take the held-out records, whose copies are duplicates, and the texts of the evaluation prompts."""
        self.counts = Counts()
        self._dedup, self._turns, self._words = config.dedup, config.turns, config.contamination
        self._seen = set[str]()
        for record in held_out:
            self._once(record)
        self._forbidden: set[Gram] = set()
        if self._words is not None:
            grams = [set(_grams(text, self._words)) for text in evaluation]
            self._forbidden = set().union(*grams)
            self.counts.unchecked = sum(not shared for shared in grams)
            self.counts.checked = len(grams) - self.counts.unchecked

    def __call__(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records that pass."""
        for given in records:
            self.counts.records[given.source] += 1
            record = self._once(given) if self._dedup and given.error is None else given
            if record is None:
                self.counts.duplicates += 1
                continue
            texts = [content_text(message) for message in record.messages if message["role"] != "system"]
            grams = (_grams(text, self._words or 0) for text in (*texts, record.text))
            if self._forbidden and not self._forbidden.isdisjoint(chain.from_iterable(grams)):
                self.counts.contaminated += 1
                continue
            self.counts.kept[record.source] += 1
            yield record

    def _once(self, record: Record) -> Record | None:
        """Return a record, with answers that stood behind the same messages before as context; None if all did."""
        keys = _keys(record, self._turns == "all")
        seen = {i for i, (key, *_) in keys.items() if key in self._seen}
        self._seen.update(*keys.values())
        if len(seen) in (0, len(keys)):
            return None if seen else record
        messages = [{**message, "weight": 0} if i in seen else message for i, message in enumerate(record.messages)]
        return record._replace(messages=messages, notes=(*record.notes, SEEN))


def _grams(text: str, count: int) -> Iterator[Gram]:
    """Yield every run of `count` words of a text, in lower case and without punctuation."""
    folded = text.casefold()
    words = folded.translate(BETWEEN).split() if folded.isascii() else WORD.findall(folded)
    return zip(*(words[start:] for start in range(count)), strict=False)


def _keys(record: Record, by_answer: bool) -> dict[int, list[str]]:
    """Return hashes, blind to case and white space, of a record, or of each answer to train on and all before it.

    The latter are two, with and without the answer's reasoning, if it has one. That of earlier answers does not count:
    clients leave it out of the requests that follow.
    """
    text = "" if record.messages or record.pretokenized else record.text
    before, keys = _hash([_folded(text), record.tools, record.pretokenized]), dict[int, list[str]]()
    for i, message in enumerate(record.messages):
        shown, thoughts = without_reasoning(message), reasoning_of(message)
        content = {key: shown[key] for key in shown.keys() - NOT_REPEATED} | {"content": _folded(content_text(shown))}
        plain = _hash([before, content])
        full = _hash([plain, thoughts]) if thoughts else plain
        if message["role"] == "assistant" and message.get("weight") != 0:
            keys[i] = [full, plain]
        before = plain if by_answer else full
    return keys if by_answer and keys else {0: [before]}


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
