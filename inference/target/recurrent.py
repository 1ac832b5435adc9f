"""The cache of a target with recurrent layers: the states before a chain, and the replay of what was accepted of it.

A recurrent layer (a state space, a gated delta rule, a short convolution) keeps one state, which takes in all tokens of
a pass. So the states before a pass that verifies are kept, with what goes into the mixers that advance them; where a
part of the chain is rejected, the mixers alone run once more, over what was accepted. All other layers' entries are
dropped as ever. Of a tree each path would need states of its own: such targets verify chains.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from inference.target.cache import SequenceLayer, Storage, TargetCache

STATE = ("conv_states", "recurrent_states", "has_previous_state")  # what a pass changes in a layer


class Call(NamedTuple):
    """What a mixer was called with."""

    mixer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def replay(self, total: int, count: int) -> None:
        """Run the mixer over the first `count` of `total` tokens."""

        def first(value: Any) -> Any:
            is_by_token = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == total
            return value[:, :count] if is_by_token else value

        self.mixer(*map(first, self.args), **{key: first(value) for key, value in self.kwargs.items()})


class States(Cache):
    """What transformers takes for a cache, noting the mixers' calls while there is a dict to note them in, by layer."""

    calls: dict[int, Call] | None = None


class HybridLayer(LinearAttentionAndFullAttentionLayer):
    """A layer with a recurrent mixer and an attention side by side; `entries` are the attention's."""

    def __init__(self, entries: SequenceLayer) -> None:
        init: Any = super().__init__
        init()
        self.entries = entries

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append entries and return all of them."""
        return self.entries.update(key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the number of entries."""
        return self.entries.get_seq_length()


class Recurrence:
    """The recurrent layers of a target; `mixers` are the modules that advance their states."""

    def __init__(self, config: PreTrainedConfig, layers: nn.ModuleList) -> None:
        self.config = config
        self.mixers: dict[int, nn.Module] = {}
        for module in layers.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.register_forward_pre_hook(self.note, with_kwargs=True)
                module.register_forward_hook(self.find, with_kwargs=True)

    def note(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a mixer is called with."""
        states, index = _states(args, kwargs), module.layer_idx
        if states is not None and states.calls is not None and index in self.mixers and self.mixers[index] is module:
            states.calls[index] = Call(module, args, kwargs)

    def find(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        """Find a layer's mixer: the innermost module behind whose first call its layer has a state."""
        index, states = module.layer_idx, _states(args, kwargs)
        if index in self.mixers or states is None:
            return
        layer = states.layers[index]
        if isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.has_previous_state.values()):
            self.mixers[index] = module

    def cache(self, storage: Storage, slot: int = 0) -> "RecurrentCache":
        """Return the empty cache of one sequence."""
        return RecurrentCache(storage, slot, self)

    def layers(self, storage: Storage, slot: int) -> tuple[list[Any], list[SequenceLayer]]:
        """Return a sequence's layers, transformers' own for states and ours for keys and values; and the latter."""
        layers: list[Any] = list(DynamicCache(config=self.config).layers)
        attention = []
        for index, layer in enumerate(layers):
            if isinstance(layer, CacheLayerMixin):
                attention.append(SequenceLayer(storage, index, slot))
                is_hybrid = isinstance(layer, LinearAttentionCacheLayerMixin)
                layers[index] = HybridLayer(attention[-1]) if is_hybrid else attention[-1]
        return layers, attention


def recurrence(config: PreTrainedConfig, layers: nn.ModuleList) -> Recurrence | None:
    """Return a target's recurrent layers; None if it has attention alone, or a cache of its own."""
    try:
        kinds = DynamicCache(config=config).layers
    except (AttributeError, LookupError, ValueError):
        return None
    is_recurrent = any(isinstance(kind, LinearAttentionCacheLayerMixin) for kind in kinds)
    return Recurrence(config, layers) if is_recurrent else None


class RecurrentCache(TargetCache):
    """The cache of one sequence with recurrent layers."""

    def __init__(self, storage: Storage, slot: int, recurrence: Recurrence) -> None:
        super().__init__(storage, slot)
        layers, self.attention = recurrence.layers(storage, slot)
        self.hf = States(layers=layers)
        self.before: dict[int, dict[str, Any]] | None = None

    @property
    def recurrent(self) -> dict[int, Any]:
        """The layers with states."""
        return {i: layer for i, layer in enumerate(self.hf.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}

    def set_length(self, length: int, layers: int | None = None) -> None:
        """Take note of how many entries the attention layers have."""
        for layer in self.attention:
            layer.length = length

    def snapshot(self) -> None:
        """Keep the states, to which the tokens of the pass that follows can be taken back."""
        self.before = {i: {name: _copy(getattr(layer, name)) for name in STATE} for i, layer in self.recurrent.items()}
        self.hf.calls = {}

    @torch.inference_mode()
    def keep(self, prefix: int, entries: list[int], layers: int | None = None) -> None:
        """Keep the first `prefix` entries, where the snapshot was taken, and the first ones of the pass after it."""
        assert entries == list(range(len(entries)))
        total, count = self.length - prefix, len(entries)
        if count < total:
            self._rewind(total, count)
        self.before = self.hf.calls = None
        self.set_length(prefix + count)

    def _rewind(self, total: int, count: int) -> None:
        assert self.before is not None
        calls, self.hf.calls = self.hf.calls or {}, None
        for index, layer in self.recurrent.items():
            vars(layer).update(self.before[index])
            if count:
                calls[index].replay(total, count)


def _states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> States | None:
    """Return the cache among a module's arguments, if it is ours."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, States)), None)


def _copy(state: Any) -> Any:
    """Return a copy of a layer's states, by their numbers."""
    return {i: value.clone() if isinstance(value, Tensor) else value for i, value in state.items()}
