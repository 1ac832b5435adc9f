"""Sources of records by name: files, folders, globs, Hub data sets; held-out records, mixtures, provenance."""

import glob
import hashlib
import logging
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from huggingface_hub import HfApi, constants

from data.config import DataConfig
from data.text.files import (
    FORMATS,
    META,
    PARTS,
    SETTINGS,
    Raw,
    check_file,
    content_hash,
    kind_of,
    read_file,
    read_table,
    without_nulls,
)
from data.text.parts import LeftOutError
from data.text.records import Record, read, to_known_shape
from data.text.streams import at
from data.text.transcripts import batches_joined, is_wanted, records_in
from heads.common.connection import check_reachable
from heads.common.errors import one_line, redacted_values
from heads.common.typed import Json
from heads.common.untrusted import parsed_file, regular

log = logging.getLogger(__name__)
T = TypeVar("T")

Where = Mapping[str, Any]  # as data.where says
EVALUATION_SPLITS = ("test", "validation", "train")
SPLIT_WORDS = {  # names of splits in `datasets`
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:.+)?")
SINGLE = "holds a single record, which cannot be both trained on and held out: add records, or give data.held_out=0"
SAMPLED_AT_ONCE = 1000  # random numbers sampled at a time, as in `datasets.interleave_datasets`


@dataclass(frozen=True)
class Files:
    """Local files, which can be iterated more than once."""

    name: str
    files: tuple[Path, ...]
    streaming: bool
    where: Where = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)  # number of left-out records by cause

    def __iter__(self) -> Iterator[Raw]:
        records = chain.from_iterable(records_in(read_file(file)) for file in self.files)
        return _wanted(batches_joined(records) if len(self.files) > 1 else records, self)

    def identity(self) -> str:
        """Return the files' formats and hashes; when streaming, their names, sizes and times."""
        if self.streaming:
            stats = [(file, file.stat()) for file in self.files]
            return repr([(str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file, stat in stats])
        return repr([(kind_of(file), content_hash(file)) for file in self.files])

    def provenance(self) -> Json:
        """Return the number of files, unless streamed the hash of their hashes, and the settings of their answers."""
        record: Json = {"name": self.name, "files": len(self.files)}
        if not self.streaming:
            hashes = [content_hash(file) for file in self.files]
            record["sha256"] = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
        written = []
        for meta in (file.with_name(file.name + META) for file in self.files):
            settings = at(parsed_file(meta, "restore it, or remove it") if meta.is_file() else None, "settings")
            if isinstance(settings, dict) and settings:
                written.append(redacted_values({key: value for key, value in settings.items() if key != "data"}))
        if written:
            record["answers"] = written[0] if all(other == written[0] for other in written) else {"by": "several"}
        return record


@dataclass(frozen=True)
class Hub:
    """A data set of the Hub, memory-mapped after a download, or streamed."""

    name: str
    table: Any
    revision: str
    where: Where = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)  # number of left-out records by cause

    def __iter__(self) -> Iterator[Raw]:
        return _wanted(read_table(lambda: self.table, self.name, "fetch the data set again"), self)

    def identity(self) -> str:
        """Return the name and the revision or fingerprint."""
        return repr((self.name, self.revision))

    def provenance(self) -> Json:
        """Return the name and the revision."""
        return {"name": self.name, "revision": self.revision}


Source = Files | Hub


def _wanted(records: Iterator[Raw], source: Source) -> Iterator[Raw]:
    """Yield the records that `where` selects, and count the others; refuse an empty selection."""
    skipped, first, is_empty = 0, Raw(), True
    for raw in records:
        if is_wanted(raw, source.where):
            is_empty = False
            yield raw
        else:
            skipped, first = skipped + 1, first or raw
            source.left_out["left out by data.where"] = max(skipped, source.left_out["left out by data.where"])
    if is_empty:
        left = f" that data.where leaves; the first has the fields {', '.join(map(str, first))}" if first else ""
        raise ValueError(f"{source.name}: holds no records{left}; give a file or dataset with at least one")


def open_source(name: str, split: str, streaming: bool = False, where: Where = MappingProxyType({})) -> Source:
    """Return the source of a name: a file, folder, glob or Hub data set (`name` or `name:config`); refuse others.

    Args:
        name: a file in one of FORMATS, compressed or not; a folder, whose files in these formats are read in the order
            of their names, except those next to a file of answers; or a glob, read likewise.
        split: the Hub data set's split; for a folder, files whose names contain it or name no split. Empty takes the
            first of test, validation, train.
        streaming: read a Hub data set without downloading the whole.
        where: the fields of `data.where`, which select records.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return Files(name, (path,), streaming, where)
    if path.is_dir():
        inside = (file for file in path.rglob("*") if file.is_file() and kind_of(file) and not _is_beside(file))
        visible = sorted(file for file in inside if not any(p.startswith(".") for p in file.relative_to(path).parts))

        def names(file: Path, name: str) -> bool:
            words = "|".join(SPLIT_WORDS.get(name, (re.escape(name),)))
            return re.search(rf"(?<![a-z0-9])({words})(?![a-z0-9])", str(file.relative_to(path)).lower()) is not None

        if not visible:
            raise ValueError(f"{path}: holds no file in the formats read, {', '.join(FORMATS)}")
        shown = split or next((s for s in EVALUATION_SPLITS if any(names(file, s) for file in visible)), "")
        chosen = [file for file in visible if names(file, shown) or not any(names(file, s) for s in SPLIT_WORDS)]
        if not chosen:
            raise ValueError(f"{path}: no file's name holds the split {split}; set data.split")
        return Files(name, tuple(chosen), streaming, where)
    if glob.has_magic(name):
        paths = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
        # A link, or `**/`, may match a file twice.
        matched = tuple(sorted({file.resolve(): file for file in paths if not _is_beside(file)}.values()))
        if not matched:
            raise ValueError(f"{name}: no file matches; give a pattern that does")
        return Files(name, matched, streaming, where)
    regular(path)  # a pipe must not be taken for a Hub name
    import datasets

    _check_hub_name(name)
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE
    repository, _, config = name.partition(":")
    try:
        table: Any = datasets.load_dataset(repository, config or None, split=split or None, streaming=streaming)
        if not split:
            table = table[next((key for key in EVALUATION_SPLITS if key in table), next(iter(table)))]
        revision = HfApi().dataset_info(repository).sha if streaming else table._fingerprint
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        missing = "neither a file here nor a Hub dataset, name or name:config, that loads"
        raise ValueError(f"{name}: {missing}: {one_line(error)}") from error
    return Hub(name, table, f"{revision}/{split}", where)


def check_source(name: str, split: str = "", least: int = 1) -> None:
    """Refuse unreadable files, JSON Lines of fewer than `least` records (1 or 2), or a Hub set without connection."""
    if not is_local(name):
        _check_hub_name(name)
        return
    source = open_source(name, split)
    assert isinstance(source, Files)
    for file in source.files:
        check_file(file)
    if kind_of(source.files[0]) == ".jsonl" and len(list(islice(source, least))) < least:
        raise ValueError(f"{name}: {SINGLE}")


def is_local(name: str) -> bool:
    """Return whether a source is a file, a folder or a glob, and not a Hub data set."""
    return Path(name).expanduser().exists() or glob.has_magic(name)


def check_name(name: str) -> None:
    """Refuse a name that is neither local nor like a Hub data set's; works offline."""
    here = Path(name).expanduser()
    matched = here.exists() or (glob.has_magic(name) and glob.glob(str(here)))
    if not matched and (kind_of(Path(name)) or not HUB_NAME.fullmatch(name)):
        raise ValueError(f"{name}: neither a file here nor a Hub dataset, name or name:config; give one of these")


def _check_hub_name(name: str) -> None:
    check_name(name)
    try:
        check_reachable(name.partition(":")[0], "dataset")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _is_beside(file: Path) -> bool:
    """Return whether a file belongs to a file of answers: its provenance, or a part being written."""
    if file.name.endswith(META):
        return file.with_name(file.name.removesuffix(META)).is_file()
    return any(folder.suffix == PARTS and (folder / SETTINGS).is_file() for folder in file.parents)


def read_all(source: Source) -> Iterator[Record]:
    """Yield all records of a source of prompts."""
    name = source.name
    records = (read(to_known_shape(raw, index, name), index, name) for index, raw in enumerate(source))
    return _unique(record for record in records if not isinstance(record.error, LeftOutError))


class Part(NamedTuple):
    """A source's training records (a range) and held-out records, with their indices."""

    source: Source
    start: int
    stop: int | None
    held_out: list[tuple[int, Raw]]

    def trained(self) -> Iterator[Record]:
        """Yield the records to train on."""
        for index, raw in enumerate(islice(self.source, self.start, self.stop), self.start):
            yield read(raw, index, self.source.name)


def open_sources(config: DataConfig) -> list[Source]:
    """Return the sources of `data.path` in order, without reading them."""
    return [open_source(name, config.split, config.streaming, config.where or {}) for name in config.paths]


def divide(sources: Sequence[Source], config: DataConfig) -> list[Part]:
    """Split `data.held_out` records off the sources.

    The sources share them evenly; the first ones take the remainder. They are a source's last records, or the first of
    a streamed source; a tenth of it, at least one, where they would be more than half. A single record is refused.
    """
    parts = []
    for i, source in enumerate(sources):
        even, left = divmod(0 if config.prompts else config.held_out, len(sources))
        count = even + (i < left)
        if count == 0:
            parts.append(Part(source, 0, None, []))
            continue
        if config.streaming:
            some = list(enumerate(islice(source, 2 * count)))
            size = len(some)  # or more
        elif isinstance(source, Hub) and not source.where:
            size = len(source.table)
            some = [(at, without_nulls(source.table[at])) for at in range(max(0, size - count), size)]
        else:  # reads a file to its end
            some = list(deque(enumerate(source), maxlen=count))
            size = some[-1][0] + 1
        if size < 2 * count:
            count = min(count, max(1, size // 10))
            why = f"{source.name}: holds {size} records, and data.held_out={config.held_out} would be more than half"
            log.warning("%s: %d held out", why, count)
        if size == 1:
            raise ValueError(f"{source.name}: {SINGLE}")
        held_out = some[:count] if config.streaming else some[-count:]
        start, stop = (count, None) if config.streaming else (0, size - count)
        parts.append(Part(source, start, stop, held_out))
    return parts


def training_records(parts: Sequence[Part], config: DataConfig) -> Iterator[Record]:
    """Yield every record to train on: one source after another, or mixed by `data.weights`."""
    trained = [source_part.trained() for source_part in parts]
    weights = config.weights
    return _unique(chain.from_iterable(trained) if weights is None else interleave(trained, weights, config.seed))


def held_out_records(parts: Sequence[Part]) -> Iterator[Record]:
    """Yield the held-out records, one from each source in turn."""
    held_out = [[read(raw, index, p.source.name) for index, raw in p.held_out] for p in parts]
    return _unique(record for records in zip_longest(*held_out) for record in records if record is not None)


def interleave(sources: Sequence[Iterator[T]], weights: Sequence[float], seed: int) -> Iterator[T]:
    """Mix sources: each item comes from source i with probability weights[i] / sum(weights), sampled by the seed.

    The iterator ends when the first source is exhausted, so nothing repeats and the shares hold. It has the order of
    `datasets.interleave_datasets` with these probabilities and `stopping_strategy="first_exhausted"`.
    """
    rng = np.random.default_rng(seed)
    shares = np.asarray(weights, dtype=np.float64) / sum(weights)
    end: Any = object()
    ahead = [next(source, end) for source in sources]
    while True:
        for i in rng.choice(len(sources), size=SAMPLED_AT_ONCE, p=shares):
            if ahead[i] is end:
                return
            yield ahead[i]
            ahead[i] = next(sources[i], end)
            if ahead[i] is end:
                return


def _unique(records: Iterator[Record]) -> Iterator[Record]:
    """Make a repeated id unique by appending its index."""
    seen: set[str] = set()
    for index, record in enumerate(records):
        name = record.id
        while name in seen:
            name = f"{name}@{index}"
        seen.add(name)
        yield record._replace(id=name)
