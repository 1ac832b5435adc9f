"""Extraction of a data set's features, from its configuration: by the target's forward passes, or from vLLM's files."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState

from data.batches import Packed, check_known, pack
from data.config import DataConfig
from data.features.coding import compute, join, to_row
from data.features.extract import GB, Make, estimate, extract, shard_rows, spec_there, timed
from data.features.source import FeaturesConfig
from data.features.store import FeatureStore, Row, StoreSpec, packed_fingerprint
from data.features.vllm_features import VllmFiles, write_prompts
from data.text.prompts import load_training
from heads import HEADS
from heads.base import HeadConfig
from heads.common.target_config import check_rows, context_of
from inference.target.config import ModelConfig
from inference.target.embeddings import final_norm
from inference.target.embeddings_only import EmbeddingsOnly, load_target
from inference.target.loading import configuration
from inference.target.placement import check_alone
from inference.target.target import Target

log = logging.getLogger(__name__)


class Layers(NamedTuple):
    """The feature layers to extract: `named`, or if it is None those that the head of a configuration reads."""

    head: HeadConfig
    named: list[int] | None

    def of(self, target: Target | EmbeddingsOnly) -> tuple[int, ...]:
        """Return the layers for a target.

        Raises:
            ValueError: the target has no such layer, or not the layers of the head's configuration.
        """
        if self.named is None:
            kind: Any = HEADS[self.head.name]
            with torch.device("meta"):
                layers: tuple[int, ...] = kind(self.head, target.embeddings).feature_layers
            return layers
        count = target.spec.num_layers
        if any(not 0 <= layer < count for layer in self.named) or len(set(self.named)) < len(self.named):
            raise ValueError(f"layers is {self.named}: give different layers from 0 to {count - 1}")
        return tuple(self.named)


def spec_of(
    target: Target | EmbeddingsOnly, packed: Packed, layers: tuple[int, ...], config: FeaturesConfig
) -> StoreSpec:
    """Return the spec of a new store of these rows.

    Raises:
        ValueError: features.k is larger than the vocabulary.
    """
    spec, k = target.spec, config.k if config.teacher == "top_k" else 0
    if k > spec.vocab_size:
        raise ValueError(f"features.k is {k}, but {target.name} has {spec.vocab_size} tokens: lower it")
    rows, length = packed.token.shape
    store = StoreSpec(
        spec.fingerprint, str(spec), target.quantized, layers, spec.hidden_size, spec.vocab_size,
        packed_fingerprint(packed), rows, length, config.dtype, config.teacher, k, 1,
    )  # fmt: skip
    return store.sharded(shard_rows(config, store.row_bytes))


def extract_features(
    model: ModelConfig,
    data: DataConfig,
    config: FeaturesConfig,
    layers: Layers,
    prompts: str | None,
    workload: str | None,
    say: Callable[[str], None],
) -> None:
    """Extract the features of all packed rows that the store lacks; called on every process alike.

    Args:
        model: the target's configuration.
        data: the documents.
        config: the store's configuration.
        layers: the feature layers.
        prompts: the file that the documents' tokens are written to for vLLM; nothing is then extracted.
        workload: evaluation prompts that no sample may hold, beside those of `data`; None: none.
        say: prints a line.

    Raises:
        ValueError: it does not fit, the folder holds something else, or the disk refused.
    """
    check_rows(data.length, context_of(configuration(model.path, model.trust_remote_code)), model.path)
    state = PartialState(cpu=model.device == "cpu")
    check_alone(model.where, "an extraction")
    target = load_target(model, str(state.device), whole=config.vllm is None and prompts is None)
    packed = pack(load_training(data, target.tokenizer, 0, workload).samples, data.length)
    check_known(packed, target.tokenizer, target.embeddings.vocab_size)
    if prompts is not None:
        if state.is_main_process:
            say(f"{prompts}: the tokens of {write_prompts(packed, Path(prompts))} documents, for vLLM")
        return
    folder = Path(str(config.path))
    spec = spec_there(folder, spec_of(target, packed, layers.of(target), config))
    work = estimate(folder, spec, config.budget_gb)
    make = _maker(target, packed, spec, config)
    if work.rows and state.is_main_process:
        seconds = timed(make, spec, config.micro_rows)
        say(work.line(seconds, state.num_processes))
    state.wait_for_everyone()
    store = FeatureStore.create(folder, spec)
    written = extract(store, make, config.micro_rows, state.process_index, state.num_processes)
    state.wait_for_everyone()
    store.refresh()
    missing = len(store.missing())
    beside = f"; {missing} rows are still being written by another command" if missing else ""
    say(f"{folder}: {written} shards written by process {state.process_index}, {store.bytes() / GB:.3f} GB{beside}")


def _maker(target: Target | EmbeddingsOnly, packed: Packed, spec: StoreSpec, config: FeaturesConfig) -> Make:
    """Return the function that computes or reads the tensors of some rows."""
    if isinstance(target, Target) and config.vllm is None:
        whole = target
        return lambda rows: compute(whole, packed.token[rows].long(), packed.document[rows].long(), spec)
    count, embeddings = target.spec.num_layers, target.embeddings
    norm = target.norm if isinstance(target, EmbeddingsOnly) else final_norm(target.base, count)
    files = VllmFiles(Path(str(config.vllm)), config.vllm_layers, spec.layers, count)

    def read(rows: list[int]) -> Row:
        return join(to_row(files.row(packed, row, norm, spec.width), embeddings, spec) for row in rows)

    return read
