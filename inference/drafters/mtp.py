"""The multi-token-prediction module of the target's own checkpoint, which transformers leaves out, as a draft source.

Two namings are read: `model.layers.N.*` behind the last of N layers (DeepSeek-V3, GLM-4.5), and `mtp.*` (Qwen3-Next,
Qwen3.5, whose recurrent layers verify chains alone). The module's decoder layer is of the target's own kind, so it is a
copy of the target's last layer with the module's weights: one with rotary attention, over all that comes before, and
no recurrent state. What it is made of else does not matter. Of several modules the first one alone is used, for every
depth.
"""

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from heads.base import Features
from heads.common.errors import one_line
from heads.modules.layers import Attend
from heads.mtp import Mtp
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig, verifiable
from inference.target.checkpoint import tensor_files
from inference.target.target import Target

ATTENTION = "headstart"
BEHIND = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "norm.weight",
}
APART = {
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "fc.weight": "eh_proj.weight",
    "norm.weight": "norm.weight",
}
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # the target's own, written a second time
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


class MtpDrafter(HeadDrafter):
    """A draft head that needs no training and no file of its own."""

    @dataclass(frozen=True)
    class Config:
        """Where the module lies (None: where the target was loaded from), and the tree it grows."""

        checkpoint: str | None
        tree: TreeConfig

    def __init__(self, config: Config, target: Target, name: str) -> None:
        super().__init__(load_mtp(target, config.checkpoint or target.name), verifiable(target, config.tree), name)


class OwnBlock(nn.Module):
    """A copy of the target's last decoder layer, taking the arguments of `heads.modules.layers.Block`.

    transformers lets a caller register an attention function; ours calls the `attend` that comes in, so the pattern is
    the caller's, as in `Block`.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        rotary = [m for name, m in target.base.named_modules() if name.split(".")[-1] == "rotary_emb"]
        if not rotary:
            raise ValueError("it has no rotary positions")
        if target.recurrence is not None and len(target.decoder_layers) - 1 in target.recurrence.mixers:
            raise ValueError("it keeps a recurrent state")
        transformers.AttentionInterface.register(ATTENTION, _attend)
        self._rotary = (rotary[0],)  # in a tuple, so that the target's module does not become a part of this one
        self.layer = copy.deepcopy(target.decoder_layers[-1])
        for module in self.layer.modules():
            config: Any = getattr(module, "config", None)
            if config is not None:
                config._attn_implementation = ATTENTION

    def forward(
        self, x: Float[Tensor, "B T D"], position: Int[Tensor, "B T"], last: int, attend: Attend
    ) -> Float[Tensor, "B T D"]:
        """Apply the layer with the caller's attention pattern."""
        rotary = self._rotary[0](x, position)
        out = self.layer(x, attention_mask=None, position_ids=position, position_embeddings=rotary, attend=attend)
        return out[0] if isinstance(out, tuple) else out


def _attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Let the caller's function attend, under transformers' signature; it scales by the root of the width itself."""
    if odd := [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]:
        raise ValueError(f"its attention has a {odd[0]}")
    width = query.shape[-1]
    scale = kwargs.get("scaling") or width**-0.5
    out: Tensor = kwargs["attend"](query * (scale * width**0.5), key, value)
    return out.transpose(1, 2).contiguous(), None


def load_mtp(target: Target, checkpoint: str) -> Mtp:
    """Return the module in a target's checkpoint, a folder or Hub name, on the target's device and in its dtype.

    It uses the target's layer, embedding and lm_head.

    Raises:
        ValueError: it carries no such module, or one that does not fit the target's own layer.
    """
    try:
        files = tensor_files(checkpoint)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(
            f"drafter.mtp.checkpoint: {checkpoint} holds no readable model.safetensors ({one_line(error)}); give the "
            "folder or Hub name of the target's own checkpoint"
        ) from error
    names = _names(set(files), target.spec.num_layers)
    if not names:
        raise ValueError(
            f"drafter.mtp: {checkpoint} carries no module for multi-token prediction (no model.layers."
            f"{target.spec.num_layers}.eh_proj, no mtp.fc); choose another drafter"
        )
    try:
        head = _build(target)
    except ValueError as error:
        raise ValueError(f"drafter.mtp: a layer of {target.name} cannot run by itself ({error})") from None
    opened: dict[Path, Any] = {file: safe_open(file, "pt") for file in {files[theirs] for theirs in names}}
    tensors = _fused({ours: opened[files[theirs]].get_tensor(theirs) for theirs, ours in names.items()})
    state: dict[str, Tensor] = head.state_dict(keep_vars=True)
    wrong = sorted(state.keys() ^ tensors.keys())
    wrong += [name for name in state.keys() & tensors.keys() if state[name].shape != tensors[name].shape]
    if wrong:
        raise ValueError(
            f"drafter.mtp: the module in {checkpoint} is not built like the target's last layer, or is quantised "
            f"({wrong[0]}{f' and {len(wrong) - 1} more' if wrong[1:] else ''}); choose another drafter"
        )
    head.load_state_dict(
        {name: tensor.to(target.device, state[name].dtype) for name, tensor in tensors.items()}, assign=True
    )
    head.eval().requires_grad_(False)
    _try(head, target)
    return head


def _build(target: Target) -> Mtp:
    """Return a module whose block and norms are copies of the target's, its projection without values."""
    block = OwnBlock(target)
    norms = [child for child in block.layer.children() if [p.ndim for p in child.parameters()] == [1]]
    if not norms:
        raise ValueError("it has no norm of one weight")
    eps = float(getattr(target.config, "rms_norm_eps", 0.0))  # the copies know their own
    with torch.device("meta"):
        head = Mtp(
            Mtp.Config("mtp", None, None, None, None, None, 10000.0, None, eps, False, None, "shared", None),
            target.embeddings,
        ).to(target.dtype)
    head.block = block
    head.enorm, head.hnorm, head.norm = (copy.deepcopy(norms[0]) for _ in range(3))
    return head


def _try(head: Mtp, target: Target) -> None:
    """Run the module once, on two rows: the target's layer may want more than this module gives it."""
    token = torch.zeros(2, dtype=torch.long, device=target.device)
    last = target.embeddings.embed(token)[None].to(target.dtype)
    try:
        head.extend(None, Features(token[None], last[:, :, None], last, token[None]), token[None])
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise ValueError(f"drafter.mtp: a layer of {target.name} cannot run by itself ({one_line(error)})") from error


def _names(available: set[str], layers: int) -> dict[str, str]:
    """Return which of a checkpoint's tensors become which of the module's; nothing if it has no module."""
    behind = f"model.layers.{layers}."
    if f"{behind}eh_proj.weight" in available:
        prefix, inner, renamed = behind, behind, BEHIND
    else:
        prefix, inner, renamed = "mtp.", "mtp.layers.0.", APART
        if f"{prefix}fc.weight" not in available:
            return {}
    apart = {f"{prefix}{theirs}": ours for theirs, ours in renamed.items() if f"{prefix}{theirs}" in available}
    skipped = {*apart, *(f"{prefix}{name}" for name in SHARED)}
    block = {name: f"block.layer.{name.removeprefix(inner)}" for name in available if name.startswith(inner)}
    return apart | {theirs: ours for theirs, ours in block.items() if theirs not in skipped}


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack what checkpoints hold expert by expert as transformers holds it: gate above up, and down."""
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    fused = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            fused[name] = tensor
    for name, parts in experts.items():
        gate, up, down = (
            torch.stack([tensor for _, tensor in sorted(parts.get(matrix, {}).items())] or [torch.empty(0)])
            for matrix in ("gate_proj", "up_proj", "down_proj")
        )
        fused[f"{name}.gate_up_proj"] = torch.cat([gate, up], 1)
        fused[f"{name}.down_proj"] = down
    return fused
