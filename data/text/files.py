"""Files to raw records: JSON Lines, JSON, Parquet and text, compressed or not.

A JSON array or an object over several lines is read as a whole; all else is streamed, so a reader may stop early.
"""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from io import TextIOBase, TextIOWrapper
from pathlib import Path
from typing import Any

from heads.common.errors import one_line
from heads.common.untrusted import DEEPEST, TOO_DEEP, shallow

Raw = dict[str, Any]

SEPARATOR = "<|endoftext|>"
FORMATS = (".json", ".jsonl", ".parquet", ".txt")


def _open_zst(path: Path, mode: str, encoding: str) -> TextIOBase:
    """Open a file by the decompressor of pyarrow, which `datasets` installs; Python has none before 3.14."""
    import pyarrow

    assert mode == "rt"
    return TextIOWrapper(pyarrow.input_stream(str(path), compression="zstd"), encoding=encoding)


OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _open_zst}
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError)
HEAD = 1 << 24  # characters at the start of a text in which its separator is searched
BATCH = 100  # number of a Parquet file's records in memory
META, PARTS, SETTINGS = ".meta.json", ".parts", "settings.json"  # files next to answers that are not data
CHUNK = 1 << 20  # characters or bytes read at once


def kind_of(path: Path) -> str:
    """Return the file's format, one of FORMATS, or empty."""
    packed = path.suffix in OPENERS
    kind = Path(path.stem).suffix if packed else path.suffix
    return "" if kind not in FORMATS or (packed and kind == ".parquet") else kind


def read_file(path: Path) -> Iterator[Raw]:
    """Yield the records of a file in order.

    A text's documents end at `<|endoftext|>` if its first HEAD characters contain one, else at each newline.

    Raises:
        ValueError: by file and line, once read: an unknown format, no access, a record that is no object or too deep.
    """
    kind = check_file(path)
    if kind == ".parquet":
        import datasets

        options: dict[str, Any] = {"data_files": str(path), "split": "train", "streaming": True, "batch_size": BATCH}
        table = partial(datasets.load_dataset, "parquet", **options)
        yield from read_table(table, str(path), "fetch or write the file again")
        return
    with _reading(path), _opened(path) as file:
        yield from _documents(file) if kind == ".txt" else _json(file, path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise ValueError(f"{path}: cannot be read ({error}); fetch or write the file again") from error


def _opened(path: Path) -> TextIOBase:
    if path.suffix not in OPENERS:
        return path.open(encoding="utf-8-sig")
    return OPENERS[path.suffix](path, mode="rt", encoding="utf-8-sig")


def check_file(path: Path) -> str:
    """Return a file's format; refuse a file of an unknown format, or one that cannot be opened."""
    kind = kind_of(path)
    if not kind:
        packed = "all but .parquet also as " + ", ".join(OPENERS)
        raise ValueError(f"{path}: the formats read are {', '.join(FORMATS)}, {packed}")
    with _reading(path):
        path.open("rb").close()
    return kind


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with _reading(path), path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def read_table(table: Callable[[], Iterable[Raw]], name: str, remedy: str) -> Iterator[Raw]:
    """Yield the records of the `datasets` table that `table` opens; refuse an unreadable record by its number."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its log repeats the error
    read = 0
    try:
        for record in table():
            yield without_nulls(record)
            read += 1
    except (*UNREADABLE, ValueError, MemoryError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{name}: record {read} cannot be read ({one_line(error)}); {remedy}") from error


def without_nulls(record: Raw) -> Raw:
    """Return a table's record without the nulls that Arrow puts into missing fields."""
    return {key: filled(value) for key, value in record.items()}


def filled(value: Any, given: Container[str] = ()) -> Any:
    """Return a copy without None fields at any depth, except inside the fields named in `given`."""
    if isinstance(value, dict):
        fields = ((key, inner) for key, inner in value.items() if inner is not None)
        return {key: inner if key in given else filled(inner, given) for key, inner in fields}
    return [filled(inner, given) for inner in value] if isinstance(value, list) else value


def _documents(file: TextIOBase) -> Iterator[Raw]:
    end, text = "", ""
    while more := file.read(HEAD):
        end = end or (SEPARATOR if SEPARATOR in more else "\n")
        *whole, text = (text + more).split(end)
        yield from ({"text": document.strip()} for document in whole if document.strip())
    if text.strip():
        yield {"text": text.strip()}


def _json(file: TextIOBase, path: Path) -> Iterator[Raw]:
    """Read an array of records, one record, or one per line; only newlines end lines: JSON strings may hold others."""
    for number, line in enumerate(file, 1):
        if line.isspace():
            continue
        # An array, or an object that begins on a line of its own, may span lines, so the whole file is read.
        text = line + file.read() if line.lstrip().startswith("[") or line.strip() == "{" else line
        try:
            value = json.loads(text.rstrip())  # an error of an incomplete object names this line
            records = value if isinstance(value, list) else [value]
            if text.count("{") + text.count("[") > DEEPEST:  # otherwise it cannot be nested deeper
                records = list(map(shallow, records))
        except json.JSONDecodeError as error:
            where = number + error.lineno - 1
            raise ValueError(f"{path}: line {where} is no JSON ({error.msg}); fix or remove it") from error
        except (RecursionError, ValueError) as error:  # ValueError also for a number with thousands of digits
            why = TOO_DEEP if isinstance(error, RecursionError) else error
            raise ValueError(f"{path}: line {number} cannot be read ({why}); fix or remove it") from error
        for record in records:
            if not isinstance(record, dict):
                raise ValueError(f"{path}: line {number}: every record must be a JSON object, not {str(record)[:40]!r}")
            yield record
