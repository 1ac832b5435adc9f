"""Resolvers for values in conf/: a path in the checkout or the user's cache, a path's name, a value by condition."""

import os
from collections.abc import Callable
from pathlib import Path

from omegaconf import OmegaConf
from torch import cuda

from heads.common.files import checksum
from heads.common.target_config import sequence_length, up_to_width

ROOT = Path(__file__).resolve().parents[2]


def register_resolvers() -> None:
    """Register RESOLVERS with OmegaConf, as in `${root:PATH}`; idempotent."""
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _cache_folder(name: str) -> str:
    """Return a folder under HEADSTART_CACHE, which is ~/.cache/headstart unless the environment says otherwise."""
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(os.environ.get("HEADSTART_CACHE") or Path(users, "headstart"), name))


def _digest(*values: object) -> str:
    plain = [OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value for value in values]
    return checksum(plain)[:8]


def _created(folder: str) -> str:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder


RESOLVERS: dict[str, Callable[..., object]] = {
    "root": lambda path: str(ROOT / path),  # a path in the checkout, so that every command works from any directory
    "stem": lambda path: os.path.basename(os.path.abspath(path)).removesuffix(".gguf"),  # a run's name, by its model
    # A preset's prompts belong to the preset's data; with data of the user's there are none.
    "if_same": lambda a, b, value: value if a == b else "",
    # The first value on a CPU, the second on an accelerator: for a named device type, or for this machine.
    "by_device": lambda cpu, gpu, kind=None: cpu if (kind or ("" if cuda.is_available() else "cpu")) == "cpu" else gpu,
    "cache_folder": _cache_folder,
    "digest": _digest,  # the name of a run, after all of its values
    "made": _created,  # a folder that is created, for a library that does not create it
    "sequence_length": sequence_length,
    "up_to_width": up_to_width,
}
