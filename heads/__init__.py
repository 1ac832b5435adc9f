"""Draft heads: models only, tensors in and tensors out."""

from heads.eagle import Eagle
from heads.medusa import Medusa

HEADS = {"eagle": Eagle, "medusa": Medusa}
