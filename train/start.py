"""Initialisation of the head: random weights, an existing head's, or the target's last layer; LoRA adapters.

peft's LoRA adapters (Hu et al., arXiv 2106.09685) adapt a head to a new domain or a fine-tuned target. They are on the
head's linear layers, whose weights stay frozen. For decoding and saving they are merged into the weights.
"""

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from omegaconf import DictConfig
from torch import Tensor, distributed, nn
from torch.nn import functional

from data.batches import Batches
from data.features.source import LiveFeatures
from heads import HEADS
from heads.base import Features, HeadConfig, NamedTensors
from heads.common.progress import progress, update_bar
from heads.common.rope import Rope, positions_of
from heads.common.typed import Count, Decay, Width, typed
from heads.eagle import Eagle
from heads.eagle3 import Eagle3
from heads.formats.hub import load_found, resolve_head, sibling_spec
from heads.formats.mtp_layouts import BLOCK
from heads.formats.weights import meta_state_dict
from heads.modules.vocab import freeze_around_candidates
from heads.mtp import TARGET, Mtp
from heads.rows import positions
from inference.drafters.head import load_mtp
from inference.target.embeddings_only import AnyTarget, EmbeddingsOnly
from inference.target.placement import REPLICATE, whole
from inference.target.target import Target


@dataclass(frozen=True)
class WholeConfig:
    """Train every weight of the head."""

    method: str


@dataclass(frozen=True)
class LoraAdapterConfig:
    """Train LoRA adapters on some of the head's linear layers; conf/peft/lora.yaml explains the keys.

    `rslora`: Kalajdzievski, arXiv 2312.03732. Embeddings, norms and an lm_head that is not a linear layer stay frozen.
    """

    method: str
    rank: Width
    alpha: Count
    dropout: Decay
    rslora: bool
    target_modules: list[str] | None


AdaptConfig = WholeConfig | LoraAdapterConfig
METHODS: dict[str, type[AdaptConfig]] = {"none": WholeConfig, "lora": LoraAdapterConfig}


def peft_config(values: DictConfig) -> AdaptConfig:
    """Return the typed configuration of conf/peft, by its method; refuse unknown methods and keys."""
    method = values.get("method")
    if method not in METHODS:
        raise ValueError(f"peft.method is {method!r}: choose one of {', '.join(METHODS)}")
    return typed(METHODS[method], values)


def adapt(head: nn.Module, config: AdaptConfig) -> None:
    """Inject the adapters into a head and freeze the rest; refuse `target_modules` without a linear layer.

    Their product starts at zero, since B is zero.
    """
    if isinstance(config, WholeConfig):
        return
    linear = [name for name, module in head.named_modules() if isinstance(module, nn.Linear)]
    modules = linear if config.target_modules is None else config.target_modules
    unknown = [suffix for suffix in modules if not any(f".{name}".endswith(f".{suffix}") for name in linear)]
    if unknown or not modules:
        raise ValueError(
            f"peft.target_modules={unknown}: the head has no such linear layer; choose among {', '.join(linear)}"
        )
    from peft import LoraConfig, inject_adapter_in_model

    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        target_modules=modules,
    )
    inject_adapter_in_model(lora, head)


def merged_copy(head: nn.Module, weights: NamedTensors) -> nn.Module:
    """Return a new head on the CPU with these weights and its adapters merged."""
    copy = type(head)(head.config, head.embeddings)
    adapters = vars(head).get("peft_config")  # peft's record of injected adapters
    if adapters is None:
        copy.load_state_dict(weights)
        return copy
    from peft import LoraModel

    tuner = LoraModel(copy, adapters, "default")
    copy.load_state_dict(weights)
    return tuner.merge_and_unload()


log = logging.getLogger(__name__)

AUTO, LAST_LAYER, CHECKPOINT = "auto", "last_layer", "checkpoint"  # values of `init` that name no head
STARTS = (None, AUTO, LAST_LAYER, CHECKPOINT)
SILU = ("silu", "swish")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# EAGLE-3's parameters with wider inputs: its projections read an embedding and the state.
WIDER = tuple(f"block.self_attn.{name}.weight" for name in PROJECTIONS)
REFITTED = ("block.input_layernorm.weight", *WIDER)
TOKENS_PER_INPUT = 8, 64  # minimum and maximum tokens per input; the fit of `fit_linear` overfits to fewer
KEPT = 8 << 30  # bytes of features in 16 bits that the fits share, over all processes
RIDGE, MTP_MLP_RIDGE = 1e-2, 1e-3  # ridge penalties relative to the inputs' mean square, by measurement


def _first(config: HeadConfig) -> str:
    """Return the name of a head's decoder layer that can start as the target's last layer, empty without one."""
    return getattr(HEADS[config.name], "first_layer", "")


def resolve_init(init: str | None, config: HeadConfig, target: AnyTarget) -> tuple[HeadConfig, str | None]:
    """Return a head's configuration and its `init`, where `auto` becomes the target's last layer or None.

    `auto` is the last layer for mtp, eagle, hass, eagle3 and eagle4 if its shapes match, and except for mtp if the
    target is loaded anyway. Such a head has the target's rotary positions and norm; an MTP module has them in either
    case, since engines assume them.
    """
    if init != AUTO or not _first(config):
        return config, None if init == AUTO else init
    if isinstance(target, EmbeddingsOnly):
        log.warning(
            "the head starts with random weights; init=last_layer loads the target and starts as its last layer"
        )
        return config, None
    try:
        like = match_target(config, target)
        odd = incompatibility(like, target)
        if odd is None or isinstance(config, Mtp.Config):
            config = like
    except ValueError as error:  # unsupported rotary positions
        odd = str(error)
    if odd is None:
        return config, LAST_LAYER
    log.warning("the head starts with random weights, not as the target's last layer: %s", odd)
    return config, None


def check_init(adapter: AdaptConfig, config: HeadConfig, init: str | None, placement: str) -> None:
    """Refuse an `init` that the head or its adapter cannot start from, before anything is loaded.

    A layer of the target is copied only into a head that has one, and only where it is not sharded.
    """
    able = isinstance(config, Mtp.Config) if init == CHECKPOINT else _first(config)
    if init in (LAST_LAYER, CHECKPOINT) and not able:
        others = "" if init == CHECKPOINT else ", eagle, hass, eagle3 and eagle4"
        raise ValueError(f"init={init} starts only head=mtp{others}: give that head, or a folder for init")
    if init == CHECKPOINT and placement != REPLICATE:
        raise ValueError(
            "init=checkpoint copies a layer of a target that is whole on a device: not with model.placement="
            f"{placement}; give init=last_layer"
        )
    adapts = isinstance(adapter, LoraAdapterConfig)
    if getattr(config, "candidates", None) is not None and (init in STARTS or adapts):
        raise ValueError(
            "head.candidates trains nothing but the candidates of an existing head: give init=FOLDER of one and no "
            "peft, or head.candidates=null for the first stage"
        )
    if adapts and init in (None, AUTO):
        raise ValueError(
            "peft=lora adapts an existing head, and init names none: give init=FOLDER of a head, or leave peft out"
        )


def init_head(config: HeadConfig, init: str | None, target: AnyTarget, base: str | None = None) -> nn.Module:
    """Return the head to train: a new one, or the one that `init` names; refuse one of another kind or target."""
    target.embeddings.check_width()
    kind = HEADS[config.name]
    if init in (LAST_LAYER, CHECKPOINT):
        assert isinstance(target, Target)
        return from_target(config, init, target, base or target.name)
    if init is None:
        return kind(config, target.embeddings)
    folder = resolve_head(init)
    loaded: Any = load_found(folder, target.embeddings, sibling_spec(folder, target.spec, "is trained on for"))
    head = kind(resolve_saved_config(config, loaded.config, init), target.embeddings)
    weights = loaded.state_dict()  # in fp32, whatever the file's dtype
    missing, unknown = head.load_state_dict(weights, strict=False)
    assert all("candidate_" in name for name in (*missing, *unknown))  # one of the two may have no candidates
    if missing:  # new candidates start from the loaded lm_head
        head.lm_head.factorise()
    freeze_around_candidates(head)
    return head


def resolve_saved_config(config: HeadConfig, saved: HeadConfig, init: str) -> HeadConfig:
    """Return the configuration of a head that starts from one of the configuration `saved`; refuse another kind."""
    check_kind(config, saved.name, init)
    ours = ["name", "candidates"]
    if getattr(saved, "candidates", None) is None:
        ours.append("candidate_rank")
    return type(config)(**vars(saved) | {key: value for key, value in vars(config).items() if key in ours})


def check_kind(config: HeadConfig, kind: str, init: str) -> None:
    """Refuse to start a head from one of another kind; EAGLE-4's and EAGLE-3's are one."""
    loaded: Any = HEADS[kind]
    if loaded.Config is not type(config):
        raise ValueError(
            f"init={init} is a head of kind {kind}, whose objective is not that of {config.name}: give head={kind}, "
            "or another head as init"
        )


def from_target(config: HeadConfig, init: str, target: Target, checkpoint: str) -> nn.Module:
    """Return a head that starts as the target's last layer, or as a checkpoint's MTP module; refuse other parameters.

    Rotary positions and norm are the target's. Parameters with other inputs than in the target are still random, and an
    MTP projection is the identity for the state; `fit_init` fits them.
    """
    config = match_target(config, target)
    if init == CHECKPOINT:
        module = load_mtp(target, checkpoint)
        config, loaded = replace(config, raw_state=module.config.raw_state), module.state_dict().items()
        start = {name.replace(BLOCK, _block(config)): value for name, value in loaded}
    else:
        start = last_layer(config, target)
    odd = mismatch(config, start, target) if init == CHECKPOINT else incompatibility(config, target)
    if odd is not None:
        raise ValueError(f"init={init}: {odd}; init=null makes a new one")
    head = HEADS[config.name](config, target.embeddings)
    weights = head.state_dict()
    if not isinstance(head, Mtp):
        first = f"{head.first_layer}."
        left_out = REFITTED if isinstance(head, Eagle3) else (*REFITTED, "norm.weight")  # EAGLE has no final norm
        start = {name.replace("block.", first): value for name, value in start.items() if name not in left_out}
    elif init == LAST_LAYER:
        width = target.embeddings.hidden_size
        start["eh_proj.weight"] = torch.cat([weights["eh_proj.weight"][:, :width], torch.eye(width)], 1)
    head.load_state_dict({**weights, **{name: value.float() for name, value in start.items()}})
    return head


@torch.no_grad()
def fit_init(head: Any, init: str | None, target: Any, batches: Batches, steps: int) -> None:
    """Fit the inputs of a head that starts as the target's last layer, by least squares.

    A fit W = argmin sum |W x - y|^2 maps the inputs x of a linear layer at depth 1 to y, over rows of the first tenth
    of the training's `steps`, within TOKENS_PER_INPUT. Let b be the input of the target's last layer at the next
    position, which a draft cannot know, and g the gain of the target's final norm (`final_gain`).

    mtp     eh_proj: y = b. down_proj += W for y = (output of the target's last layer) - (the module's state), the
            difference of residuals.
    eagle   fc: y = g * b, since EAGLE feeds back final-normed states without a norm of its own. The rows of o_proj and
        down_proj are scaled by g.
    eagle3  fusion.fc: y = the target's last state, final-normed if the head feeds back normed states. o_proj and
        down_proj += W as in mtp.

    In eagle and eagle3, q_proj, k_proj and v_proj become the target's weights times W for y = input norm of b, since
    EAGLE's attention has no norm before it and EAGLE-3's reads two states.
    """
    depth = target.embeddings.num_layers
    if init != LAST_LAYER or depth < 2:
        return
    source = LiveFeatures(target, batches, (*head.feature_layers, depth - 2, depth - 1))
    step_bytes: int = 2 * batches.step_tokens * (len(source.layers) + 1) * target.embeddings.hidden_size

    # A target's own layer may have a norm or experts after down_proj, so that its module has one fit.
    once = isinstance(head, Mtp) and head.config.layer == TARGET

    @lru_cache(0 if once else KEPT // step_bytes)
    def read(step: int) -> list[Features]:
        """Return a step's features from the host's memory; a sharded target's processes keep the same steps."""
        step_features = []
        for batch, features in source(step):
            token, hidden, last, document = (tensor.cpu() for tensor in features()[:4])
            step_features.append(Features(token, hidden, last, document.masked_fill(batch.index[:, None] < 0, -1)))
        return step_features

    solve = partial(fit_linear, head, read, batches, max(1, steps // 10))
    if isinstance(head, Mtp):
        head.eh_proj.weight.copy_(solve(head.eh_proj, lambda states: states.below))
        if not once:
            down: Any = head.get_submodule("block.mlp.down_proj")
            down.weight.add_(solve(down, lambda states: states.above - states.state, MTP_MLP_RIDGE))
        return
    layer = last_layer(head.config, target)
    block = head.get_submodule(head.first_layer)
    residual = block.self_attn.o_proj, block.mlp.down_proj
    if isinstance(head, Eagle):  # scales the layer to the target's final norm
        gain = final_gain(read(0), head.fc.weight.device).to(head.fc.weight)
        head.fc.weight.copy_(solve(head.fc, lambda states: gain * states.below))
        if head.fc.bias is not None:
            head.fc.bias.zero_()
        for linear in residual:
            linear.weight.mul_(gain[:, None])
    else:
        norms = head.config.norm_output  # whether the head feeds back normed states
        head.fusion.fc.weight.copy_(solve(head.fusion.fc, lambda states: states.last_hidden if norms else states.raw))
    # Queries, keys and values are those of the target's layer, for its predicted input.
    scale, eps = layer["block.input_layernorm.weight"].to(block.self_attn.o_proj.weight), head.config.norm_eps
    guess = solve(block.self_attn.q_proj, lambda states: functional.rms_norm(states.below, scale.shape, scale, eps))
    for name in PROJECTIONS:
        getattr(block.self_attn, name).weight.copy_(layer[f"block.self_attn.{name}.weight"].to(guess) @ guess)
    for linear in residual if isinstance(head, Eagle3) else ():
        linear.weight.add_(solve(linear, lambda states: states.above - states.state))


def final_gain(features: list[Features], device: torch.device) -> Float[Tensor, "D"]:
    """Return the target's final norm as one factor per dimension, by least squares over the first step.

    First tokens of documents are excluded: large targets have massive activations there (arXiv 2402.17762).
    """
    sums: Any = 0.0
    for _, hidden, last_hidden, document, _ in features:
        later = (positions(document) > 0) & (document >= 0)
        raw, last = (state[later].to(device).double() for state in (hidden[:, :, -1], last_hidden))
        sums = sums + torch.stack([(raw * last).sum(0), raw.square().sum(0)])
    if distributed.is_initialized():
        distributed.all_reduce(sums)
    return sums[0] / sums[1].clamp_min(torch.finfo(torch.float32).tiny)


States = Float[Tensor, "n D"]


class FitStates(NamedTuple):
    """The target's and the head's states of n rows, from which a head is fitted."""

    last_hidden: States  # the target's last state after its final norm
    raw: States  # the target's last state before its final norm
    below: States  # the input of the target's last layer at the next position
    above: States  # the output of the target's last layer
    state: States  # the input of the head's final norm, if it has one


def fit_linear(
    head: Any,
    read: Callable[[int], list[Features]],
    batches: Batches,
    limit: int,
    linear: nn.Linear,
    labels_of: Callable[[FitStates], States],
    ridge: float = RIDGE,
) -> Float[Tensor, "D I"]:
    """Return the weight that maps a linear layer's inputs at depth 1 to labels with the least squared error.

    Each process sums over its part of the first steps, and the sums are reduced.
    """
    given = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: given.update({name: args[0]}))
        for name, module in (("input", linear), ("state", getattr(head, "norm", linear)))
    ]
    weight, count, width = linear.weight, linear.in_features, head.embeddings.hidden_size
    # Sums of inputs times inputs, and of inputs times labels.
    sums = weight.new_zeros(count, count + width, dtype=torch.float64)
    least, most = (math.ceil(tokens * count / batches.step_tokens) for tokens in TOKENS_PER_INPUT)
    steps = min(max(limit, least), most)
    try:
        for features in (rows for step in progress(range(steps), "fitting the head's start") for rows in read(step)):
            update_bar()
            token, document = features.token.to(weight.device), features.document.to(weight.device)
            hidden, last = features.hidden.to(weight), features.last_hidden.to(weight)
            head.unroll(Features(token, hidden[:, :, :-2], last, document), 1)
            follows = functional.pad((document[:, 1:] == document[:, :-1]) & (document[:, 1:] >= 0), (0, 1))
            raw, ahead = hidden[:, :, -1][follows], hidden[:, :, -2:].roll(-1, 1)[follows]
            states = FitStates(last[follows], raw, ahead[:, -2], ahead[:, -1], given["state"][follows])
            inputs = given["input"][follows]
            sums += inputs.T @ torch.cat([inputs, labels_of(states)], 1)
    finally:
        for hook in hooks:
            hook.remove()
    if distributed.is_initialized():
        distributed.all_reduce(sums)
    gram, moments = sums.split([count, width], 1)
    gram.diagonal().add_(ridge * gram.diagonal().mean() + torch.finfo(torch.float32).tiny)
    return torch.linalg.solve(gram, moments).T.to(weight)


def match_target(config: Any, target: Target) -> Any:
    """Return a head's configuration with the target's rotary positions and norm; refuse unsupported positions."""
    eps = float(getattr(target.config, "rms_norm_eps", config.norm_eps))
    rope = _last_positions(target) or Rope(config.rope_theta)
    like = replace(config, rope_theta=rope.theta, rope_scaling=rope.scaling, norm_eps=eps)
    Rope.of(like)
    return like


def _last_positions(target: Target) -> Rope | None:
    config = target.config.to_dict()
    return positions_of(config | {"layer_types": (config.get("layer_types") or [])[-1:]})


def last_layer(config: Any, target: Target) -> NamedTensors:
    """Return the target's last layer and final norm under an MTP module's names."""
    layer = target.decoder_layers[-1]
    buffers = layer.state_dict().keys() - dict(layer.named_parameters()).keys()  # for example a router's bias
    values = [*whole(layer), *((name, value) for name, value in layer.named_buffers() if name in buffers)]
    start = {_block(config) + name: value for name, value in values}
    norm = getattr(target.base, "norm", None)
    final = {} if norm is None else {f"norm.{name}": value for name, value in whole(norm)}
    return start | {name: value for name, value in final.items() if name == "norm.weight"}


def _block(config: Any) -> str:
    return BLOCK if isinstance(config, Mtp.Config) and config.layer == TARGET else "block."


def incompatibility(config: Any, target: Target) -> str | None:
    """Return why a head cannot start as the target's last layer, or None."""
    if target.quantized is not None:
        return f"the weights of {target.name} are quantised"
    if not isinstance(config, Mtp.Config) and target.embeddings.num_layers < 2:
        return f"{target.name} has one layer"
    act = getattr(target.config, "hidden_act", None) or "silu"
    if act not in SILU and _block(config) != BLOCK:
        return f"the activation of {target.name} is {act}, and the head's silu"
    rope = _last_positions(target)
    if rope is not None and rope.share != 1 and _block(config) != BLOCK:
        return f"{target.name} rotates {rope.share:g} of its attention heads, and the head all"
    start = last_layer(config, target)
    if isinstance(config, Eagle.Config):
        start.pop("block.input_layernorm.weight", None)  # the fitted projections include this norm's scale
    return mismatch(config, start, target)


def mismatch(config: Any, start: NamedTensors, target: Target) -> str | None:
    """Return how the target's layer parameters differ from the head's, with the remedy for an MTP module, or None."""
    # The head's decoder layer parameters that the target's last layer should have, on meta.
    first = f"{_first(config)}."
    outlined = meta_state_dict(HEADS[config.name], config, target.embeddings, "")
    layer = {name.replace(first, "block.", 1): value for name, value in outlined.items() if name.startswith(first)}
    layer |= {f"block.{name}": x for name, x in outlined.items() if name.startswith("layers.") and first not in name}
    if isinstance(config, Eagle3.Config):
        del layer["block.hidden_norm.weight"]
        width = target.embeddings.hidden_size  # the embedding's columns, which the target's projections lack
        layer |= {name: layer[name][:, width:] for name in WIDER}
    odd = sorted(layer.keys() ^ {name for name in start if name.startswith("block.")})
    odd += [name for name in layer.keys() & start.keys() if start[name].shape != layer[name].shape]
    if not odd:
        return None
    name = odd[0].removeprefix("block.")
    different = f"a layer of {target.name} is not built like the head's ({name})"
    if not isinstance(config, Mtp.Config):
        return different
    remedy = "perhaps head.layer=target"
    if re.search(r"self_attn\.[qk]_norm\.", odd[0]):
        remedy = f"head.qk_norm={'true' if odd[0] in start else 'false'}"
    return f"{different}; {remedy} makes them equal"
