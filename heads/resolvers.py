"""What values in conf/ may compute: a path inside the checkout, the name at the end of a path, a default's company."""

import os
from pathlib import Path

import torch
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent


def register_resolvers() -> None:
    """Make `root`, `stem`, `if_same` and `by_device` known to OmegaConf, as in `${root:PATH}`; again changes nothing.

    `root` makes a path of the checkout absolute, so that every command works from any directory. `stem` names a run
    after its model: the last part of a folder's or a Hub model's path. `if_same` gives its third value where the first
    two agree, else nothing: a preset's prompts belong to the preset's data, not to data of the user's own. `by_device`
    gives its first value on a machine without an accelerator, else its second.
    """
    OmegaConf.register_new_resolver("root", lambda path: str(ROOT / path), replace=True)
    OmegaConf.register_new_resolver("if_same", lambda given, own, value: value if given == own else "", replace=True)
    OmegaConf.register_new_resolver("stem", lambda path: os.path.basename(os.path.abspath(path)), replace=True)
    OmegaConf.register_new_resolver("by_device", _by_device, replace=True)


def _by_device(cpu: object, accelerator: object) -> object:
    return accelerator if torch.cuda.is_available() else cpu
