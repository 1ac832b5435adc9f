"""What a run's folder says: where its head is, which target it was trained for, and which tree it was saved with."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

from heads.common.untrusted import names_code, parse_yaml, shown
from heads.formats.hub import kind_of, resolve_head, target_path
from heads.formats.published import is_published
from heads.formats.store import read_config
from inference.target.placement import DEVICE_MAP, TOGETHER, Placement

PLACING = tuple(each.name for each in fields(Placement))
KEPT = ("dtype", "device", "quantize", "adapter", "prompts", *PLACING)  # of a run's model, where model.path is another
# What a run's config.yaml says of its target, and the types of that.
OF_A_MODEL: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "path", "dtype", "quantize", "adapter", "device", "placement", "offload"), (str,)),
    **dict.fromkeys(("data", "split", "prompts"), (str,)),
    "tensor_parallel": (int,), "devices": (list,), "memory_gb": (int, float), "trust_remote_code": (bool,),
    "shape": (dict,),
}  # fmt: skip


def find_heads(runs: list[str]) -> dict[str, Path]:
    """Return the head folders of the runs under the names that the report gives them.

    A head is called by its kind, and by its run too where two are of one kind.

    Raises:
        ValueError: a run has no head, or is given twice.
    """
    repeated = sorted({run for run in runs if runs.count(run) > 1})
    if repeated:
        raise ValueError(f"run {', '.join(repeated)} is given twice: leave one out of run and compare")
    folders = {run: resolve_head(run) for run in runs}
    kinds = {run: kind_of(folder) for run, folder in folders.items()}
    alone = {run for run, kind in kinds.items() if list(kinds.values()).count(kind) == 1}
    return {kinds[run] if run in alone else f"{kinds[run]} {run}": folder for run, folder in folders.items()}


def own_prompts(run: str | None) -> str | None:
    """Return the file of held-out prompts that a run's training left in its folder, None if there is none."""
    file = None if run is None else Path(run).expanduser() / "prompts.jsonl"
    return str(file) if file is not None and file.is_file() else None


def overlay(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `own` with what `given` says, a None saying nothing."""
    return {**own, **{key: value for key, value in given.items() if value is not None}}


def model_of(run: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model to load: what the run was trained with, and what the user gives instead.

    Raises:
        ValueError: neither says which; or the run's config.yaml cannot be read.
    """
    own = {} if run is None else _trained_model(run)
    # A run's folder may come from elsewhere: whether the target's own code may run is for the user alone to say.
    if own.pop("trust_remote_code", False) and given.get("trust_remote_code") is None and given.get("path") is None:
        raise ValueError(
            f"run={run}: was trained with model.trust_remote_code=true, which no file may say for you: say it again "
            "if you trust the target's code, else model.trust_remote_code=false"
        )
    if run is not None and not Path(run).expanduser().is_dir():
        own.pop("prompts", None)  # a file of the machine that it was trained on
    if own.get("placement") in TOGETHER:  # of the run's processes; here is one
        own["placement"] = DEVICE_MAP
    if given.get("path") is not None:
        own = {key: value for key, value in own.items() if key in KEPT}
    model: dict[str, Any] = {
        "dtype": "auto",
        "device": None,
        "trust_remote_code": False,
        "quantize": None,
        "adapter": None,
        **overlay(own, given),
    }
    if not model.get("path"):
        raise ValueError(
            "model.path is missing: give model=… or model.path=…, or run=… of a head that knows its target"
        )
    model["path"] = target_path(model["path"])
    if not model.get("name"):
        model["name"] = Path(model["path"]).name
    return model


def _trained_model(run: str) -> dict[str, Any]:
    """Return the `model` of a run's config.yaml, or where that was not published, the target its head names."""
    folder = resolve_head(run)
    places = (
        [folder, folder.parent] if folder.name == "head" else [folder]
    )  # in its run's folder, or published by itself
    files = [place / "config.yaml" for place in places]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        saved = {} if is_published(folder) else read_config(folder)["target"]
        return {"path": saved["name"], "adapter": saved.get("adapter")} if saved else {}
    try:
        config = parse_yaml(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): restore it, or give model=… and remove it") from error
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        raise ValueError(f"{file} has no model: restore it, or give model=…")
    trusting = model.get("trust_remote_code")
    if code := names_code({**config, "model": {**model, "trust_remote_code": None}}):
        raise ValueError(f"{file} names code to run by the key {code}, which is refused: remove the key")
    if unknown := [key for key in model if key not in OF_A_MODEL]:
        raise ValueError(f"{file}: model.{shown(unknown[0])} is not a known key; valid keys: {', '.join(OF_A_MODEL)}")
    for key, kinds in OF_A_MODEL.items():
        if not isinstance(model.get(key), (*kinds, NoneType)) or "${" in repr(model.get(key)):
            raise ValueError(f"{file}: model.{key} is {shown(model[key])}, which is no value of it: restore it")
    return {**model, "trust_remote_code": trusting}
