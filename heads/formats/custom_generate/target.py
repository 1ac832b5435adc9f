"""The model that is decoded with: its passes over one sequence, and the hidden states that a draft head reads of it.

Layer i is the output of the decoder layer i, from 0, before the final norm; `last` the final layer's after that norm.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from heads.base import Features, shape_of
from heads.common.target_config import cache_argument, logit_factor

LAST = -1
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # of which a cache can be cropped


class Seen(NamedTuple):
    """A forward pass over T tokens: their features, of one document, and the logits (K, V) of the last K."""

    features: Features
    logits: Tensor

    def rows(self, count: int) -> "Seen":
        """Return the first rows."""
        return Seen(
            Features(*(tensor[:, :count] for tensor in self.features if tensor is not None)), self.logits[:count]
        )


class Embeddings:
    """The model's embedding and lm_head, and its sizes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config: Any = model.config.get_text_config()
        config = self.config
        self.embedding: Any = model.get_input_embeddings()
        self.lm_head: Any = model.get_output_embeddings()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.factor = logit_factor(config)
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.num_layers: int = config.num_hidden_layers
        self.layer = shape_of(config)
        self.context: int = getattr(config, "max_position_embeddings", None) or 2**31
        self.device: torch.device = model.device
        self._some: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None

    def embed(self, token: Tensor) -> Tensor:
        """Return the input embeddings (…, D) of tokens (…)."""
        return self.embedding(token)

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the logits of final-normed states (…, D), of the tokens `ids` (W,) alone if given."""
        head, weight = self.lm_head if ids is None else self._rows(ids), self.head_weight()
        logits = head(hidden.to(weight.device, weight.dtype)).to(hidden.device)
        logits = logits if self.factor == 1 else logits * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def head_weight(self) -> Tensor:
        """Return the lm_head's weight (V, D)."""
        weight: Tensor = self.lm_head.weight
        return weight

    def _rows(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the lm_head of these tokens alone; the last one is kept, since a head asks at each step."""
        if self._some is None or self._some[0] is not ids:
            weight, bias = self.head_weight(), self.lm_head.bias
            some = None if bias is None else bias[ids.to(bias.device)]
            self._some = ids, partial(functional.linear, weight=weight[ids.to(weight.device)], bias=some)
        return self._some[1]


class Target:
    """The model with a cache of one sequence. It notes what `layers` give while `noting` is open."""

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...]) -> None:
        self.model, self.layers = model, layers
        # Without the model's configuration no layer forgets what its window has passed; the mask still hides it.
        self.cache = DynamicCache()
        self.noted: dict[int, Tensor] = {}  # the last layer's output after the norm is at LAST

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note layers' outputs until the block ends."""
        stack = decoder_layers(self.model)
        noted: dict[int, nn.Module] = {i: stack[i] for i in self.layers} | {LAST: self.model.base_model}
        handles = [module.register_forward_hook(partial(self._note, i)) for i, module in noted.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, i: int, _module: nn.Module, _args: Any, output: Any) -> None:
        self.noted[i] = output if isinstance(output, Tensor) else output[0]

    def run(self, token: Tensor, scored: int) -> Seen:
        """Append tokens (T,) to the cache; return the logits of the last `scored` of them."""
        model: Any = self.model
        more: dict[str, Any] = {cache_argument(model): self.cache}
        if model._supports_logits_to_keep():
            more["logits_to_keep"] = scored
        out = model(input_ids=token[None], use_cache=True, return_dict=True, **more)
        last = self.noted[LAST][0].to(token.device)
        layers = [self.noted[i][0].to(token.device) for i in self.layers]
        hidden = torch.stack(layers, 1) if layers else last.new_zeros(len(last), 0, last.shape[-1])
        features = Features(token[None], hidden[None], last[None], torch.zeros_like(token)[None])
        return Seen(features, out.logits[0, -scored:])

    def crop(self, count: int) -> None:
        """Crop the last rows from the cache."""
        if count > 0:
            self.cache.crop(-count)  # how many go, and not how many stay, in every version of transformers


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the model's decoder layers; refuse a model without such a stack, or with other memory than attention."""
    config, name = model.config.get_text_config(), type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ATTENTION)
    if model.config.is_encoder_decoder or not kinds <= ATTENTION:
        what = "an encoder" if model.config.is_encoder_decoder else f"layers of {sorted(kinds - ATTENTION)[0]}"
        raise ValueError(f"{name}: has {what}, with which this head does not draft; generate without custom_generate")
    base = getattr(model.base_model, "language_model", model.base_model)  # beside it may stand as many layers of vision
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    raise ValueError(f"{name}: no stack of decoder layers found; generate without custom_generate")
