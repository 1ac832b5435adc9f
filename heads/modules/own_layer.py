"""A decoder layer of the target's own class in transformers, with the signature of `heads.modules.layers.DecoderLayer`.

transformers lets a caller register an attention function; ours calls the caller's `attend`, as `DecoderLayer` does.
"""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heads.common.errors import one_line
from heads.modules.layers import LayerInputs, grouped_attention
from heads.rows import gather_rows, scatter_rows

ATTENTION = "headstart"


class TargetLayer(nn.Module):
    """A new layer of the class of the target's last one; refuse a class that cannot run outside of its model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        import transformers

        if config is None:
            raise ValueError("plan=true traces no layer of the target's own kind: plan with head.layer=llama")
        transformers.AttentionInterface.register(ATTENTION, _attend)
        trusted = type(config).__module__.startswith("transformers_modules")  # or its code would not have run so far
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trusted)
        stacks = (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList))
        self.layer = next(stack for stack in stacks if len(stack) == config.num_hidden_layers)[-1].to(
            torch.get_default_dtype()
        )
        for module in self.layer.modules():
            settings: Any = getattr(module, "config", None)
            if settings is not None:
                settings._attn_implementation = ATTENTION
        self.width: int = config.hidden_size
        rotary = [m for name, m in model.base_model.named_modules() if name.split(".")[-1] == "rotary_emb"]
        if not rotary:
            raise _unfit("it has no rotary positions")
        with torch.device("cpu"):  # of positions no other tables are made while a head is outlined
            self._rotary = (type(rotary[0])(model.config),)  # in a tuple: its tables stay fp32, and are not saved
        if (device := torch.get_default_device()).type != "meta":
            self.layer.to_empty(device=device).apply(model._init_weights)
            self.check()

    def norm(self) -> nn.Module:
        """Return a new norm of the layer's class; refuse a layer without a norm of one weight."""
        norms = [child for child in self.layer.children() if [p.ndim for p in child.parameters()] == [1]]
        if not norms:
            raise _unfit("it has no norm of one weight")
        return copy.deepcopy(norms[0])

    def forward(self, x: Float[Tensor, "B T D"], inputs: LayerInputs) -> Float[Tensor, "B N D"]:
        """Apply the layer with the caller's attention pattern."""
        position, _, attend, queries = inputs
        rotary = self._rotary[0].to(x.device)(x, position)

        def attend_from(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if queries is None:
                return attend(query, key, value)
            query = gather_rows(query.transpose(1, 2), queries).transpose(1, 2)
            out = attend(query, key, value).transpose(1, 2)
            return scatter_rows(out.flatten(2), queries, x.shape[1]).unflatten(2, out.shape[2:]).transpose(1, 2)

        out = self.layer(x, attention_mask=None, position_ids=position, position_embeddings=rotary, attend=attend_from)
        return gather_rows(out[0] if isinstance(out, tuple) else out, queries)

    @torch.no_grad()
    def check(self) -> None:
        """Run the layer on two rows; refuse one that needs other inputs."""
        weight = next(p for p in self.layer.parameters() if p.ndim == 2)
        x = weight.new_zeros(1, 2, self.width)
        position = torch.arange(2, device=x.device)[None]
        try:
            self(x, LayerInputs(position, 2, lambda q, k, v: grouped_attention(q, k, v, None)))
        except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
            raise _unfit(one_line(error)) from error


def _unfit(why: str) -> ValueError:
    return ValueError(f"the target's last layer cannot run by itself ({why})")


def _attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Call the caller's `attend` from transformers' signature; `attend` scales the scores itself."""
    if odd := [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]:
        raise ValueError(f"its attention has a {odd[0]}")
    width = query.shape[-1]
    scale = kwargs.get("scaling") or width**-0.5
    out: Tensor = kwargs["attend"](query * (scale * width**0.5), key, value)
    return out.transpose(1, 2).contiguous(), None
