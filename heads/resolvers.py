"""What values in conf/ may compute: a path inside the checkout, the name at the end of a path, a default's company."""

import os
from pathlib import Path

from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent


def register_resolvers() -> None:
    """Make `${root:PATH}`, `${stem:PATH}`, `${if_same:A,B,VALUE}` known to OmegaConf; again changes nothing.

    `root` makes a path of the checkout absolute, so that every command works from any directory. `stem` names a run
    after its model: the last part of a folder's or a Hub model's path. `if_same` gives its third value where the first
    two agree, else nothing: a preset's prompts belong to the preset's data, not to data of the user's own.
    """
    OmegaConf.register_new_resolver("root", lambda path: str(ROOT / path), replace=True)
    OmegaConf.register_new_resolver("if_same", lambda given, own, value: value if given == own else "", replace=True)
    OmegaConf.register_new_resolver("stem", lambda path: os.path.basename(os.path.abspath(path)), replace=True)
