"""The export of a head, and code shared by the formats.

Feature layers are layer outputs counted from 0; every engine concatenates them in increasing order.
"""

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads.base import Embeddings, NamedTensors, resolve_layer_dims
from heads.common.target_config import logit_factor
from heads.common.typed import Json
from heads.formats.published.plan import KNOWN, OFFSETS


class EngineClass(NamedTuple):
    """The model class under which engines read a format."""

    architectures: list[str]  # `architectures` of config.json
    model_type: str  # `model_type` of config.json
    found: dict[str, str]  # engine -> regular expression of the class names that it accepts


class TargetFacts(NamedTuple):
    """Facts about the target that an export needs."""

    name: str  # the target, its Hub id or the last part of its folder
    config: Json  # the target's own config.json
    dtype: torch.dtype  # dtype of the exported tensors
    draft_tokens: int  # drafted tokens per pass, for engines that read it from the repository


class Export(NamedTuple):
    """A head being exported to a format."""

    format_name: str
    head: Any
    served: TargetFacts

    @property
    def config(self) -> Any:
        """The head's configuration."""
        return self.head.config

    @property
    def embeddings(self) -> Embeddings:
        """The target's embedding and lm_head."""
        return self.head.embeddings

    @property
    def tensors(self) -> NamedTensors:
        """The head's tensors by our names, without the factors that choose candidates: the lm_head is exact alone."""
        return {name: tensor for name, tensor in self.head.state_dict().items() if "candidate_" not in name}

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors without the draft vocabulary: engines then draft all tokens by the shared lm_head."""
        return {name: tensor for name, tensor in self.tensors.items() if name != "vocab.ids"}

    @property
    def dtype(self) -> str:
        """The exported dtype as config.json names it."""
        return str(self.served.dtype).removeprefix("torch.")

    def refusal(self, what: str, why: str) -> ValueError:
        """Return the error for an option that the format cannot express."""
        return ValueError(f"format={self.format_name}: the head has {what}, {why}")

    def refuse(self, **expected: Any) -> None:
        """Refuse values of the head's configuration that the format cannot express."""
        if self.head.vocab is None:
            expected.pop("draft_vocab", None)  # a limit beyond the target's vocabulary drops no token
        odd = {key: value for key, value in expected.items() if getattr(self.config, key, value) != value}
        if odd:
            options = ", ".join(f"{key}={written(getattr(self.config, key))}" for key in odd)
            remedy = " ".join(f"head.{key}={written(value)}" for key, value in odd.items())
            raise self.refusal(options, f"which the format has no key for; train with {remedy}")

    def read_out(self, name: str) -> Tensor:
        """Return one of the head's lm_heads as a single matrix; without its own, the target's."""
        tensors = self.tensors
        if f"{name}.weight" not in tensors:
            weight, ids = self.embeddings.lm_head_weight().detach(), tensors.get("vocab.ids")
            weight = weight if ids is None else weight[ids.to(weight.device)]
            return weight if (factor := logit_factor(self.embeddings.config)) == 1 else weight * factor
        weight, down = tensors[f"{name}.weight"], tensors.get(f"{name}.down.weight")
        return weight if down is None else (weight.double() @ down.double()).to(weight.dtype)

    def vocabulary(self) -> NamedTensors:
        """Return the draft vocabulary as offsets and mask (d2t, t2d), empty for the whole vocabulary."""
        ids = self.tensors.get("vocab.ids")
        if ids is None:
            return {}
        mask = torch.zeros(self.embeddings.vocab_size, dtype=torch.bool, device=ids.device)
        mask[ids] = True
        return {OFFSETS: ids - torch.arange(len(ids), device=ids.device), KNOWN: mask}

    def outputs(self) -> tuple[list[int], list[int]]:
        """Return the feature layers in increasing order, and their indices in the head; refuse the last layer."""
        layers = self.head.feature_layers
        order = sorted(range(len(layers)), key=lambda i: layers[i])
        if (last := layers[order[-1]]) > self.embeddings.num_layers - 2:
            raise self.refusal(
                f"the output of the target's last layer, {last}, among its features",
                f"which engines do not hand out; train with head.feature_layers up to {self.embeddings.num_layers - 2}",
            )
        return [layers[i] for i in order], order

    def in_order(self, fc: Tensor, order: list[int]) -> Tensor:
        """Return fc, or the norm of its input, with the columns in the engines' order of layers."""
        return torch.cat([fc.chunk(len(order), -1)[i] for i in order], -1)

    def engine_config(self, kind: EngineClass, layers: int) -> Json:
        """Return the keys of config.json from which engines choose a model class with these decoder layers."""
        return {
            "architectures": kind.architectures,
            "model_type": kind.model_type,
            "torch_dtype": self.dtype,
            "num_hidden_layers": layers,
            **self.decoder(),
            "tie_word_embeddings": False,
        }

    def decoder(self) -> Json:
        """Return the keys of config.json for the decoder layers, as in a Llama's."""
        config, embeddings = self.config, self.embeddings
        shape = resolve_layer_dims(config, embeddings)
        context = self.served.config.get("max_position_embeddings")
        return {
            "hidden_size": embeddings.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": config.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "vocab_size": embeddings.vocab_size,
            **({} if context is None else {"max_position_embeddings": context}),
            "rope_theta": config.rope_theta,
            "rope_scaling": config.rope_scaling,
        }


class ExportedHead(NamedTuple):
    """An exported head: its config.json and its tensors."""

    config: Json
    tensors: NamedTensors


def written(value: Any) -> str:
    """Format a value as on the command line."""
    return value if isinstance(value, str) else json.dumps(value)
