"""Resolvers for values in conf/: a path in the checkout or the user's cache, a path's name, a value by condition."""

import hashlib
import json
import os
from pathlib import Path

from omegaconf import OmegaConf
from torch import cuda

from heads.common.target_config import row_length

ROOT = Path(__file__).resolve().parents[2]


def register_resolvers() -> None:
    """Register the functions below with OmegaConf, as in `${root:PATH}`; idempotent.

    `root` makes a path of the checkout absolute, so that every command works from any directory. `stem` names a run
    after its model: the last part of a folder's or a Hub model's path. `if_same` gives its third value where the first
    two agree, else nothing: a preset's prompts belong to the preset's data, not to data of the user's own. `by_device`
    gives its first value for a CPU, else its second: for the type of device that is named third, where that is null for
    this machine's. `cache_folder` names a folder under HEADSTART_CACHE, which is ~/.cache/headstart unless the
    environment says otherwise. `digest` names a run after all of its values. `row_length` gives the target's context
    where that is known to be less than a length. `made` creates a folder, for a library that does not, and gives its
    path.
    """
    OmegaConf.register_new_resolver("root", lambda path: str(ROOT / path), replace=True)
    OmegaConf.register_new_resolver("if_same", lambda a, b, value: value if a == b else "", replace=True)
    OmegaConf.register_new_resolver("stem", lambda path: os.path.basename(os.path.abspath(path)), replace=True)
    OmegaConf.register_new_resolver("by_device", _by_device, replace=True)
    OmegaConf.register_new_resolver("cache_folder", _cache_folder, replace=True)
    OmegaConf.register_new_resolver("digest", _digest, replace=True)
    OmegaConf.register_new_resolver("made", _created, replace=True)
    OmegaConf.register_new_resolver("row_length", row_length, replace=True)


def _by_device(cpu: object, gpu: object, kind: str | None = None) -> object:
    return cpu if kind == "cpu" or (kind is None and not cuda.is_available()) else gpu


def _cache_folder(name: str) -> str:
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(os.environ.get("HEADSTART_CACHE") or Path(users, "headstart"), name))


def _digest(*values: object) -> str:
    plain = [OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value for value in values]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]


def _created(folder: str) -> str:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder
