"""What values in conf/ may compute: a path inside the checkout, and the name at the end of a path."""

import os
from pathlib import Path

from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent


def register_resolvers() -> None:
    """Make `${root:PATH}` and `${stem:PATH}` known to OmegaConf; calling it again changes nothing.

    `root` makes a path of the checkout absolute, so that every command works from any directory. `stem` names a run
    after its model: the last part of a folder's or a Hub model's path.
    """
    OmegaConf.register_new_resolver("root", lambda path: str(ROOT / path), replace=True)
    OmegaConf.register_new_resolver("stem", lambda path: os.path.basename(os.path.abspath(path)), replace=True)
