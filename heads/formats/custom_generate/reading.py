"""A draft head's folder or repository, read for a model: config.json and model.safetensors, which are data."""

import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from heads.formats.custom_generate.decoding import Drafts
from heads.formats.custom_generate.target import Embeddings
from heads.formats.published import read_published
from heads.formats.published.files import config_of, is_published, without_prefix
from heads.formats.published.plan import Source
from heads.formats.store import CONFIG, WEIGHTS, read_config, read_head
from heads.formats.weights import FEW, digest, read_weights

DEFAULT = 4  # tokens drafted at once where neither the call nor the folder says how many
ENDLESS = 64  # `max_depth` of heads that draft on from their own states, which says nothing of how many are worth it


class Head(NamedTuple):
    """A head on a model, and how many tokens it drafts at once if the call does not say."""

    drafts: Drafts
    embeddings: Embeddings
    draft_tokens: int


# The last head of each model stays loaded, for calls in a row, by its files and the model's dtype and device.
_LAST: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, Head]]" = weakref.WeakKeyDictionary()


def load(where: str, model: PreTrainedModel, hub: dict[str, Any]) -> Head:
    """Return the head of a folder or repository, in the model's dtype and on its device; `hub` has revision and token.

    Raises:
        ValueError: there is no head, it is damaged, or it is one of another model.
    """
    config, weights = (_file(where, name, hub) for name in (CONFIG, WEIGHTS))
    embeddings = Embeddings(model)
    state = [(str(path), path.stat().st_mtime_ns) for path in (config, weights)]
    key = (state, str(embeddings.device), str(model.dtype))
    if model in _LAST and _LAST[model][0] == key:
        return _LAST[model][1]
    read = _published if is_published(weights.parent) else _own
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):  # what a head begins with leaves a seed as it is
        module, draft_tokens = read(where, weights.parent, model, embeddings)
    module = module.to(embeddings.device, model.dtype).eval().requires_grad_(False)
    head = Head(Drafts(module), embeddings, draft_tokens or DEFAULT)
    _LAST[model] = key, head
    return head


def _file(where: str, name: str, hub: dict[str, Any]) -> Path:
    try:
        path = None if Path(where).is_dir() and not (Path(where) / name).is_file() else cached_file(where, name, **hub)
    except OSError as error:
        raise ValueError(f"{where}: {name} cannot be had ({' '.join(str(error).split())})") from None
    if path is None:
        raise ValueError(f"{where}: no {name} of a draft head there; name the folder or repository of a published head")
    return Path(path)


def _own(where: str, folder: Path, model: PreTrainedModel, embeddings: Embeddings) -> tuple[nn.Module, int]:
    """Return a head in headstart's own format, and the depth of the tree that it was measured with, 0 if not known."""
    content = read_config(folder)
    _check_target(where, content["target"], model, embeddings)
    tree: dict[str, Any] = content["tree"]
    paths = [len(path) for path in tree.get("paths") or []]
    depth = int(tree.get("depth") or max([*paths, len(tree.get("widths") or [])]))
    return read_head(folder, content, embeddings), depth


def _published(where: str, folder: Path, _model: PreTrainedModel, embeddings: Embeddings) -> tuple[nn.Module, int]:
    """Return a head in a serving engine's or its authors' format, and how many tokens to draft, 0 if not said."""
    config = config_of(folder)
    for name in ("hidden_size", "vocab_size"):
        size = getattr(embeddings, name)
        if config.get(name, size) != size:
            raise ValueError(
                f"{where}: made for another model: its {name} is {config[name]}, but the model's is {size}; load the "
                "model that the head was made for"
            )
    head: Any = read_published(Source(folder, config, without_prefix(read_weights(folder / WEIGHTS))), embeddings)
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depth = 0 if head.max_depth == ENDLESS else head.max_depth
    return head, int(methods[0].get("speculative_tokens") or depth)


def _check_target(where: str, target: dict[str, Any], model: PreTrainedModel, embeddings: Embeddings) -> None:
    """Refuse a head of another model, by its sizes and by a hash of a few values of every parameter.

    The hash says nothing of weights that are quantised, or in fp16, or that an adapter was merged into.
    """
    sizes = {name: getattr(embeddings, name) for name in ("vocab_size", "hidden_size", "num_layers")}
    wrong = [name for name, value in sizes.items() if target[name] != value]
    plain = model.dtype in (torch.bfloat16, torch.float32) and getattr(model, "hf_quantizer", None) is None
    fingerprint = target["fingerprint"]
    if not wrong and plain and target.get("adapter") is None and ":" not in fingerprint:
        parameters = text_parameters(model)
        on_device = all(parameter.device.type != "meta" for parameter in parameters.values())
        if on_device and digest({name: p.detach().flatten()[:FEW] for name, p in parameters.items()}) != fingerprint:
            wrong = ["weights"]
    if wrong:
        raise ValueError(
            f"{where}: made for another model, {target['name']}: its {wrong[0]} is not that of "
            f"{model.config.name_or_path or type(model).__name__}; load the model that the head was made for"
        )


def text_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return a model's parameters by name; of one that reads images too, its text tower's as of a model by itself."""
    parameters, tower = dict(model.named_parameters()), "model.language_model."
    if not any(name.startswith(tower) for name in parameters):
        return parameters
    text = {name: value for name, value in parameters.items() if name.startswith((tower, "lm_head."))}
    return {name.replace(tower, "model."): value for name, value in text.items()}
