"""The source of a run's features: the live target, a feature store, both, or a serving engine."""

import logging
from dataclasses import asdict
from functools import partial
from typing import Any

from data.batches import Batches
from data.features.coding import compute
from data.features.extraction import GB, spec_of
from data.features.served import Served
from data.features.source import FeatureRequest, FeaturesConfig, FeatureSource, Live
from data.features.store import META, FeatureStore
from data.features.stored import Fallback, Stored, StoreWriter
from data.features.vllm_features import LayerIds, pieces
from data.features.vllm_server import VllmServers
from heads.base import DraftHead
from inference.target.embeddings_only import EmbeddingsOnly, norm_of
from inference.target.target import Target
from train.losses import ObjectiveConfig

log = logging.getLogger(__name__)

SAME = ("target", "quantize", "width", "vocab", "length", "data", "rows", "layers")


def source_for(
    config: FeaturesConfig,
    objective: ObjectiveConfig,
    target: Target | EmbeddingsOnly,
    head: DraftHead,
    batches: Batches,
) -> FeatureSource:
    """Return the source of a run's features.

    Raises:
        ValueError: the store is of something else, lacks rows that may not be computed, or keeps less than the head or
            the objective reads.
    """
    if config.mode == "live":
        assert isinstance(target, Target)
        return Live(target, batches, head.feature_layers)
    if config.mode == "engine":
        return served(config, target, head, batches)
    folder = config.folder
    here = spec_of(target, batches.packed, head.feature_layers, config)
    if config.mode == "hybrid" and not (folder / META).exists():
        FeatureStore.create(folder, here)
    store = FeatureStore(folder)
    store.check(here, SAME)
    check_teacher(store, head, objective)
    fallback = None
    if config.on_missing == "compute":
        assert isinstance(target, Target)
        for why in store.damaged.values():
            log.warning("%s; its rows are computed", why)
        budget = None if config.budget_gb is None else config.budget_gb * GB
        writer = StoreWriter(FeatureStore(folder), budget) if config.mode == "hybrid" else None
        fallback = Fallback(partial(compute, target, spec=store.spec), writer)
    elif missing := store.missing():
        why = next(iter(store.damaged.values()), f"row {missing[0]} is the first")
        raise ValueError(
            f"{folder}: {len(missing)} of {store.spec.rows} rows are in no shard ({why}); go on with the "
            "extraction, or give features.on_missing=compute"
        )
    form = FeatureRequest(head.feature_layers, target.dtype)
    return Stored(store, batches, form, target.device, config.prefetch, fallback)


def served(config: FeaturesConfig, target: Target | EmbeddingsOnly, head: DraftHead, batches: Batches) -> FeatureSource:
    """Return the source of features that vLLM servers compute, after a check; refuse another target's store."""
    store, layers, packed = None, head.feature_layers, batches.packed
    if config.path:
        store = FeatureStore(config.folder)
        store.check(spec_of(target, packed, layers, config), SAME)
        if store.spec.teacher != "state":
            raise ValueError(
                f"{store.folder}: keeps the top-k tokens, and features=engine gives the last hidden state: leave out "
                "features.path, or give a store that was extracted with features.teacher=state"
            )
    norm, spec = norm_of(target), target.spec
    servers = VllmServers(config, LayerIds.of(config.vllm_layers, layers, spec.num_layers), spec.hidden_size)
    servers.check(next(pieces(packed, 0)), norm, target.embeddings)  # the longest document is packed first
    form = FeatureRequest(layers, target.dtype)
    return Served(servers, batches, form, norm, target.device, config.prefetch, store)


def origin_of(source: FeatureSource) -> dict[str, Any]:
    """Return which store a run trains from and what it keeps, which may be other than `features` says of a new one.

    Of servers, the names by which they serve the target.
    """
    if isinstance(source, Served):
        return {"features": dict(zip(source.servers.urls, source.servers.models, strict=True))}
    if not isinstance(source, Stored):
        return {}
    return {"features": {"path": str(source.store.folder), **asdict(source.store.spec)}}


def check_teacher(store: FeatureStore, head: DraftHead, objective: ObjectiveConfig) -> None:
    """Refuse a store without the last hidden state to a head or an objective that reads it."""
    if store.spec.teacher == "state":
        return
    reader = None
    if not head.feature_layers:  # then it can read nothing else
        reader = "this head reads it"
    elif objective.losses.get("smooth_l1"):
        reader = "objective.losses.smooth_l1 compares with it"
    elif objective.noise:
        reader = "objective.noise adds to it"
    if reader is not None:
        raise ValueError(
            f"{store.folder}: keeps the top-k tokens in place of the last hidden state, and {reader}; extract with "
            "features.teacher=state, or train a head that reads other layers (eagle3, block)"
        )
