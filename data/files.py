"""Files to raw records, one after another: JSON Lines, JSON, Parquet and text, as they are or packed.

Only a .json array is read as a whole; of the others a record is in memory at a time, so a reader may stop early.
"""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from io import TextIOBase
from pathlib import Path
from typing import Any

import datasets

Raw = dict[str, Any]

SEPARATOR = "<|endoftext|>"
FORMATS = (".json", ".jsonl", ".parquet", ".txt")
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError)
HEAD = 1 << 24  # characters of a text in which its separator is looked for
META, PARTS, SETTINGS = ".meta.json", ".parts", "settings.json"  # what stands beside answers, and is no data
CHUNK = 1 << 20  # characters or bytes read at once


def kind_of(path: Path) -> str:
    """Return the file's format, one of FORMATS; empty where it has none of them."""
    packed = path.suffix in OPENERS
    kind = Path(path.stem).suffix if packed else path.suffix
    return "" if kind not in FORMATS or (packed and kind == ".parquet") else kind


def read_file(path: Path) -> Iterator[Raw]:
    """Yield the records of a file in their order.

    A text's documents end at `<|endoftext|>`, where its first HEAD characters hold one, else at each newline.

    Raises:
        ValueError: the format is unknown, the file cannot be read, or a record is no JSON object; file and line are
            named. It comes when the reader gets there.
    """
    kind = kind_of(path)
    if not kind:
        raise ValueError(f"{path}: the formats read are {', '.join(FORMATS)}, all but .parquet also as .gz or .xz")
    if kind == ".parquet":
        yield from _parquet(path)
        return
    try:
        with OPENERS.get(path.suffix, open)(path, mode="rt", encoding="utf-8-sig") as file:
            yield from _documents(file) if kind == ".txt" else _json(file, path)
    except UNREADABLE as error:
        raise ValueError(f"{path}: cannot be read ({error}); fetch or write the file anew") from error


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(CHUNK):
                digest.update(block)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error}); fetch or write the file anew") from error
    return digest.hexdigest()


def _parquet(path: Path) -> Iterator[Raw]:
    read = 0
    try:
        for record in datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True):
            yield record
            read += 1
    except (*UNREADABLE, ValueError, datasets.exceptions.DatasetsError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path}: record {read} cannot be read ({why}); fetch or write the file anew") from error


def _documents(file: TextIOBase) -> Iterator[Raw]:
    text = file.read(HEAD)
    end = SEPARATOR if SEPARATOR in text else "\n"
    more = text
    while more:
        more = file.read(CHUNK)
        *whole, text = (text + more).split(end) if more else (*text.split(end), "")
        yield from ({"text": piece.strip()} for piece in whole if piece.strip())


def _json(file: TextIOBase, path: Path) -> Iterator[Raw]:
    """Read an array of records, or a record a line. Lines end at newlines only: JSON strings hold other separators."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        # An array may reach over lines, so it is read to the file's end.
        whole = line + file.read() if line.lstrip().startswith("[") else line
        value = _parsed(whole, number, path)
        for record in value if isinstance(value, list) else [value]:
            if not isinstance(record, dict):
                raise ValueError(f"{path}: line {number}: every record must be a JSON object, not {str(record)[:40]!r}")
            yield record


def _parsed(text: str, number: int, path: Path) -> Any:
    try:
        return json.loads(text.rstrip())  # an object that breaks off is missing its end there, not on the next line
    except json.JSONDecodeError as error:
        where = number + error.lineno - 1
        raise ValueError(f"{path}: line {where} is no JSON ({error.msg}); mend or remove it") from error
    except RecursionError as error:
        raise ValueError(f"{path}: line {number} is nested too deeply to be read; mend or remove it") from error
