"""The source of a run's features: the live target, a feature store, or a serving engine."""

import logging
from dataclasses import asdict
from functools import partial
from typing import Any

from data.batches import Batches
from data.features.coding import compute
from data.features.extraction import spec_of
from data.features.served import Served, VllmServers
from data.features.source import FeatureRequest, FeaturesConfig, FeatureSource, Live
from data.features.store import FeatureStore
from data.features.stored import Stored
from data.features.vllm_features import LayerIds, pieces
from heads.base import DraftHead
from inference.target.embeddings_only import EmbeddingsOnly, norm_of
from inference.target.target import Target

log = logging.getLogger(__name__)

SAME = ("target", "quantize", "width", "vocab", "length", "data", "rows", "layers")


def source_for(
    config: FeaturesConfig,
    target: Target | EmbeddingsOnly,
    head: DraftHead,
    batches: Batches,
) -> FeatureSource:
    """Return the source of a run's features.

    Raises:
        ValueError: the store is of something else, lacks rows that may not be computed, or layers that the head reads.
    """
    if config.mode == "live":
        assert isinstance(target, Target)
        return Live(target, batches, head.feature_layers)
    if config.mode == "engine":
        return served(config, target, head, batches)
    folder = config.folder
    here = spec_of(target, batches.packed, head.feature_layers, config)
    store = FeatureStore(folder)
    store.check(here, SAME)
    recomputed = None
    if config.on_missing == "compute":
        assert isinstance(target, Target)
        for why in store.damaged.values():
            log.warning("%s; its rows are computed", why)
        recomputed = partial(compute, target, spec=store.spec)
    elif missing := store.missing():
        why = next(iter(store.damaged.values()), f"row {missing[0]} is the first")
        raise ValueError(
            f"{folder}: {len(missing)} of {store.spec.rows} rows are in no shard ({why}); go on with the "
            "extraction, or give features.on_missing=compute"
        )
    form = FeatureRequest(head.feature_layers, target.dtype)
    return Stored(store, batches, form, target.device, config.prefetch, recomputed)


def served(config: FeaturesConfig, target: Target | EmbeddingsOnly, head: DraftHead, batches: Batches) -> FeatureSource:
    """Return the source of features that vLLM servers compute, after a check; refuse another target's store."""
    store, layers, packed = None, head.feature_layers, batches.packed
    if config.path:
        store = FeatureStore(config.folder)
        store.check(spec_of(target, packed, layers, config), SAME)
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
