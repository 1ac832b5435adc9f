"""A draft head's folder or repository, read for a model: config.json and model.safetensors, which are data."""

import hashlib
import json
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from .drafts import KINDS, Drafts, made
from .foreign import default_three, ours
from .parts import Weights
from .target import Embeddings, Seen

DEFAULT = 4  # tokens drafted at once where neither the call nor the folder says how many
FEW = 16  # values of each of the model's parameters that headstart's fingerprint reads
FUSED = {"eagle3": 3, "block": 5}  # layers that a head reads where it does not say which


class Head(NamedTuple):
    """A head on a model, and how many tokens it drafts at once if the call does not say."""

    drafts: Drafts
    embeddings: Embeddings
    draft_tokens: int


# The last head of each model stays loaded, for calls in a row; `dict` by its files and the model's dtype and place.
_LAST: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, Head]]" = weakref.WeakKeyDictionary()


def load(where: str, model: PreTrainedModel, hub: dict[str, Any]) -> Head:
    """Return the head of a folder or repository, in the model's dtype and on its device.

    Args:
        where: the folder, or the repository's id.
        model: what it drafts for.
        hub: revision, token and the like.

    Raises:
        ValueError: there is no head, it is damaged, or it is one of another model.
    """
    config_file, weights_file = (_file(where, name, hub) for name in ("config.json", "model.safetensors"))
    embeddings = Embeddings(model)
    state = [(str(path), path.stat().st_mtime_ns) for path in (config_file, weights_file)]
    key = (state, str(embeddings.device), str(model.dtype))
    if model in _LAST and _LAST[model][0] == key:
        return _LAST[model][1]
    try:
        content: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
        tensors = load_file(weights_file)
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{where}: damaged ({' '.join(str(error).split())}); download it again") from None
    if isinstance(content.get("head"), dict):
        _check_target(where, content["target"], model, embeddings)
        config, tokens = dict(content["head"]), _depth(content["tree"])
    else:
        config, tensors, tokens = ours(where, content, tensors, embeddings)
    kind = config.get("name")
    if kind not in KINDS:
        raise ValueError(f"{where}: holds a head of kind {kind!r}; this code knows {', '.join(KINDS)}")
    if kind in FUSED and config.get("feature_layers") is None:
        config["feature_layers"] = _layers(FUSED[kind], embeddings.num_layers)
    own = {name: _placed(tensor, embeddings.device, model.dtype) for name, tensor in tensors.items()}
    head = Head(_tried(where, str(kind), config, Weights(own), embeddings, model.dtype), embeddings, tokens or DEFAULT)
    _LAST[model] = key, head
    return head


def _file(where: str, name: str, hub: dict[str, Any]) -> Path:
    try:
        found = None if Path(where).is_dir() and not (Path(where) / name).is_file() else cached_file(where, name, **hub)
    except OSError as error:
        raise ValueError(f"{where}: {name} cannot be had ({' '.join(str(error).split())})") from None
    if found is None:
        raise ValueError(f"{where}: no {name} of a draft head there; name the folder or repository of a published head")
    return Path(found)


def _placed(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


def _depth(tree: dict[str, Any]) -> int:
    """Return the depth of the tree that a head was measured with, 0 where it does not say."""
    paths = [len(path) for path in tree.get("paths") or []]
    return int(tree.get("depth") or max([*paths, len(tree.get("widths") or [])]))


def _layers(count: int, num_layers: int) -> list[int]:
    """Return the layers that a head reads by default: EAGLE-3's three, or more, spread evenly."""
    if count == FUSED["eagle3"]:
        return default_three(num_layers)
    return [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]


def _check_target(where: str, target: dict[str, Any], model: PreTrainedModel, embeddings: Embeddings) -> None:
    """Refuse a head of another model, by its sizes and by a hash of a few values of every parameter.

    The hash says nothing of weights that are quantised, or in fp16, or that an adapter was merged into.
    """
    found = {name: getattr(embeddings, name) for name in ("vocab_size", "hidden_size", "num_layers")}
    wrong = [name for name, value in found.items() if target[name] != value]
    plain = model.dtype in (torch.bfloat16, torch.float32) and getattr(model, "hf_quantizer", None) is None
    mark = target["fingerprint"]
    if not wrong and plain and target.get("adapter") is None and ":" not in mark:
        parameters = dict(model.named_parameters())
        if all(each.device.type != "meta" for each in parameters.values()) and _digest(parameters) != mark:
            wrong = ["weights"]
    if wrong:
        raise ValueError(
            f"{where}: made for another model, {target['name']}: its {wrong[0]} is not that of "
            f"{model.config.name_or_path or type(model).__name__}; load the model that the head was made for"
        )


def _digest(parameters: dict[str, nn.Parameter]) -> str:
    digest = hashlib.sha256()
    for name in sorted(parameters):
        few = parameters[name].detach().flatten()[:FEW].to(torch.bfloat16).cpu()
        digest.update(name.encode() + few.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


@torch.no_grad()
def _tried(
    where: str, kind: str, config: dict[str, Any], weights: Weights, embeddings: Embeddings, dtype: torch.dtype
) -> Drafts:
    """Return the head once it has drafted from a row of zeros, which shows a tensor that is missing or does not fit."""
    try:
        drafts = made(kind, config, weights, embeddings)
        zero = torch.zeros(1, embeddings.hidden_size, device=embeddings.device, dtype=dtype)
        layers = len(drafts.feature_layers)
        token = torch.zeros(1, dtype=torch.long, device=embeddings.device)
        logits = drafts.commit(Seen(zero[:, None].expand(-1, layers, -1), zero, zero), token)
    except (ValueError, KeyError, RuntimeError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: the head does not fit the model that it is to draft for ({reason})") from None
    if logits.shape != (embeddings.vocab_size,):
        raise ValueError(f"{where}: the head drafts of {len(logits)} tokens and the model has {embeddings.vocab_size}")
    drafts.restart()
    return drafts
