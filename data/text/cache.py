"""A cache of tokenised samples with loss masks: one process writes it, all map it.

`FOLDER/<key>/` has `samples.arrow`, the held-out `prompts.jsonl`, and `meta.json` with counts and checksums. It is
written atomically, under a lock.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from data.config import DataConfig
from data.text.files import content_hash
from data.text.masks import Sample
from heads.common.files import claim, read_checked, replacing, write_checked
from heads.common.resolvers import ROOT

log = logging.getLogger(__name__)

SAMPLES, PROMPTS, META = "samples.arrow", "prompts.jsonl", "meta.json"
SHAPELESS = ("length", "cache")  # options that do not affect the samples
# Code outside of this package that affects samples: parsing, rendering, encoding.
CODE = ("data/config.py", "heads/common/untrusted.py", "inference/target/tokenizer.py")
BATCH = 1000  # samples in memory at once


class CachedSamples(Sequence[Sample]):
    """The samples of a memory-mapped Arrow file."""

    def __init__(self, path: Path) -> None:
        import datasets

        self._table: Any = datasets.Dataset.from_file(str(path))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Sample(**self._table[index])

    def __iter__(self) -> Iterator[Sample]:
        """Iterate over the samples, with BATCH of them in memory at a time."""
        for rows in self._table.iter(batch_size=BATCH):
            yield from map(Sample, rows["id"], rows["token"], rows["loss_mask"])

    def arrays(self) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Yield each sample's tokens and mask as views of the mapped file."""
        token, mask = (self._table.data.column(name).chunks for name in ("token", "loss_mask"))
        for tokens, masks in zip(token, mask, strict=True):
            offsets = tokens.offsets.to_numpy()
            flat, on = tokens.values.to_numpy(), masks.values.to_numpy()
            for start, end in pairwise(offsets):
                yield flat[start:end], on[start:end]


def cache_key(config: DataConfig, tokenizer: PreTrainedTokenizerBase, sources: Sequence[str]) -> str:
    """Return the cache key: a hash of all that affects the samples.

    That is the tokenizer and its chat template, every option except SHAPELESS, `sources`, the identities of the data
    and of the evaluation prompts, this package's code with CODE, and the tokenising libraries.
    """
    # The code is part of the key, so there is no version number.
    files = (*(ROOT / name for name in CODE), *sorted(Path(__file__).parent.glob("*.py")))
    code = [content_hash(file) for file in files]
    parts = {
        "tokenizer": tokenizer_identity(tokenizer),
        "data": {key: value for key, value in asdict(config).items() if key not in SHAPELESS},
        "sources": list(sources),
        "code": code,
        "libraries": [transformers.__version__, tokenizers.__version__],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of a tokenizer: its model, special tokens and chat template."""
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer.to_str()
    else:
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            core = repr([(file.name, content_hash(file)) for file in sorted(Path(folder).iterdir())])
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    parts = [type(tokenizer).__name__, core, special, tokenizer.all_special_ids, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def write_samples(samples: Iterable[Sample], path: Path) -> None:
    """Write samples as an Arrow file, for `CachedSamples` to map."""
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    columns = {"id": Value("string"), "token": List(Value("int32")), "loss_mask": List(Value("int8"))}
    writer = ArrowWriter(features=Features(columns), path=str(path), writer_batch_size=BATCH)
    try:
        for sample in samples:
            writer.write({"id": sample.id, "token": sample.token, "loss_mask": sample.loss_mask})
    finally:
        writer.finalize()


def cached(folder: Path, fill: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the report of a cache folder; one process fills it if it is missing or damaged.

    `fill` writes SAMPLES and PROMPTS into a folder and returns the report; the folder is renamed afterwards.

    Raises:
        ValueError: the folder cannot be written.
    """
    report = _read(folder)
    if report is not None:
        return report
    try:
        with claim(folder.with_suffix(".lock"), wait=True):
            report = _read(folder)  # another process may have filled it
            if report is None:
                if folder.is_dir():
                    log.warning("%s: damaged; tokenising again", folder)
                with replacing(folder) as rough:
                    report = fill(rough)
                    sums = {name: content_hash(rough / name) for name in (SAMPLES, PROMPTS)}
                    write_checked(rough / META, {"files": sums, "report": report})
            return report
    except OSError as error:
        raise ValueError(
            f"data.cache={folder.parent}: cannot be written ({error}); make room, name another folder, or null for none"
        ) from error


def _read(folder: Path) -> dict[str, Any] | None:
    """Return the report of a cache folder; None if it is missing or damaged."""
    try:
        meta: dict[str, Any] = read_checked(folder / META)
        whole = all(content_hash(folder / name) == meta["files"][name] for name in (SAMPLES, PROMPTS))
        return meta["report"] if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
