"""Draft heads: models only, tensors in and tensors out."""

from heads.eagle import Eagle
from heads.medusa import Medusa
from heads.mtp import Mtp

HEADS = {"eagle": Eagle, "medusa": Medusa, "mtp": Mtp}
