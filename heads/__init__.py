"""Draft heads: models only, tensors in and tensors out."""

from heads.block import Block
from heads.eagle import Eagle
from heads.eagle3 import Eagle3
from heads.hass import Hass
from heads.hydra import Hydra
from heads.medusa import Medusa
from heads.mlp import Mlp
from heads.mtp import Mtp

HEADS = {
    "eagle": Eagle, "eagle3": Eagle3, "hass": Hass, "medusa": Medusa, "hydra": Hydra, "mlp": Mlp, "mtp": Mtp,
    "block": Block,
}  # fmt: skip
