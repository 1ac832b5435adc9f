"""A store of features on disk: shards of whole packed rows, each with an index entry, under one meta file.

    FOLDER/meta.json                   the contents of the store: `StoreSpec`, with a checksum of itself
    FOLDER/shards/NAME.safetensors     the tensors of some rows, row by row
    FOLDER/index/NAME.json             the numbers of those rows, the SHA-256 of each, and a checksum of itself
    FOLDER/locks/NAME                  empty; held by the process that writes the shard

An entry is written after its shard, and both whole or not at all, so a reader sees finished shards only, also while
others write. Every row is checked whenever it is read.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from data.batches import Packed
from data.features.quantize import DTYPES, size
from heads.common.files import claim, read_checked, write_checked, write_whole
from heads.common.ranges import Count, Number, OneOf
from heads.common.typed import fits, typed
from heads.common.untrusted import inside

FORMAT = 1
META, SHARDS, INDEX, LOCKS = "meta.json", "shards", "index", "locks"
OPEN = 16  # shards kept open for reading at most
TOP_BYTES = 8  # a token and its log-prob
MUST_AGREE = {
    "target": "fingerprint of the target's weights", "quantize": "quantisation of the target", "width": "width",
    "vocab": "vocabulary", "length": "data.length", "data": "fingerprint of the packed rows",
    "rows": "number of packed rows", "layers": "feature layers", "dtype": "features.dtype",
    "teacher": "features.teacher", "k": "features.k",
}  # fmt: skip

Row = dict[str, Tensor]


class DamagedError(ValueError):
    """A missing or damaged file of a store; the message names it."""


@dataclass(frozen=True)
class StoreSpec:
    """The contents of a store."""

    target: str  # the target's fingerprint
    name: str  # the target's, for people
    quantize: str | None  # how the target's weights were quantised
    layers: tuple[int, ...]  # the feature layers, as `heads.base` counts them
    width: Count  # of the target
    vocab: Count  # of the target
    data: str  # the fingerprint of the packed rows
    rows: Number  # how many packed rows there are
    length: Count  # tokens of a packed row
    dtype: Annotated[str, OneOf(tuple(DTYPES))]  # of the hidden states
    teacher: Annotated[str, OneOf(("state", "top_k"))]  # the last hidden state, or the top k log-probs
    k: Number
    shard_rows: Count  # of a shard at most

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on disk, apart from some hundred bytes of overhead of its shard and entry."""
        hidden = len(self.layers) * size(self.width, self.dtype)
        teacher = size(self.width, self.dtype) if self.teacher == "state" else self.k * TOP_BYTES
        return self.length * (hidden + teacher)

    def shard(self, number: int) -> list[int]:
        """Return the rows of an extraction's shard."""
        return list(range(number * self.shard_rows, min(self.rows, (number + 1) * self.shard_rows)))

    @property
    def shards(self) -> int:
        """The number of shards of a whole extraction."""
        return -(-self.rows // self.shard_rows)


class Entry(NamedTuple):
    """A shard's rows, in its order, the SHA-256 of each, and the size of its file."""

    rows: list[int]
    digests: list[str]
    bytes: int


def packed_fingerprint(packed: Packed) -> str:
    """Return the SHA-256 of the rows' tokens and documents, which determine the features; loss masks do not."""
    digest = hashlib.sha256()
    for tensor in (packed.token, packed.document):
        digest.update(np.ascontiguousarray(tensor.numpy(), dtype="<i4").tobytes())
    return digest.hexdigest()


class FeatureStore:
    """The store in a folder, open for reading and writing; `spec` is its contents."""

    def __init__(self, folder: Path) -> None:
        """Open a store; refuse a folder without one, a damaged meta file, and another format."""
        self.folder = folder
        try:
            meta = read_checked(folder / META)
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder}: holds no feature store; extract one: python data/run.py features=stored "
                f"features.path={folder} with the overrides of the training"
            ) from error
        except ValueError as error:
            raise ValueError(f"{error}; put a copy in its place, or remove the folder and extract again") from error
        if meta.pop("format", None) != FORMAT:
            raise ValueError(f"{folder}: a feature store of another format than {FORMAT}; extract again elsewhere")
        try:
            self.spec = typed(StoreSpec, meta)
        except ValueError as error:
            raise ValueError(f"{folder / META}: {error}; put a copy in its place, or extract again elsewhere") from None
        self.damaged: dict[str, str] = {}  # shards that are ignored, and why: they or their entries are damaged
        self.entries: dict[str, Entry] = {}
        self._location: dict[int, tuple[str, int]] = {}  # of each row: its shard's name and its index in there
        # Closed with their last reference.
        self._opened: Any = lru_cache(OPEN)(lambda name: safe_open(self._shard(name), "pt"))
        self.refresh()

    @classmethod
    def create(cls, folder: Path, spec: StoreSpec) -> "FeatureStore":
        """Open the store in a folder, or create it; refuse one of other features, and a full disk."""
        with claim(folder / LOCKS / META, wait=True):
            if not (folder / META).exists():
                try:
                    write_checked(folder / META, {"format": FORMAT, **asdict(spec)})
                except OSError as error:
                    raise ValueError(f"{folder / META}: could not be written ({error.strerror}); free space") from error
        store = cls(folder)
        store.check(spec)
        return store

    def check(self, spec: StoreSpec, keys: Iterable[str] = MUST_AGREE) -> None:
        """Refuse a spec that differs from the store's in one of these keys, but for layers that it has beside."""
        for key in keys:
            held, expected = getattr(self.spec, key), getattr(spec, key)
            if held != expected and not (key == "layers" and set(expected) <= set(held)):
                shown = f"{held} there and {expected} here" if key != "target" else f"it is of {self.spec.name}"
                raise ValueError(
                    f"{self.folder}: holds other features than these, by the {MUST_AGREE[key]} ({shown}); give "
                    "another features.path, or the overrides that it was extracted with"
                )

    def refresh(self) -> None:
        """Read the entries of shards that were finished since."""
        for file in sorted((self.folder / INDEX).glob("[!.]*.json")):  # none that is being written
            if file.stem not in self.entries:
                self.damaged.pop(file.stem, None)
                try:
                    entry = self._entry(file)
                except ValueError as error:
                    self.damaged[file.stem] = str(error)
                else:
                    self.entries[file.stem] = entry
                    self._location.update({row: (file.stem, i) for i, row in enumerate(entry.rows)})

    def _entry(self, file: Path) -> Entry:
        inside(file.parent, file.name)
        shard = inside(self.folder / SHARDS, self._shard(file.stem).name)
        content: dict[str, Any] = dict.fromkeys(Entry._fields) | read_checked(file)
        rows, digests, size = (content[field] for field in Entry._fields)
        if not (fits(list[Any], rows) and fits(list[str], digests) and fits(int, size) and len(rows) == len(digests)):
            raise ValueError(f"{file}: damaged, it does not list rows with their digests and its bytes")
        if not all(type(row) is int and 0 <= row < self.spec.rows for row in rows) or len(set(rows)) != len(rows):
            raise ValueError(f"{file}: damaged, its rows are not different ones of {self.spec.rows}")
        if not shard.is_file():
            raise ValueError(f"{shard}: is not there, though the index has it")
        if shard.stat().st_size != size:
            raise ValueError(f"{shard}: damaged, it has {shard.stat().st_size} bytes instead of {size}")
        return Entry(rows, digests, size)

    def has(self, row: int) -> bool:
        """Whether a row is in a finished shard."""
        return row in self._location

    def missing(self) -> list[int]:
        """Return the rows that no finished shard holds."""
        return [row for row in range(self.spec.rows) if row not in self._location]

    def bytes(self) -> int:
        """Bytes of the finished shards."""
        return sum(entry.bytes for entry in self.entries.values())

    def read(self, row: int) -> Row:
        """Return a row's tensors, each with one row; a DamagedError where it is not what was written, or gone."""
        name, index = self._location[row]
        try:
            opened = self._opened(name)
            names: list[str] = list(opened.keys())
            tensors = {key: opened.get_slice(key)[index : index + 1] for key in names}
        except (OSError, SafetensorError, IndexError, TypeError, RuntimeError, OverflowError) as error:
            raise self._damage(name, row, f"cannot be read ({' '.join(str(error).split())})") from error
        if digest(tensors) != self.entries[name].digests[index]:
            raise self._damage(name, row, "is not what was written, its checksum differs")
        return tensors

    def write(self, name: str, rows: list[int], tensors: Row) -> None:
        """Write a shard and then its entry. The caller holds its claim.

        Raises:
            ValueError: the disk refused; no other shard is touched.
        """
        digests = [digest({key: tensor[i : i + 1] for key, tensor in tensors.items()}) for i in range(len(rows))]
        content = save({key: tensor.contiguous() for key, tensor in tensors.items()})
        entry = Entry(rows, digests, len(content))
        try:
            write_whole(self._shard(name), content)
            write_checked(self.folder / INDEX / f"{name}.json", entry._asdict())
        except OSError as error:
            raise ValueError(
                f"{self.folder}: shard {name} could not be written ({error.strerror or error}); every other shard is "
                "whole: free space, and the same command goes on"
            ) from error
        self.refresh()

    def lock(self, name: str) -> Path:
        """Return the file to claim for a shard, or for any other name."""
        return self.folder / LOCKS / name

    def _shard(self, name: str) -> Path:
        return self.folder / SHARDS / f"{name}.safetensors"

    def _damage(self, name: str, row: int, what: str) -> DamagedError:
        return DamagedError(
            f"{self._shard(name)}: row {row} {what}; remove {self.folder / INDEX / name}.json and extract again, or "
            "give features.on_missing=compute"
        )


def digest(tensors: dict[str, Shaped[Tensor, "..."]]) -> str:
    """Return the SHA-256 of tensors' names and bytes."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        sha256.update(name.encode())
        sha256.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return sha256.hexdigest()
