"""The multi-token-prediction module that the target's own checkpoint carries, as a draft source (heads/mtp.py)."""

from dataclasses import dataclass

from inference.drafters.head import HeadDrafter
from inference.drafters.mtp_module import load_mtp
from inference.drafters.policy import TreeConfig
from inference.target.target import Target


class MtpDrafter(HeadDrafter):
    """A draft head that needs no training and no file of its own."""

    @dataclass(frozen=True)
    class Config:
        """Where the module lies (None: where the target was loaded from), and the tree it grows."""

        checkpoint: str | None
        tree: TreeConfig

    def __init__(self, config: Config, target: Target, name: str) -> None:
        super().__init__(load_mtp(target, config.checkpoint or target.name), config.tree, name)
