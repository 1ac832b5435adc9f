"""A feature store on disk: shards of packed sequences, each with an index entry, and a meta file.

    FOLDER/meta.json                   the contents of the store: `StoreSpec`, with a checksum of itself
    FOLDER/shards/NAME.safetensors     the tensors of some sequences, one after another
    FOLDER/index/NAME.json             the numbers of those sequences, the digest of each, and a checksum of itself
    FOLDER/locks/NAME                  empty; held by the process that writes the shard

An entry is written after its shard, both atomically, so a reader sees only finished shards, also while others write.
Every read checks the sequence's digest, XXH3 with 128 bits, which takes as long as reading the memory. Digests detect
damage, not tampering.

Hidden states have one scale per token and layer. The error of a value x in a vector with largest magnitude m: 0 in
fp32; at most |x| / 2^8 in bf16 (twice that of rounding to nearest); at most |x| / 2^4 + m / 448 / 2^10 in fp8 (e4m3);
each up to fp32's own rounding.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import xxhash
from jaxtyping import Bool, Float, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from data.batches import Packed
from heads.base import Features, Layers, NamedTensors
from heads.common.files import atomic_write, claim, read_checked, write_checked
from heads.common.typed import Count, Number, OneOf, typed
from heads.shapes import LayerRows, Rows, Sequences
from inference.target.target import Target

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
StoredDtype = Annotated[str, OneOf(tuple(DTYPES))]
LARGEST = 448.0  # fp8's largest value; the largest value of a vector is scaled to it
SCALE_BYTES = 4
FORMAT = 2  # version of new stores
META, SHARDS, INDEX, LOCKS = "meta.json", "shards", "index", "locks"
HIDDEN, LAST, SCALE = "hidden", "last", "_scale"  # tensor names, and the suffix of a scale's name
OPEN = 16  # maximum number of shards open for reading
MUST_AGREE = {
    "target": "fingerprint of the target's weights", "quantize": "quantisation of the target", "width": "width",
    "vocab": "vocabulary", "length": "data.length", "data": "fingerprint of the packed sequences",
    "rows": "number of packed sequences", "layers": "feature layers", "dtype": "features.dtype",
}  # fmt: skip


class FeatureRequest(NamedTuple):
    """The requested features: feature layers and dtype."""

    layers: Layers
    dtype: torch.dtype


class DamagedError(ValueError):
    """A missing or damaged file of a store; the message names the file."""


@dataclass(frozen=True)
class StoreSpec:
    """The contents of a store."""

    target: str  # the target's fingerprint
    name: str  # the target's name, for messages
    quantize: str | None  # how the target's weights were quantised
    layers: Layers  # the feature layers, as `heads.base` counts them
    width: Count  # hidden size of the target
    vocab: Count  # vocabulary size of the target
    data: str  # fingerprint of the packed sequences
    rows: Number  # number of packed sequences
    length: Count  # tokens per packed sequence
    dtype: StoredDtype  # dtype of the hidden states
    shard_rows: Count  # maximum number of sequences per shard

    @property
    def sequence_bytes(self) -> int:
        """Return the bytes of a sequence on disk, without the overhead of its shard and entry."""
        return self.length * (len(self.layers) + 1) * size(self.width, self.dtype)

    def shard(self, number: int) -> list[int]:
        """Return the sequences of shard `number` of an extraction."""
        return list(range(number * self.shard_rows, min(self.rows, (number + 1) * self.shard_rows)))

    @property
    def shards(self) -> int:
        """Return the number of shards of a whole extraction."""
        return -(-self.rows // self.shard_rows)


@dataclass(frozen=True)
class Entry:
    """A shard's index entry: its sequences in order, their digests, and the size of its file."""

    rows: list[int]
    digests: list[str]
    bytes: int


def packed_fingerprint(packed: Packed) -> str:
    """Return the SHA-256 of the sequences' tokens and documents, which determine the features; loss masks do not."""
    digest = hashlib.sha256()
    for tensor in (packed.token, packed.document):
        digest.update(np.ascontiguousarray(tensor.numpy(), dtype="<i4").tobytes())
    return digest.hexdigest()


class FeatureStore:
    """A feature store in a folder, for reading and writing; `spec` describes its contents."""

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
        self.damaged: dict[str, str] = {}  # ignored shard -> why: it or its entry is damaged
        self.entries: dict[str, Entry] = {}
        self._location: dict[int, tuple[str, int]] = {}  # sequence -> shard name, index in the shard
        # Files close with their last reference.
        self._opened: Any = lru_cache(OPEN)(lambda name: safe_open(self._shard(name), "pt"))
        self.refresh()

    @classmethod
    def create(cls, folder: Path, spec: StoreSpec) -> "FeatureStore":
        """Open or create the store in a folder; refuse one with other features, and a full disk."""
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
        """Refuse a spec that differs from the store's in MUST_AGREE; the store may have more layers."""
        for key in keys:
            held, expected = getattr(self.spec, key), getattr(spec, key)
            if held != expected and not (key == "layers" and set(expected) <= set(held)):
                shown = f"{held} there and {expected} here" if key != "target" else f"it is of {self.spec.name}"
                raise ValueError(
                    f"{self.folder}: holds other features than these, by the {MUST_AGREE[key]} ({shown}); give "
                    "another features.path, or the overrides that it was extracted with"
                )

    def refresh(self) -> None:
        """Read the entries of shards that were finished since the last call."""
        for file in sorted((self.folder / INDEX).glob("[!.]*.json")):  # without files that are being written
            if file.stem not in self.entries:
                self.damaged.pop(file.stem, None)
                shard = self._shard(file.stem)
                try:
                    entry = typed(Entry, read_checked(file), f"{file}: entry")
                    if not shard.is_file():
                        raise ValueError(f"{shard}: is not there, though the index has it")
                    if (size := shard.stat().st_size) != entry.bytes:
                        raise ValueError(f"{shard}: damaged, it has {size} bytes instead of {entry.bytes}")
                except ValueError as error:
                    self.damaged[file.stem] = str(error)
                else:
                    self._location.update({sequence: (file.stem, i) for i, sequence in enumerate(entry.rows)})
                    self.entries[file.stem] = entry

    def has(self, sequence: int) -> bool:
        """Return whether a sequence is in a finished shard."""
        return sequence in self._location

    def missing(self) -> list[int]:
        """Return the sequences that no finished shard holds."""
        return [sequence for sequence in range(self.spec.rows) if sequence not in self._location]

    def bytes(self) -> int:
        """Return the bytes of the finished shards."""
        return sum(entry.bytes for entry in self.entries.values())

    def read(self, sequence: int) -> NamedTensors:
        """Return a sequence's tensors "1 …"; raise DamagedError if it differs from what was written, or is missing."""
        name, index = self._location[sequence]
        try:
            opened = self._opened(name)
            names = list(opened.keys())
            tensors = {key: opened.get_slice(key)[index : index + 1] for key in names}
            digest = self.entries[name].digests[index]
        except (OSError, SafetensorError, IndexError, TypeError, RuntimeError, OverflowError) as error:
            raise self._damage(name, sequence, f"cannot be read ({' '.join(str(error).split())})") from error
        if self._digest(tensors) != digest:
            raise self._damage(name, sequence, "is not what was written, its checksum differs")
        return tensors

    def write(self, name: str, sequences: list[int], *groups: NamedTensors) -> None:
        """Write a claimed shard of groups of sequences, then its entry; refuse a full disk; other shards stay."""
        tensors = {key: torch.cat([group[key] for group in groups]) for key in groups[0]}
        content = save(tensors)
        rows = [{key: tensor[i : i + 1] for key, tensor in tensors.items()} for i in range(len(sequences))]
        entry = Entry(sequences, list(map(self._digest, rows)), len(content))
        try:
            atomic_write(self._shard(name), content)
            write_checked(self.folder / INDEX / f"{name}.json", asdict(entry))
        except OSError as error:
            raise ValueError(
                f"{self.folder}: shard {name} could not be written ({error.strerror or error}); every other shard is "
                "whole: free space, and the same command continues"
            ) from error
        self.refresh()

    def lock(self, name: str) -> Path:
        """Return the lock file of a shard, or of any other name."""
        return self.folder / LOCKS / name

    def _digest(self, tensors: NamedTensors) -> str:
        digest = xxhash.xxh3_128()
        for name in sorted(tensors):
            digest.update(name.encode())
            digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _shard(self, name: str) -> Path:
        return self.folder / SHARDS / f"{name}.safetensors"

    def _damage(self, name: str, sequence: int, what: str) -> DamagedError:
        return DamagedError(
            f"{self._shard(name)}: sequence {sequence} {what}; remove {self.folder / INDEX / name}.json and extract "
            "again"
        )


class EncodedTensor(NamedTuple):
    """Values in a dtype of DTYPES, with one scale per vector if the dtype needs scales."""

    value: Shaped[Tensor, "*n D"]
    scale: Float[Tensor, "*n"] | None


def encode(x: Float[Tensor, "*n D"], dtype: str) -> EncodedTensor:
    """Return finite values in `dtype`, a key of DTYPES."""
    if dtype != "fp8":
        return EncodedTensor(x.to(DTYPES[dtype]), None)
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)  # positive also for zeros
    scaled = (x / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return EncodedTensor(scaled.to(DTYPES[dtype]), scale)


def decode(encoded: EncodedTensor, dtype: torch.dtype) -> Float[Tensor, "*n D"]:
    """Return the values as floats of `dtype`."""
    if encoded.scale is None:
        return encoded.value.to(dtype)
    return (encoded.value.float() * encoded.scale[..., None]).to(dtype)


def size(width: int, dtype: str) -> int:
    """Return the bytes of an encoded vector of `width` values."""
    return width * DTYPES[dtype].itemsize + (SCALE_BYTES if dtype == "fp8" else 0)


class States(NamedTuple):
    """Hidden states of packed sequences: the feature layers' states, and the last hidden state after the final norm."""

    hidden: LayerRows
    last_hidden: Rows


class Copying(NamedTuple):
    """Sequences that are being copied to the host asynchronously."""

    sequences: NamedTensors
    finite: Bool[Tensor, ""]  # whether all states are finite
    copied: "torch.cuda.Event | None"  # event after the last copy; None on a CPU
    name: str  # the target's name

    def result(self) -> NamedTensors:
        """Wait for the sequences; refuse states that are not finite."""
        if self.copied is not None:
            self.copied.synchronize()
        if not self.finite:
            raise ValueError(
                f"{self.name}: a hidden state is not finite, so nothing is kept of it; load the target in bfloat16 or "
                "float32 (model.dtype)"
            )
        return self.sequences


def start(target: Target, token: Sequences, document: Sequences, spec: StoreSpec) -> Copying:
    """Return packed sequences' tensors for a store, by a forward pass of the target.

    On a GPU this is asynchronous: states are encoded there, and copied to the host.
    """
    states = target.features(token, document, spec.layers)
    bounds = [bound for x in (states.hidden, states.last_hidden) if x.numel() for bound in x.aminmax()]
    finite, on_gpu = torch.stack(bounds).isfinite().all(), states.last_hidden.device.type == "cuda"

    def copy(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=on_gpu)  # from a GPU to pinned memory

    sequences = {}
    for name, tensor in {**({HIDDEN: states.hidden} if spec.layers else {}), LAST: states.last_hidden}.items():
        encoded = encode(tensor, spec.dtype)
        sequences[name] = copy(encoded.value)
        if encoded.scale is not None:
            sequences[name + SCALE] = copy(encoded.scale)
    finite = copy(finite)
    copied = torch.cuda.current_stream(states.last_hidden.device).record_event() if on_gpu else None
    return Copying(sequences, finite, copied, spec.name)


def decode_sequences(
    sequences: NamedTensors, token: Sequences, document: Sequences, request: FeatureRequest, spec: StoreSpec
) -> Features:
    """Decode stored sequences to features with the requested layers, on their device."""
    if request.layers:
        indices = [spec.layers.index(layer) for layer in request.layers]
        chosen = slice(None) if request.layers == spec.layers else indices
        scale = sequences.get(HIDDEN + SCALE)
        encoded = EncodedTensor(sequences[HIDDEN][:, :, chosen], None if scale is None else scale[:, :, chosen])
        hidden = decode(encoded, request.dtype)
    else:
        hidden = torch.zeros(*token.shape, 0, spec.width, dtype=request.dtype, device=token.device)
    last = decode(EncodedTensor(sequences[LAST], sequences.get(LAST + SCALE)), request.dtype)
    return Features(token, hidden, last, document)
