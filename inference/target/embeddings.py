"""A target's embedding and lm_head, which heads read in addition to its features."""

from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from heads.base import layer_dims_of
from heads.common.target_config import logit_factor
from heads.formats.store import TargetSpec
from heads.shapes import Logits, States, TokenIds
from inference.target.packed import prepack_weights


class TargetEmbeddings(nn.Module):
    """The target's embedding and lm_head, frozen."""

    def __init__(self, model: "transformers.PreTrainedModel") -> None:
        super().__init__()
        self.config = config = model.config.get_text_config()
        self.embedding, self.lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.factor = logit_factor(config)
        self.architecture = type(model).__name__
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.num_layers: int = config.num_hidden_layers
        self.layer_dims = layer_dims_of(config)
        self._last_rows: tuple[Tensor, nn.Linear] | None = None  # the rows of the last `ids`
        self._rows_by_ids: Any = WeakTensorKeyDictionary()  # rows by the tensor of their token ids, while it lives

    def spec(self, name: str, fingerprint: str, adapter: str | None = None) -> TargetSpec:
        """Return the facts of this target that a head must match to be loaded."""
        return TargetSpec(name, self.vocab_size, self.hidden_size, self.num_layers, fingerprint, adapter)

    def check_width(self) -> None:
        """Refuse an embedding and lm_head of another width than the layers: no head can read both."""
        width = self.lm_head.weight.shape[1]
        if width != self.hidden_size:
            raise ValueError(
                f"{self.architecture}: its layers are {self.hidden_size} wide but its embedding and lm_head {width}, "
                "and no head is built for both: draft without a head, for example with drafter=suffix"
            )

    def extra_ops(self) -> list[str]:
        """Return the operations of the target's embedding and lm_head other than reading their tables.

        It reads only their classes, so the weights may be on the meta device.
        """
        linear = type(self.lm_head).forward is nn.Linear.forward
        done = {
            "a scaled embedding": type(self.embedding).forward is not nn.Embedding.forward,
            "a bias of its logits": not linear or self.lm_head.bias is not None,
            "a scale or cap of its logits": self.factor != 1 or self.softcap is not None,
        }
        return [what for what, present in done.items() if present]

    def embed(self, token: TokenIds) -> States:
        """Return the input embeddings."""
        return self.embedding(token)

    def logits(self, hidden: States, ids: Int[Tensor, "*#n W"] | None = None) -> Logits:
        """Return the logits of final-normed states in the lm_head's dtype; with `ids` theirs, or each state's own."""
        # In rows "N D": for a slice torch 2.13 copies a frozen bf16 weight (findings/torch_frozen_linear_…).
        shape, hidden = hidden.shape[:-1], hidden.reshape(-1, hidden.shape[-1]).to(self.lm_head.weight.dtype)
        if ids is None:
            logits = self.lm_head(hidden)
        elif ids.ndim > 1:
            bias, ids = self.lm_head.bias, ids.flatten(0, -2)
            logits = (self.lm_head.weight[ids] @ hidden[..., None])[..., 0]
            logits = logits if bias is None else logits + bias[ids]
        elif not torch.compiler.is_compiling():
            logits = self._rows(ids)(hidden)
        elif self._last_rows is not None and self._last_rows[0] is ids:
            logits = self._last_rows[1](hidden)
        else:  # another head has replaced the cached rows: each step copies its own until the next prompt
            bias = self.lm_head.bias
            logits = functional.linear(hidden, self.lm_head.weight[ids], None if bias is None else bias[ids])
        logits = logits.reshape(*shape, logits.shape[-1])
        logits = logits if self.factor == 1 else logits * self.factor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _rows(self, ids: Int[Tensor, "W"]) -> nn.Linear:
        """Return the lm_head's rows of these tokens, cached at fixed addresses for CUDA graphs."""
        # The version of a buffer changes with its values, which need not be read from the device.
        version = 0 if ids.is_inference() else ids._version
        read, rows = self._rows_by_ids.get(ids, (None, None))
        if read != version:
            with torch.inference_mode(False):  # training may use these rows too
                weight: Tensor = self.lm_head.weight
                rows = nn.Linear(weight.shape[1], len(ids), bias=self.lm_head.bias is not None, device="meta")
                rows.weight = nn.Parameter(weight[ids], requires_grad=False)
                if self.lm_head.bias is not None:
                    rows.bias = nn.Parameter(self.lm_head.bias[ids], requires_grad=False)
            prepack_weights(rows)
            self._rows_by_ids[ids] = version, rows
        object.__setattr__(self, "_last_rows", (ids, rows))
        return rows

    def kept_rows(self) -> list[Tensor]:
        """Return the cached rows of the lm_head, which compiled drafts read."""
        return [] if self._last_rows is None else [self._last_rows[1].weight]

    def lm_head_weight(self) -> Float[Tensor, "V D"]:
        """Return the lm_head's weight."""
        return self.lm_head.weight


def final_norm(base: nn.Module, layers: int) -> nn.Module:
    """Return the norm after a base model's last decoder layer: the last module with a vector next to the layers."""
    for holder in base.modules():
        if any(isinstance(child, nn.ModuleList) and len(child) == layers for child in holder.children()):
            norms = [child for child in holder.children() if getattr(getattr(child, "weight", None), "ndim", 0) == 1]
            if norms:
                return norms[-1]
    raise ValueError(f"{type(base).__name__}: no norm found after its decoder layers; its last state cannot be normed")
