"""What a run's folder says: where its head is, which target it was trained for, and which tree it was saved with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from heads.store import CONFIG, last_good, read_config


def head_folder(run: str) -> Path:
    """Return the folder with the head of a run: its `head/`, or the folder itself.

    Raises:
        ValueError: there is none.
    """
    folder = Path(run).expanduser()
    for place in (folder / "head", folder):
        if (last_good(place) / CONFIG).is_file():
            return place
    raise ValueError(f"run={run}: no head/config.json in there: give the folder of a finished run, or a published head")


def find_heads(runs: list[str]) -> dict[str, Path]:
    """Return the head folders of the runs under the names that the report gives them.

    A head is called by its kind, and by its run too where two are of one kind.

    Raises:
        ValueError: a run has no head, or is given twice.
    """
    repeated = sorted({run for run in runs if runs.count(run) > 1})
    if repeated:
        raise ValueError(f"run {', '.join(repeated)} is given twice: leave one out of run and compare")
    folders = {run: head_folder(run) for run in runs}
    kinds = {run: str(read_config(folder)["head"]["name"]) for run, folder in folders.items()}
    alone = {run for run, kind in kinds.items() if list(kinds.values()).count(kind) == 1}
    return {kinds[run] if run in alone else f"{kinds[run]} {run}": folder for run, folder in folders.items()}


def overlay(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `own` with what `given` says, a None saying nothing."""
    return {**own, **{key: value for key, value in given.items() if value is not None}}


def model_of(run: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model to load: what the run was trained with, and what the user gives instead.

    Raises:
        ValueError: neither says which; or the run's config.yaml cannot be read.
    """
    own = {} if run is None else _trained_model(run)
    # A run's folder may come from the Hub: whether the target's own code may run is for the user alone to say.
    own.pop("trust_remote_code", None)
    if given.get("path") is not None:
        own = {key: value for key, value in own.items() if key in ("dtype", "device", "prompts")}
    model: dict[str, Any] = {"dtype": "auto", "device": None, "trust_remote_code": False, **overlay(own, given)}
    if not model.get("path"):
        raise ValueError(
            "model.path is missing: give model=… or model.path=…, or run=… of a head that knows its target"
        )
    if not model.get("name"):
        model["name"] = Path(model["path"]).name
    return model


def _trained_model(run: str) -> dict[str, Any]:
    """Return the `model` of a run's config.yaml, or where that was not published, the target its head names."""
    file = Path(run).expanduser() / "config.yaml"
    if not file.is_file():
        return {"path": read_config(head_folder(run))["target"]["name"]}
    config = OmegaConf.to_container(OmegaConf.load(file))
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        raise ValueError(f"{file} has no model: restore it, or give model=…")
    return {str(key): value for key, value in model.items()}
