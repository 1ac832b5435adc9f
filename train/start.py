"""What a head's training starts from: nothing, a head that exists, or a part of the target."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads import HEADS
from heads.hub import load_found, resolve_head
from heads.mtp import Mtp
from heads.published import is_published
from heads.rope import scaling_of
from heads.store import TargetSpec, read_config
from heads.typed import typed
from inference.bare import Bare
from inference.mtp import load_mtp
from inference.target import Target
from train.config import RunConfig

log = logging.getLogger(__name__)

LAST_LAYER, CHECKPOINT = "last_layer", "checkpoint"  # what `init` may be besides a head


def first_head(run: RunConfig, target: Target | Bare) -> nn.Module:
    """Return the head to train: a new one as `head` says, or what `init` names, config and weights.

    Raises:
        ValueError: there is no such head, it is of a target of another shape, or `head` and so the objective are of
            another kind.
    """
    kind: Any = HEADS[run.head.name]
    if run.init in (LAST_LAYER, CHECKPOINT):
        assert isinstance(target, Target)
        return mtp_from_target(run, target)
    if run.init is None:
        new: nn.Module = kind(run.head, target.ends)
        return new
    folder = resolve_head(run.init)
    found: Any = load_found(folder, target.ends, start_spec(folder, target.spec))
    if type(found.config) is not type(run.head):
        name = found.config.name
        raise ValueError(
            f"init={run.init} is a head of kind {name}, whose objective is not that of {run.head.name}: "
            f"give head={name}"
        )
    head: nn.Module = kind(replace(found.config, name=run.head.name), target.ends)
    head.load_state_dict(found.state_dict())  # into a new head's fp32, whatever the file's dtype
    return head


def start_spec(folder: Path, spec: TargetSpec) -> TargetSpec:
    """Return the target to load a head for as a start: its weights may be others than those the head was trained for.

    A head of a base model is the start for that model fine-tuned, or with an adapter; its training is what makes it
    the new target's. The shapes must agree.
    """
    if is_published(folder):  # by other projects, which do not say whose weights
        return spec
    own = typed(TargetSpec, read_config(folder)["target"])
    if own.fingerprint != spec.fingerprint:
        log.warning("%s: made for the weights of %s; it is trained on for those of %s", folder, own, spec)
    return replace(spec, fingerprint=own.fingerprint)


def mtp_from_target(run: RunConfig, target: Target) -> nn.Module:
    """Return a module for multi-token prediction that starts as the target's last layer, or as its checkpoint's module.

    Rotary positions and norm are then the target's. As the last layer it begins by passing the state on: the
    projection's half for the state is the identity.

    Raises:
        ValueError: `head` is another, there is no such module, or the layer is not built like ours.
    """
    if not isinstance(run.head, Mtp.Config):
        raise ValueError(f"init={run.init} starts head=mtp alone: give that head, or a folder for init")
    rope: dict[str, Any] = getattr(target.config, "rope_parameters", None) or vars(target.config)
    theta = float(rope.get("rope_theta", run.head.rope_theta))
    eps = float(getattr(target.config, "rms_norm_eps", run.head.norm_eps))
    head = Mtp(replace(run.head, rope_theta=theta, rope_scaling=scaling_of(rope), norm_eps=eps), target.ends)
    own = head.state_dict()
    if run.init == CHECKPOINT:
        loaded = load_mtp(target, run.model.path).state_dict()
        start: dict[str, Tensor] = {name.replace("block.layer.", "block."): value for name, value in loaded.items()}
    else:
        start = {f"block.{name}": value for name, value in target.decoder_layers[-1].state_dict().items()}
        norm = getattr(target.base, "norm", None)
        start |= {"norm.weight": norm.weight} if norm is not None else {}
        width = target.ends.hidden_size
        start["eh_proj.weight"] = torch.cat([own["eh_proj.weight"][:, :width], torch.eye(width)], 1)
    blocks = {name for name in own if name.startswith("block.")}
    odd = sorted(blocks ^ {name for name in start if name.startswith("block.")})
    odd += [name for name in blocks & start.keys() if start[name].shape != own[name].shape]
    if odd:
        raise ValueError(
            f"init={run.init}: a layer of {target.name} is not built like the module's ({odd[0]}); leave init out, or "
            "give head.qk_norm=true where its queries and keys are normed"
        )
    head.load_state_dict({**own, **{name: value.float() for name, value in start.items()}})
    return head
