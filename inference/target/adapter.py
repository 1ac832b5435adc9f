"""A PEFT adapter that a target carries: found, merged into the target's weights, and part of its fingerprint.

Once merged, the model is a plain one: the engine, the heads and the kernels see no adapter. Tokenizer and chat template
stay the target's own.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open

from heads.common.errors import one_line
from heads.common.target_config import MOST_PARTS, UNFIT
from heads.common.untrusted import CUT, parse_json, shown
from heads.formats.hub import REPO, downloaded
from heads.formats.weights import FEW, digest
from inference.target import checkpoint, loading

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NUMBERS = ("r", "alpha", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")  # what scales it
# The keys with regular expressions, and the form in which peft matches each: the first kind as a whole.
PATTERNS = {
    "target_modules": "{}", "exclude_modules": "{}", "feedforward_modules": "{}",
    "rank_pattern": r"(.*\.)?({})$", "alpha_pattern": r"(.*\.)?({})$",
    "layers_pattern": r"(?:^|.*?\.){}\.(\d+)\.", "modules_to_save": r"(^|.*\.){}($|\..*)",
}  # fmt: skip
NAMES = ("target_modules", "exclude_modules", "feedforward_modules")  # which hold plain names where they are lists
SECONDS = 10  # in which all patterns find their modules; it takes a fraction of one
MOST_ROUNDS = 100  # of an initialisation by iteration, which some adapters repeat
# Run in a process of its own, since Python's matching cannot be stopped.
MATCHING = """
import json, re, sys
forms, names = json.load(sys.stdin)
for form, whole in forms:
    for name in names:
        (re.fullmatch if whole else re.match)(form, name)
"""


class Adapter(NamedTuple):
    """What was merged into a target: its name, and the fingerprint of target and adapter as their files hold them."""

    name: str
    fingerprint: str


def check(adapter: str, quantize: str | None) -> Path:
    """Return the folder of an adapter, one that peft saved or OWNER/NAME on the Hub.

    Raises:
        ValueError: it is missing or not in safetensors, or the target is to be quantised.
    """
    if quantize not in (None, loading.AS_IT_IS):
        raise ValueError(
            f"model.adapter={adapter} is merged into full weights, which model.quantize={quantize} does not keep: "
            "merge it, save the model, and give that as model.path with model.quantize"
        )
    folder = Path(adapter).expanduser()
    if not folder.is_dir():
        if not REPO.fullmatch(adapter):
            raise ValueError(f"model.adapter={adapter}: no such folder; give one that peft saved, or OWNER/NAME")
        folder = downloaded(adapter, [CONFIG, WEIGHTS])
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"model.adapter={adapter}: not an adapter as peft saves it, it holds no {name}")
    return folder


def merge(
    model: "transformers.PreTrainedModel", path: str, adapter: str, folder: Path
) -> tuple["transformers.PreTrainedModel", Adapter]:
    """Merge an adapter, whose folder is known, into the model that is loaded from `path`.

    Raises:
        ValueError: it is of another model or of a kind that cannot be merged, or the checkpoint is quantised.
    """
    if loading.method_of(model) is not None:
        raise ValueError(
            f"model.adapter={adapter}: {path} is quantised, and an adapter is merged into full weights: merge it into "
            "those, save the model, quantise it and give that as model.path"
        )
    try:
        hashed = fingerprint(checkpoint.fingerprint(model, path), folder)
        check_config(read_config(folder), folder / WEIGHTS, [name for name, _ in model.named_modules()])
        import peft

        config: Any = peft.PeftConfig.from_pretrained(str(folder))
        if config.is_prompt_learning:
            raise ValueError(f"{config.peft_type.value} adds tokens, not weights, and cannot be merged")
        wrapped: Any = peft.PeftModel(model, config)
        report: Any = wrapped.load_adapter(str(folder), "default", torch_device=str(model.device))
        if odd := [*report.missing_keys, *report.unexpected_keys]:
            raise ValueError(f"only one of both has {odd[0]}")
        merged: Any = wrapped.merge_and_unload()
    except (*UNFIT, re.error) as error:
        reason = one_line(error)[:300]
        raise ValueError(
            f"model.adapter={adapter} cannot be merged into model.path={path}: {reason}; give the model that it was "
            "trained for, or save it with peft again"
        ) from error
    return merged, Adapter(adapter, hashed)


def read_config(folder: Path) -> dict[str, Any]:
    """Return an adapter's configuration; refuse a file without one."""
    config = parse_json((folder / CONFIG).read_bytes())
    if not isinstance(config, dict):
        raise ValueError(f"its {CONFIG} is {shown(config)}, expected a mapping")
    return config


def check_config(config: dict[str, Any], weights: Path, modules: list[str]) -> None:
    """Refuse a configuration with which peft would allocate or loop without bound: a rank above any tensor's size."""
    with safe_open(weights, "pt") as opened:
        largest = max((size for name in list(opened.keys()) for size in opened.get_slice(name).get_shape()), default=0)
    ranks = config.get("rank_pattern")
    for rank in [config.get("r"), *(ranks.values() if isinstance(ranks, dict) else [])]:
        if isinstance(rank, int | float) and not rank <= largest:
            raise ValueError(f"a rank is {shown(rank)}, and no tensor in {WEIGHTS} has a dimension above {largest}")
    if sum(end - start for start, end in config.get("layer_replication") or []) > MOST_PARTS:
        raise ValueError(f"layer_replication makes more than {MOST_PARTS} layers")
    rounds = re.findall(r"niter_(\d{1,9})|iter\W+(\d{1,9})", json.dumps(config))
    if any(int("".join(count)) > MOST_ROUNDS for count in rounds):
        raise ValueError(f"its weights begin after more than {MOST_ROUNDS} rounds of an iteration")
    _check_patterns([pair for key in PATTERNS for pair in _forms(key, config.get(key))], modules)


def _forms(key: str, value: Any) -> list[tuple[str, bool]]:
    """Return the regular expressions that peft makes of a key's value, and whether each is to match a whole name."""
    several = [] if key in NAMES or not isinstance(value, list | dict) else list(value)
    given = [value] if isinstance(value, str) else several
    return [
        (PATTERNS[key].replace("{}", pattern), PATTERNS[key] == "{}") for pattern in given if isinstance(pattern, str)
    ]


def _check_patterns(forms: list[tuple[str, bool]], modules: list[str]) -> None:
    """Check that an adapter's regular expressions are some, and come to an end on a model's modules."""
    request = json.dumps([forms, modules])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", MATCHING],
            input=request, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ValueError(f"the patterns of its {CONFIG} do not end on the model's modules") from None
    if done.returncode:
        raise ValueError(f"a pattern of its {CONFIG} is no regular expression ({done.stderr.strip()[-CUT:]})")


def fingerprint(base: str, folder: Path) -> str:
    """Hash the base model's fingerprint, a few values of each of the adapter's tensors, and what scales them.

    The merged weights are no help: merged in bf16 and in fp32 they differ in their last bits. Refuse a tensor that can
    be merged into no weights.
    """
    config, few = read_config(folder), {}
    with safe_open(folder / WEIGHTS, "pt") as opened:
        for name in sorted(opened.keys()):
            tensor = opened.get_tensor(name)
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
                raise ValueError(f"{name} is of {tensor.dtype} and holds what is no finite number of a weight")
            few[name] = tensor.flatten()[:FEW].clone()
    return digest(few, base + json.dumps([config.get(name) for name in NUMBERS]))
