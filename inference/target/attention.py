"""The attention of the target's passes: grouped-query attention under a mask, without a copy of keys and values.

transformers repeats keys and values for every query head of a group as soon as a mask is given, which reads a long
cache as many times. Here the query heads of a group become queries of one head instead (heads/modules/layers.py).
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from heads.modules.layers import grouped_attention

SDPA, GROUPED = "sdpa", "headstart_grouped"
OTHER = ("position_bias", "softcap", "s_aux")  # what an attention may add, of which this one knows nothing


def use_kernels(device: torch.device) -> None:
    """Rule out cuDNN's attention, which builds a plan, for tens of milliseconds, at every new length of a text."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def group_attention(config: Any) -> None:
    """Let a model whose query heads share keys and values attend in groups, if it attends by torch's own kernels."""
    if config._attn_implementation == SDPA:
        transformers.AttentionInterface.register(GROUPED, _attend)
        transformers.AttentionMaskInterface.register(GROUPED, sdpa_mask)
        config._attn_implementation = GROUPED


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend under transformers' signature; what is not grouped or has no mask runs as transformers runs it."""
    plain = attention_mask is None and query.shape[2] > 1
    ungrouped = query.shape[1] == key.shape[1] or (attention_mask is not None and attention_mask.shape[1] > 1)
    if plain or ungrouped or dropout or any(kwargs.get(name) is not None for name in OTHER):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    out = grouped_attention(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None
