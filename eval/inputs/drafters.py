"""The drafters of a configuration: trained heads of runs, and drafters of inference/drafters."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.config import DraftersConfig
from heads.common.typed import Json, build
from heads.common.untrusted import names_code, parse_yaml, parsed_file
from heads.formats.hub import kind_of, resolve_head, target_path
from heads.formats.published import is_published
from heads.formats.store import read_config
from inference.drafters.head import load_drafter, saved_trees
from inference.drafters.host import HostDrafter
from inference.drafters.hybrid import Hybrid
from inference.drafters.registry import configured, make
from inference.protocol import Drafter
from inference.target.config import ModelConfig, model_config
from inference.target.placement import DEVICE_MAP, SHARDED
from inference.target.target import Target

# Keys of a run's model that still apply if model.path names another target.
INHERITED = (
    "dtype", "device", "quantize", "adapter", "prompts", "placement", "tensor_parallel", "devices", "offload",
    "memory_gb",
)  # fmt: skip


def find_heads(runs: list[str], others: Collection[str] = ()) -> dict[str, Path]:
    """Return the head folders of runs by name in the report: the head's kind, with the run if two share a kind.

    `others` are further names in the report, such as the target's own module. Refuse a run without a head.
    """
    folders = {run: resolve_head(run) for run in runs}
    kinds = {run: kind_of(folder) for run, folder in folders.items()}
    unique = {run for run, kind in kinds.items() if [*kinds.values(), *others].count(kind) == 1}
    return {kinds[run] if run in unique else f"{kinds[run]} {run}": folder for run, folder in folders.items()}


def own_prompts(run: str | None) -> str | None:
    """Return the file of held-out prompts in a run's folder, None if there is none."""
    if run is None:
        return None
    file = Path(run).expanduser() / "prompts.jsonl"
    return str(file) if file.is_file() and file.stat().st_size else None


def model_of(run: str | None, given: Mapping[str, Any]) -> ModelConfig:
    """Return the model to load: the run's with the user's values; refuse an invalid run, or a missing model."""
    trained = {} if run is None else _trained_model(run)
    # A run's folder may be foreign: only the user can allow the target's own code.
    if trained.pop("trust_remote_code", False) and given.get("trust_remote_code") is None and given.get("path") is None:
        raise ValueError(
            f"run={run}: was trained with model.trust_remote_code=true, which no file may say for you: say it again "
            "if you trust the target's code, else model.trust_remote_code=false"
        )
    if run is not None and not Path(run).expanduser().is_dir():
        trained.pop("prompts", None)  # a path on the training machine
    if trained.get("placement") in SHARDED:  # placements over several processes
        trained["placement"] = DEVICE_MAP
    if given.get("path") is not None:
        trained = {key: value for key, value in trained.items() if key in INHERITED}
    model = {**trained, **{key: value for key, value in given.items() if value is not None}}
    if not model.get("path"):
        raise ValueError(
            "model.path is missing: give model=… or model.path=…, or run=… of a head that knows its target"
        )
    path = target_path(model["path"])
    return model_config(**{**model, "path": path, "name": model.get("name") or Path(path).name})


def _trained_model(run: str) -> Json:
    """Return the `model` of a run's config.yaml, or its head's target if there is no config.yaml."""
    folder = resolve_head(run)
    folders = [folder, *([folder.parent] if folder.name == "head" else [])]  # a published head, or the head of a run
    file = next((path / "config.yaml" for path in folders if (path / "config.yaml").is_file()), None)
    if file is None:
        saved = {} if is_published(folder) else read_config(folder)["target"]
        return {"path": saved["name"], "adapter": saved.get("adapter")} if saved else {}
    config = parsed_file(file, "restore it, or give model=… and remove it", parse_yaml)
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        raise ValueError(f"{file} has no model: restore it, or give model=…")
    if code := names_code({**config, "model": {**model, "trust_remote_code": None}}):
        raise ValueError(f"{file} names code to run by the key {code}, which is refused: remove the key")
    try:
        trained = model_config(**{str(key): value for key, value in model.items()})
    except ValueError as error:
        raise ValueError(f"{file}: {error}; restore it") from error
    return {key: value for key, value in asdict(trained).items() if key in model}


Drafters = dict[str, Drafter]


def check_drafters(config: DraftersConfig) -> None:
    """Refuse unknown drafters and options, runs without a head, and invalid trees, before the target is loaded."""
    for name, options in config.drafter.items():
        if name in ("head", "hybrid"):
            for folder in head_folders(config).values():
                saved_trees(folder, config.tree)
        if name == "hybrid":
            configured("hybrid.lookup", build(Hybrid.Config, dict(options), "drafter.hybrid").lookup)
        elif name not in ("head", "plain"):
            configured(name, options)


def load_drafters(config: DraftersConfig, target: Target) -> Drafters:
    """Return the configured drafters; refuse what `check_drafters` refuses, and heads of other targets."""
    drafters = {}
    for name, options in config.drafter.items():
        if name == "head":
            drafters.update(_heads(config, target))
        elif name == "hybrid":
            settings = build(Hybrid.Config, dict(options), "drafter.hybrid")
            lookup = make("hybrid.lookup", settings.lookup, target)
            if not isinstance(lookup, HostDrafter) or not lookup.expects_acceptance:
                raise ValueError(
                    "drafter.hybrid.lookup.source: only a source that scores its drafts will do, such as suffix"
                )
            drafters[name] = Hybrid(settings, next(iter(_heads(config, target).values())), lookup, "hybrid")
        elif name != "plain":  # autoregressive decoding is in every report
            drafters[name] = make(name, options, target)
    return drafters


def head_folders(config: DraftersConfig) -> dict[str, Path]:
    """Return the heads' folders by their names in the report."""
    runs = config.runs() + config.compare
    if not runs:
        raise ValueError("run is missing: give run=outputs/NAME, or drafter=plain to measure only the target")
    return find_heads(runs, config.drafter)


def _heads(config: DraftersConfig, target: Target) -> Drafters:
    return {name: load_drafter(folder, config.tree, target, name) for name, folder in head_folders(config).items()}
