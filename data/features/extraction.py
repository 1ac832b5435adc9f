"""Extraction of a data set's features into a store, by the target's forward passes.

Shard k has sequences k·R to (k+1)·R - 1, always computed in the same groups, so the call after a killed extraction
writes the missing shards with the same bytes. Each process claims the shards that it writes, first every world-th
shard, then any that remain, so any number of processes may share a store. A thread hashes and writes a shard while
the next ones are computed; the shard's claim is held until then.
"""

import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import PartialState

from data.batches import Packed, check_known, pack
from data.config import DataConfig
from data.features.source import FeaturesConfig
from data.features.store import META, Copying, FeatureStore, StoreSpec, packed_fingerprint, start
from data.text.prompts import load_training
from heads import HEADS
from heads.base import HeadConfig
from heads.common.errors import report_on_interrupt
from heads.common.files import claim
from heads.common.progress import Bar
from heads.common.target_config import check_sequence_length, context_of
from inference.target.config import ModelConfig, use_device
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.loading import configuration
from inference.target.placement import check_single_process
from inference.target.target import Target

GB, MB = 10**9, 10**6
WAITING = 2  # shards that may wait to be written, which bounds memory on a slow disk
Make = Callable[[list[int]], Copying]


class Layers(NamedTuple):
    """The feature layers to extract: `named`, or a head's layers if it is None."""

    head: HeadConfig
    named: list[int] | None

    def of(self, target: Target | EmbeddingsOnly) -> tuple[int, ...]:
        """Return the layers for a target; refuse unknown ones."""
        if self.named is None:
            kind = HEADS[self.head.name]
            with torch.device("meta"):
                return kind(self.head, target.embeddings).feature_layers
        count = target.spec.num_layers
        if any(not 0 <= layer < count for layer in self.named) or len(set(self.named)) < len(self.named):
            raise ValueError(f"layers is {self.named}: give different layers from 0 to {count - 1}")
        return tuple(self.named)


def spec_of(
    target: Target | EmbeddingsOnly, packed: Packed, layers: tuple[int, ...], config: FeaturesConfig
) -> StoreSpec:
    """Return the spec of a new store of these sequences."""
    spec = target.spec
    sequences, length = packed.token.shape
    store = StoreSpec(
        spec.fingerprint, str(spec), target.quantized, layers, spec.hidden_size, spec.vocab_size,
        packed_fingerprint(packed), sequences, length, config.dtype, 1,
    )  # fmt: skip
    return replace(store, shard_rows=max(1, config.shard_mb * MB // store.sequence_bytes))


def sequences_left(folder: Path, spec: StoreSpec) -> tuple[StoreSpec, int]:
    """Return the spec of a folder's store, or this one for a new store, and the number of sequences still to extract.

    An existing store may have more layers. Other features, or new ones that do not fit on the disk, are refused.
    """
    left = spec.rows
    if (folder / META).exists():
        store = FeatureStore(folder)
        store.check(spec)
        spec, left = store.spec, len(store.missing())
    parent = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    size, free = left * spec.sequence_bytes, shutil.disk_usage(parent).free
    if size > free:
        raise ValueError(
            f"{folder}: {left} sequences take {size / GB:.3f} GB, and the disk has {free / GB:.3f} GB free; give "
            "features.dtype=fp8, fewer layers or less data (data.limit), or more room"
        )
    return spec, left


def extract(store: FeatureStore, make: Make, micro: int, rank: int, world: int) -> int:
    """Write the missing sequences to the store in shards, and return the number of shards of this process.

    `make` computes the tensors of at most `micro` sequences in one call. If a write is refused, finished shards stay.
    """
    spec, written = store.spec, 0
    share = -(-len(store.missing()) // world)
    with ThreadPoolExecutor(1) as thread, Bar(share, "extracting sequences") as bar:
        waiting = deque[Future[None]]()
        writer = FeatureStore(store.folder)  # a store object for the writing thread
        # This process's own shards come first, the others' after them.
        for number in sorted(range(spec.shards), key=lambda shard: shard % world != rank):
            name, sequences = f"{number:06d}", spec.shard(number)
            if all(map(store.has, sequences)):
                continue
            with ExitStack() as claims:
                free = claims.enter_context(claim(store.lock(name), wait=False))
                store.refresh()
                if not free or all(map(store.has, sequences)):
                    continue
                groups = []
                for begin in range(0, len(sequences), micro):
                    group = sequences[begin : begin + micro]
                    groups.append(make(group))
                    bar.show(min(bar.done + len(group), share))
                while waiting and (len(waiting) >= WAITING or waiting[0].done()):
                    waiting.popleft().result()
                waiting.append(thread.submit(_write, writer, name, sequences, groups, claims.pop_all()))
                written += 1
        for write in waiting:
            write.result()
    store.refresh()
    return written


def _write(store: FeatureStore, name: str, sequences: list[int], groups: list[Copying], held: ExitStack) -> None:
    with held:
        store.write(name, sequences, *(group.result() for group in groups))


def extract_features(
    model: ModelConfig,
    data: DataConfig,
    config: FeaturesConfig,
    layers: Layers,
    workload: str | None,
    say: Callable[[str], None],
) -> None:
    """Extract the features of all packed sequences that are missing in the store; every process calls it.

    Args:
        workload: evaluation prompts that no sample may hold, in addition to those of `data`; None for no others.
        say: a function that prints a line.

    Raises:
        ValueError: the store does not fit, the folder holds something else, or a write failed.
    """
    check_sequence_length(data.length, context_of(configuration(model.path, model.trust_remote_code)), model.path)
    state = PartialState(cpu=use_device(model.device).type == "cpu")
    check_single_process(model.placed, "an extraction")
    target = Target.of(model, device=str(state.device))
    packed = pack(load_training(data, target.tokenizer, 0, workload).samples, data.length)
    check_known(packed, (), target.tokenizer, target.embeddings.vocab_size)
    folder = config.folder
    spec, left = sequences_left(folder, spec_of(target, packed, layers.of(target), config))

    def make(sequences: list[int]) -> Copying:
        return start(target, packed.token[sequences].long(), packed.document[sequences].long(), spec)

    if left and state.is_main_process:
        say(f"{left} sequences to extract: {left * spec.sequence_bytes / GB:.3f} GB")
    state.wait_for_everyone()
    store = FeatureStore.create(folder, spec)

    def kept() -> str:
        store.refresh()
        held = spec.rows - len(store.missing())
        return f"{held} of {spec.rows} sequences are kept in {folder}; the same command continues"

    with report_on_interrupt(kept):
        written = extract(store, make, config.micro_rows, state.process_index, state.num_processes)
    state.wait_for_everyone()
    store.refresh()
    missing = len(store.missing())
    unfinished = f"; {missing} sequences are still being written by another command" if missing else ""
    say(f"{folder}: {written} shards written by process {state.process_index}, {store.bytes() / GB:.3f} GB{unfinished}")
