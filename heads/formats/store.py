"""A head on disk: a folder with config.json (head, target, tree, schedule) and model.safetensors.

Saving replaces the old folder by a finished one, so that a complete head can be loaded at any time, also after a crash.
"""

import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

import heads
from heads import HEADS
from heads.base import DraftVocabulary, Embeddings, NamedTensors
from heads.common.errors import one_line
from heads.common.files import last_good, replacing, write_json
from heads.common.typed import Json, typed
from heads.common.untrusted import names_code, parsed_file, shown
from heads.formats.weights import check_fit, meta_state_dict, read_weights

log = logging.getLogger(__name__)

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # the index of a sharded checkpoint
SCHEDULE = "schedule"  # key of the optional schedule, which maps batch sizes to trees
# The defaults of keys, for heads saved before the key existed, and for those of other projects.
EARLIER = {
    "length": None, "lm_head": "shared", "lm_head_rank": None, "draft_vocab": None, "qk_norm": False,
    "from_anchor": False, "rope_scaling": None, "mask_token": None, "joint_norm": False,
    "domino": None, "domino_rank": 256, "selector_rank": None, "selector_top_k": 16, "conv": None, "conv_group": 16,
    "feature_layers": None, "layer": "llama", "raw_state": False, "candidates": None, "candidate_rank": 128,
}  # fmt: skip

# Keys in heads saved earlier that had no effect.
RETIRED = {"peagle": ("norm_output", "kv_injection")}


@dataclass(frozen=True)
class TargetSpec:
    """The target of a head: `name` is informative, the other fields must match for a head to be loaded.

    A fingerprint that begins with QUANTISED does not identify the weights before quantisation.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    fingerprint: str
    adapter: str | None = None  # the PEFT adapter merged into the target; earlier versions did not record it

    def __str__(self) -> str:
        return self.name if self.adapter is None else f"{self.name} with adapter {self.adapter}"


QUANTISED = "quantised:"
UNSURE = "%s: made for %s; whether that is %s cannot be told from quantised weights: τ will show"
MUST_AGREE = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_layers": "number of layers",
    "fingerprint": "fingerprint of the weights",
}


def save_head(folder: Path, head: nn.Module, spec: TargetSpec, tree: Json) -> None:
    """Write a head's folder, with its target and draft tree, atomically; refuse weights that are not finite."""
    config: Any = head.config
    write_folder(folder, {"head": asdict(config), "target": asdict(spec), "tree": tree}, head.state_dict())


def write_folder(folder: Path, content: Json, tensors: NamedTensors) -> None:
    """Write config.json with this content and its format, and the tensors, atomically; refuse NaN and infinity."""
    assert_finite(tensors, folder, "what was saved last is kept; lower trainer.lr and train again")
    write_files(folder, {"format": FORMAT, **content}, tensors)


def write_files(folder: Path, content: Json, tensors: NamedTensors) -> None:
    """Write config.json and the tensors atomically; an OSError says that the disk refused."""
    # copies, since safetensors rejects two tensors that share memory
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        with replacing(folder) as new:
            save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
            write_json(new / CONFIG, content)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{folder}: could not be saved ({one_line(error)}); free space, what was saved last is whole"
        ) from error


def save_tree(folder: Path, tree: Json, schedule: list[Json] | None = None) -> None:
    """Write another tree into a head's config.json, atomically; with a `schedule` it is that of batch size 1."""
    content = {**read_config(folder), "tree": tree, SCHEDULE: schedule}
    if schedule is None:
        del content[SCHEDULE]
    path = last_good(folder) / CONFIG
    try:
        write_json(path, content)
    except OSError as error:
        raise OSError(f"{path}: could not be written ({error}); the tree in it is the one of before") from error


def load_head(folder: Path, embeddings: Embeddings, spec: TargetSpec) -> nn.Module:
    """Load a head for its target, on the CPU in its saved dtype; refuse a damaged head or another target's."""
    content = read_config(folder)
    assert_same_target(folder, typed(TargetSpec, content["target"]), spec)
    config = head_config(folder, content)
    kind = HEADS[config.name]
    check_fit(last_good(folder) / WEIGHTS, meta_state_dict(kind, config, embeddings, f"{folder}/{CONFIG}: "))
    head = kind(config, embeddings)
    fill(head, folder)
    return head


def fill(module: nn.Module, folder: Path) -> None:
    """Load a folder's tensors into a module, in the file's dtypes; refuse damaged, missing and unknown tensors."""
    parameters = module.state_dict(keep_vars=True)
    check_fit(last_good(folder) / WEIGHTS, parameters)
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        parameters[name].data = parameters[name].data.to(tensor.dtype)
    module.load_state_dict(tensors)
    for submodule in module.modules():
        if isinstance(submodule, DraftVocabulary):
            submodule.check(str(folder))


def read_config(folder: Path) -> Json:
    """Return a head's config.json, checked as far as possible without the target; refuse a missing config.json."""
    content = read_folder(folder, "head", ("head", "target", "tree"), (SCHEDULE,))
    if not isinstance(content["tree"], dict):
        raise ValueError(f"{folder}/{CONFIG}: tree is {shown(content['tree'])}, expected a mapping")
    head_config(folder, content)
    return content


def read_folder(folder: Path, kind: str, keys: tuple[str, ...], optional: tuple[str, ...] = ()) -> Json:
    """Return a folder's config.json; refuse one with another format, without a target, or with keys other than these.

    `kind` is also the folder's name in a run's folder; the `optional` keys may be missing.
    """
    path = last_good(folder) / CONFIG
    if not path.parent.is_dir():
        raise ValueError(f"{folder}: no such folder; give one that training or publishing has written")
    if not path.is_file():
        raise ValueError(f"{folder}: not a folder of kind {kind}, it holds no {CONFIG}; a run keeps it in {kind}/")
    content = parsed_file(path, "save or download it again")
    if code := names_code(content):
        raise ValueError(f"{path}: names code to run by the key {code}, which is refused; remove the key")
    if not isinstance(content, dict) or set(content) - {*optional} != {"format", *keys}:
        expected = ", ".join(("format", *keys[:-1])) + " and " + keys[-1]
        raise ValueError(f"{path}: not the config of kind {kind}, whose keys are {expected}")
    if content["format"] != FORMAT:
        raise ValueError(
            f"{path}: format {shown(content['format'])} where this version reads {FORMAT}; update headstart"
        )
    try:
        typed(TargetSpec, content["target"])
    except ValueError as error:
        raise ValueError(f"{path}: target.{error}") from None
    return content


def read_tensors(folder: Path) -> NamedTensors:
    """Return a folder's tensors; refuse missing or damaged files, and values that are not finite."""
    tensors = read_weights(last_good(folder) / WEIGHTS)
    assert_finite(tensors, folder, "train again from an earlier checkpoint")
    return tensors


def head_config(folder: Path, content: Json) -> Any:
    """Return the head's typed configuration."""
    values = content["head"]
    name = values.get("name") if isinstance(values, dict) else None
    try:
        if name in [*HEADS]:
            kind: Any = HEADS[name]
            values = earlier(kind) | {key: value for key, value in values.items() if key not in RETIRED.get(name, ())}
        return heads.head_config(values)
    except ValueError as error:
        raise ValueError(f"{folder}/{CONFIG}: {error}") from None


def earlier(kind: Any) -> Json:
    """Return the defaults of the keys that a kind of head has got since its first day."""
    return {field.name: EARLIER[field.name] for field in fields(kind.Config) if field.name in EARLIER}


def assert_same_target(folder: Path, saved: TargetSpec, target: TargetSpec) -> None:
    """Refuse a head of another target, naming both; warn if quantised weights cannot be compared."""
    for field, what in MUST_AGREE.items():
        theirs, ours = getattr(saved, field), getattr(target, field)
        if theirs != ours and field == "fingerprint" and QUANTISED in (theirs + ours):
            log.warning(UNSURE, folder, saved, target)
        elif theirs != ours:
            sibling = ", or to draft for this one all the same set model.sibling=true" * (field == "fingerprint")
            raise ValueError(
                f"{folder}: made for another target, {saved}: its {what} is {theirs}, but that of {target} is {ours}; "
                f"choose the target that it was made for with model.path and model.adapter{sibling}"
            )


def assert_finite(tensors: NamedTensors, folder: Path, remedy: str) -> None:
    """Refuse weights that are not finite, naming the first, with the remedy."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{folder}: {name} holds values that are not finite; {remedy}")
