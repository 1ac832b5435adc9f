"""Initialising the head to train: random weights, an existing head's, or a layer of the target."""

import logging
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from heads import HEADS
from heads.base import HeadConfig
from heads.formats.hub import load_found, resolve_head, sibling_spec
from heads.formats.mtp_layouts import BLOCK
from heads.modules.rope import scaling_of
from heads.mtp import TARGET, Mtp
from inference.drafters.mtp import load_mtp
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.placed import whole
from inference.target.placement import REPLICATE
from inference.target.target import Target
from train.adapt import AdaptConfig, LoraAdapterConfig

log = logging.getLogger(__name__)

AUTO, LAST_LAYER, CHECKPOINT = "auto", "last_layer", "checkpoint"  # values of `init` besides a head
STARTS = (None, AUTO, LAST_LAYER, CHECKPOINT)


def resolve_init(
    init: str | None, config: HeadConfig, target: Target | EmbeddingsOnly
) -> tuple[HeadConfig, str | None]:
    """Return a head's configuration and what it starts from, for `init=auto` the target's last layer or None, anew.

    It is the last layer for head=mtp if its shapes match. In either case an MTP module then has the target's rotary
    positions and norm, by which engines make it.
    """
    if init != AUTO or not isinstance(config, Mtp.Config):
        return config, None if init == AUTO else init
    assert isinstance(target, Target)
    try:
        module = module_like(config, target)
        odd, config = mismatch(module, last_layer(config, target), target), module.config
    except ValueError as error:  # rotary positions of a kind that heads do not have
        odd = str(error)
    if odd is None:
        return config, LAST_LAYER
    log.warning("a note: the head starts with random weights, as others do, not as the target's last layer: %s", odd)
    return config, None


def check_start(config: AdaptConfig, init: str | None, placement: str) -> None:
    """Refuse to train an adapter on random weights, and `check_copied`, before anything is loaded."""
    check_copied(init, placement)
    if isinstance(config, LoraAdapterConfig) and init in (None, AUTO):
        raise ValueError(
            "peft=lora adapts a head that is there, and init names none: give init=FOLDER of a head, or leave peft out"
        )


def check_copied(init: str | None, placement: str) -> None:
    """Refuse to copy a layer of the target that is whole on no device."""
    if init == CHECKPOINT and placement != REPLICATE:
        raise ValueError(
            "init=checkpoint copies a layer of a target that lies whole on a device: not with model.placement="
            f"{placement}; give init=last_layer"
        )


def first_head(config: HeadConfig, init: str | None, target: Target | EmbeddingsOnly) -> nn.Module:
    """Return the head to train: a new one of this configuration, or the one that `init` names with its configuration.

    Raises:
        ValueError: there is no such head, it is for a target of another shape or of another kind than the
            configuration, or no head can be built for the target.
    """
    target.embeddings.check_width()
    kind: Any = HEADS[config.name]
    if init in (LAST_LAYER, CHECKPOINT):
        assert isinstance(target, Target)
        return mtp_from_target(config, init, target)
    if init is None:
        new: nn.Module = kind(config, target.embeddings)
        return new
    folder = resolve_head(init)
    loaded: Any = load_found(folder, target.embeddings, sibling_spec(folder, target.spec, "is trained on for"))
    if type(loaded.config) is not type(config):
        name = loaded.config.name
        raise ValueError(
            f"init={init} is a head of kind {name}, whose objective is not that of {config.name}: give head={name}"
        )
    head: nn.Module = kind(replace(loaded.config, name=config.name), target.embeddings)
    head.load_state_dict(loaded.state_dict())  # into a new head's fp32, whatever the file's dtype
    return head


def mtp_from_target(config: HeadConfig, init: str, target: Target) -> nn.Module:
    """Return an MTP module initialised from the target's last layer, or from the MTP module of its checkpoint.

    Rotary positions and norm are then the target's. From the last layer it first passes the state on unchanged: the
    projection's half for the state is the identity.

    Raises:
        ValueError: `config` is of another head, there is no such module, or the layer has other parameters.
    """
    if not isinstance(config, Mtp.Config):
        raise ValueError(f"init={init} starts head=mtp alone: give that head, or a folder for init")
    if init == CHECKPOINT:
        loaded = load_mtp(target, target.name).state_dict()
        start: dict[str, Tensor] = {name.replace(BLOCK, _block(config)): value for name, value in loaded.items()}
    else:
        start = last_layer(config, target)
    head = module_like(config, target)
    odd = mismatch(head, start, target)
    if odd is not None:
        raise ValueError(f"init={init}: {odd}, or give init=null for a new one")
    weights = head.state_dict()
    if init == LAST_LAYER:
        width = target.embeddings.hidden_size
        start["eh_proj.weight"] = torch.cat([weights["eh_proj.weight"][:, :width], torch.eye(width)], 1)
    head.load_state_dict({**weights, **{name: value.float() for name, value in start.items()}})
    return head


def module_like(config: Mtp.Config, target: Target) -> Mtp:
    """Return a new module with the target's rotary positions and norm."""
    rope: dict[str, Any] = getattr(target.config, "rope_parameters", None) or vars(target.config)
    theta = float(rope.get("rope_theta", config.rope_theta))
    eps = float(getattr(target.config, "rms_norm_eps", config.norm_eps))
    return Mtp(replace(config, rope_theta=theta, rope_scaling=scaling_of(rope), norm_eps=eps), target.embeddings)


def last_layer(config: Mtp.Config, target: Target) -> dict[str, Tensor]:
    """Return the target's last layer and final norm under the module's names."""
    layer = target.decoder_layers[-1]
    buffers = layer.state_dict().keys() - dict(layer.named_parameters()).keys()  # such as a router's bias
    values = [*whole(layer), *((name, value) for name, value in layer.named_buffers() if name in buffers)]
    start = {_block(config) + name: value for name, value in values}
    norm = getattr(target.base, "norm", None)
    return start | ({"norm.weight": dict(whole(norm))["weight"]} if norm is not None else {})


def _block(config: Mtp.Config) -> str:
    """Return what precedes the names of the module's decoder layer."""
    return BLOCK if config.layer == TARGET else "block."


def mismatch(head: Mtp, start: dict[str, Tensor], target: Target) -> str | None:
    """Return how a layer's parameters differ from the module's and what would make them alike, or None."""
    weights = head.state_dict()
    blocks = {name for name in weights if name.startswith("block.")}
    odd = sorted(blocks ^ {name for name in start if name.startswith("block.")})
    odd += [name for name in blocks & start.keys() if start[name].shape != weights[name].shape]
    if not odd:
        return None
    alike = "perhaps head.layer=target"
    if re.search(r"self_attn\.[qk]_norm\.", odd[0]):
        alike = f"head.qk_norm={'true' if odd[0] in start else 'false'}"
    name = odd[0].removeprefix("block.")
    return f"a layer of {target.name} is not built like the head's ({name}); {alike} makes them alike"
