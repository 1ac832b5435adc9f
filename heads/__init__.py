"""Draft heads: tensors in, tensors out. One head a file; `HEADS` names them all.

common/    utilities of every layer: typed configurations, one-line errors, redaction of secrets, parsing of
           untrusted files
formats/   heads on disk and on the Hub: our own format, those that other projects publish, those that engines
           read
modules/   shared modules: attention, decoder layers, positions, the draft vocabulary, the KV cache
base.py    the protocol of a draft head, its records, the notation for rows and depths
rows.py    the only index arithmetic on rows and depths
shapes.py  the shapes that many signatures have
eagle.py   EAGLE-1/2: one decoder layer that extrapolates the target's features; HASS, trained on its own features
eagle3.py  EAGLE-3 and 3.1: features of several layers, only tokens fed back
eagle4.py  EAGLE-4: EAGLE-3.1 with candidates
medusa.py  Medusa: one residual head per depth
hydra.py   Hydra: Medusa's heads, each reading the tokens before it
mlp.py     the recurrent MLP speculator
peagle.py  P-EAGLE: an EAGLE-3 head that drafts all depths in one pass
mtp.py     multi-token prediction: one decoder layer, used again for every depth
block.py   block-parallel heads: DFlash, JetSpec, DSpark
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from heads.base import HeadConfig
from heads.block import Block
from heads.common.resolvers import ROOT
from heads.common.target_config import best_head
from heads.common.typed import Json, typed
from heads.common.untrusted import shown
from heads.eagle import Eagle, Hass
from heads.eagle3 import Eagle3
from heads.eagle4 import Eagle4
from heads.hydra import Hydra
from heads.medusa import Medusa
from heads.mlp import Mlp
from heads.mtp import Mtp
from heads.peagle import PEagle

HEADS = {
    "eagle": Eagle, "eagle3": Eagle3, "hass": Hass, "medusa": Medusa, "hydra": Hydra, "mlp": Mlp, "mtp": Mtp,
    "block": Block, "peagle": PEagle, "eagle4": Eagle4,
}  # fmt: skip
BEST, AUTO = "best", "auto"
# The head that `head=best` chooses for each engine of `engine=`, with the options that the engine needs, and what that
# costs: τ on the bundled target (benchmarks/history.md).
SERVED: tuple[Json, str] = {"name": "eagle3"}, ""
WITHOUT_NORMS: tuple[Json, str] = (
    {"name": "eagle3", "feature_norm": False, "norm_output": False},
    "; on the bundled target its τ is 4.06, with EAGLE-3.1's norms 4.21",
)
ENGINES = {
    "vllm": SERVED, "sglang": SERVED, "trtllm": SERVED, "llamacpp": WITHOUT_NORMS, "openvino": WITHOUT_NORMS,
    "transformers": ({"name": "mlp"}, "; on the bundled target its τ is 3.00, that of mtp 4.59"),
}  # fmt: skip


def _best(cfg: DictConfig) -> tuple[Json, str]:
    """Return the options of the head that `head=best` chooses, and the reason; refuse an unread target."""
    if engine := cfg.get("engine"):  # an unknown one is refused where the configuration is typed
        options, cost = ENGINES.get(engine, SERVED)
        return options, f"which {engine} loads{cost}"
    return best_head(cfg.model.path, cfg.model.shape, cfg.model.trust_remote_code)


def best_line(cfg: DictConfig) -> str | None:
    """Return a line on what `head=best` is for a target, None for another head; refuse an unread target."""
    name = cfg.head.name
    if name != BEST:
        return None
    options, why = _best(cfg)
    overrides = [f"head.{key}={str(value).lower()}" for key, value in options.items() if key != "name"]
    return f"head=best: {' '.join([options['name'], *overrides])}, {why}"


def with_head(cfg: DictConfig) -> DictConfig:
    """Return a composed configuration with its head named and the head's own training values filled in.

    `head=best` becomes a head that `engine` loads, without one the head that suits `model`, by the target's
    config.json. `head.training` holds the values of `objective` and `trainer` where these are `auto`, and the losses
    that those of `objective` are added to. Refuse a target whose config.json cannot be read.
    """
    cfg = cfg.copy()
    OmegaConf.set_struct(cfg, False)
    name = cfg.head.name
    if name == BEST:
        options, _ = _best(cfg)
        cfg.head = OmegaConf.merge(OmegaConf.load(ROOT / "conf" / "head" / f"{options['name']}.yaml"), options)
    training: Any = OmegaConf.to_container(cfg.head.pop("training", OmegaConf.create()), resolve=False)
    for section, values in training.items():
        if section not in cfg:
            continue
        ours = cfg[section]
        for key, value in values.items():
            if key == "losses":
                given: Any = OmegaConf.to_container(ours[key], resolve=False)
                ours[key] = given if "candidates" in given else value | given  # a second stage has its own alone
            elif ours[key] == AUTO:
                ours[key] = value
    return cfg


def head_config(values: Any) -> HeadConfig:
    """Return the Config of the head kind `name` in values of YAML or of a file; refuse unknown ones."""
    name = values.get("name") if isinstance(values, Mapping) else None
    if name not in [*HEADS]:
        raise ValueError(f"head.name is {shown(name)}: choose one of {', '.join(HEADS)}")
    kind: Any = HEADS[name]
    return typed(kind.Config, values, "head")
