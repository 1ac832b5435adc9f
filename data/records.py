"""Read what users have (files of several formats, Hub datasets) into records of one shape: a chat, or a plain text."""

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, runtime_checkable

import datasets

Message = dict[str, Any]

SEPARATOR = "<|endoftext|>"
FORMATS = (".json", ".jsonl", ".parquet", ".txt")
EVALUATION_SPLITS = ("test", "validation", "train")
OPENERS: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open}
ROLES = {"human": "user", "gpt": "assistant"}
QUESTIONS = ("prompt", "question", "instruction")
IDS = ("id", "question_id", "task_id", "conversation_id", "prompt_id")
SHAPES = (
    '{"messages": [{role, content}]}, {"conversations": [{role, content} or {from, value}]}, {"prompt", "answer"}, '
    '{"question", "answer"}, {"instruction", "input", "output"}, {"turns" or "prompt": [...]} or {"text"}'
)


class Record(NamedTuple):
    """One document: `messages` of a chat with OpenAI's role names, else empty; `text` of a plain one, else empty.

    `tools` are the definitions of the tools that a chat may call.
    """

    id: str
    category: str
    messages: list[Message]
    text: str
    tools: tuple[Any, ...] = ()


@runtime_checkable
class RawRecords(Protocol):
    """What a file or data set is read into: a list, or what `datasets` maps from disk."""

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Go through the records."""
        ...

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Return one record."""
        ...


def read_records(path: str, split: str) -> RawRecords:
    """Return the raw records of a local file or a Hub dataset, in their order.

    Args:
        path: a .json, .jsonl, .txt or .parquet file, also .gz or .xz, or a Hub dataset as `name` or `name:config`.
        split: the Hub dataset's split, ignored for a file; empty takes the first of test, validation, train.

    Raises:
        ValueError: nothing is there, it cannot be read, or it is empty.
    """
    file = Path(path).expanduser()
    raw = _read_file(file) if file.is_file() else _read_hub(path, split)
    if not len(raw):
        raise ValueError(f"{path}: holds no records; give a file or dataset with at least one")
    return raw


def parse(raw: dict[str, Any], index: int, path: str) -> Record:
    """Return the record of one raw record, whose shape is known by its keys.

    A chat starts at its first user message (system messages before it stay): what an assistant says before that
    answers nothing. Records without an answer are chats of one user message: prompts.
    """
    name = next((str(raw[key]) for key in IDS if raw.get(key) is not None), str(index))
    messages = _messages(raw)
    text = raw.get("text") or ""
    if messages is None and not isinstance(raw.get("text"), str):
        raise ValueError(f"{path}: record {name} has the keys {sorted(raw)}; the shapes read are {SHAPES}")
    return Record(
        name,
        str(raw.get("category") or ""),
        messages or [],
        text,
        tuple(tools if isinstance(tools := raw.get("tools"), list) else ()),
    )


def parse_all(raw: RawRecords, indices: range, path: str) -> Iterator[Record]:
    """Yield the records at `indices`, one after another; an id that came before gets its index added."""
    seen: set[str] = set()
    for index in indices:
        record = parse(raw[index], index, path)
        if record.id in seen:
            record = record._replace(id=f"{record.id}@{index}")
        seen.add(record.id)
        yield record


def content_text(message: Message) -> str:
    """Return a message's text; of content in parts, the text parts joined."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


def _messages(raw: dict[str, Any]) -> list[Message] | None:
    for key in ("messages", "conversations"):
        if raw.get(key):
            return _from_first_question([_message(message) for message in raw[key]])
    turns = raw.get("turns") or raw.get("prompt")
    if turns and isinstance(turns, list) and isinstance(turns[0], str):
        return [{"role": "user", "content": turns[0]}]
    question = next((key for key in QUESTIONS if isinstance(raw.get(key), str)), None)
    if question is None:
        return None
    told, answer = raw[question], raw.get("output" if question == "instruction" else "answer")
    if question == "instruction" and raw.get("input"):
        told = f"{told}\n\n{raw['input']}"
    system = [{"role": "system", "content": raw["system"]}] if raw.get("system") else []
    answers = [] if answer is None else [{"role": "assistant", "content": answer}]
    return [*system, {"role": "user", "content": told}, *answers]


def _message(message: Message) -> Message:
    """Give a message OpenAI's keys and roles. Empty fields go: Arrow fills them in, and templates look for them."""
    if "from" in message:
        message = {"role": message["from"], "content": message.get("value")}
    kept = {key: value for key, value in message.items() if value is not None}
    return {**kept, "role": ROLES.get(kept.get("role", ""), kept.get("role", "")), "content": kept.get("content", "")}


def _from_first_question(messages: list[Message]) -> list[Message]:
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return [m for m in messages[:first] if m["role"] != "assistant"] + messages[first:]


def _read_file(path: Path) -> RawRecords:
    packed = path.suffix if path.suffix in OPENERS else ""
    kind = Path(path.stem).suffix if packed else path.suffix
    if kind not in FORMATS or (packed and kind == ".parquet"):
        raise ValueError(f"{path}: the formats read are {', '.join(FORMATS)}, all but .parquet also as .gz or .xz")
    if kind == ".parquet":
        table: RawRecords = datasets.load_dataset("parquet", data_files=str(path), split="train")
        return table
    try:
        with OPENERS.get(packed, open)(path, mode="rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); fetch or write the file anew") from error
    return _documents(text) if kind == ".txt" else _json(text, path)


def _documents(text: str) -> list[dict[str, Any]]:
    pieces = text.split(SEPARATOR) if SEPARATOR in text else text.split("\n")
    return [{"text": piece.strip()} for piece in pieces if piece.strip()]


def _json(text: str, path: Path) -> list[dict[str, Any]]:
    """Read an array of records, or a record a line. Lines end at newlines only: JSON strings hold other separators."""
    if text.lstrip().startswith("["):
        lines = [(1, text)]
    else:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    records: list[dict[str, Any]] = []
    for number, line in lines:
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            where = number + error.lineno - 1
            raise ValueError(f"{path}: line {where} is no JSON ({error.msg}); mend or remove it") from error
        records += value if isinstance(value, list) else [value]
    if not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path}: every record must be a JSON object; the shapes read are {SHAPES}")
    return records


def _read_hub(path: str, split: str) -> RawRecords:
    name, _, config = path.partition(":")
    try:
        table: Any = datasets.load_dataset(name, config or None, split=split or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{path}: neither a file here nor a Hub dataset, name or name:config, that loads: {why}"
        ) from error
    if not split:
        table = table[next((key for key in EVALUATION_SPLITS if key in table), next(iter(table)))]
    return table
