"""Adapting a head that is there, to a new domain or to a fine-tuned target, by low-rank factors (LoRA).

The factors (Hu et al., arXiv 2106.09685) are peft's; they stand beside linear layers inside the head, which stays what
it is, and are all that is trained. Whatever leaves the trainer is a plain head, the factors merged into its weights.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from peft import LoraConfig, LoraModel, PeftConfig, inject_adapter_in_model
from torch import Tensor, nn

from heads.common.ranges import Count, Decay, Width
from heads.common.typed import typed


@dataclass(frozen=True)
class WholeConfig:
    """Train every weight of the head."""

    method: str


@dataclass(frozen=True)
class FactorsConfig:
    """Train factors of rank `rank` beside some of the head's linear layers.

    What they add is scaled by alpha / rank, or with `rslora` by alpha / sqrt(rank) (Kalajdzievski, arXiv 2312.03732).
    `target_modules` are the layers' names or the ends of them; null is all linear layers. Embeddings, norms and an
    lm_head that is no linear layer of its own stay as they are.
    """

    method: str
    rank: Width
    alpha: Count
    dropout: Decay
    rslora: bool
    target_modules: list[str] | None


AdaptConfig = WholeConfig | FactorsConfig
METHODS: dict[str, type[AdaptConfig]] = {"none": WholeConfig, "lora": FactorsConfig}


def peft_config(values: DictConfig) -> AdaptConfig:
    """Return what conf/peft says as the Config of its method.

    Raises:
        ValueError: an unknown method or key, or a value out of range.
    """
    method = values.get("method")
    if method not in METHODS:
        raise ValueError(f"peft.method is {method!r}: choose one of {', '.join(METHODS)}")
    return typed(METHODS[method], values)


def adapt(head: nn.Module, config: AdaptConfig) -> None:
    """Put the factors into a head and freeze the rest; they add nothing yet, the second of each pair being zero.

    Raises:
        ValueError: the head has no linear layer of a name in `target_modules`.
    """
    if isinstance(config, WholeConfig):
        return
    linear = [name for name, module in head.named_modules() if isinstance(module, nn.Linear)]
    wanted = linear if config.target_modules is None else config.target_modules
    unknown = [each for each in wanted if not any(f".{name}".endswith(f".{each}") for name in linear)]
    if unknown or not wanted:
        raise ValueError(
            f"peft.target_modules={unknown}: the head has no such linear layer; choose among {', '.join(linear)}"
        )
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        target_modules=wanted,
    )
    inject_adapter_in_model(lora, head)


def plain(head: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Return a new head of the same kind on the CPU, without factors.

    Args:
        head: one of HEADS, adapted or not.
        weights: its state, that of the factors included; they are merged into the weights that they adapt.
    """
    build: Any = type(head)
    copy: nn.Module = build(head.config, head.embeddings)
    factors: dict[str, PeftConfig] | None = vars(head).get("peft_config")  # where peft notes what it has put in
    if factors is None:
        copy.load_state_dict(weights)
        return copy
    tuner: Any = LoraModel(copy, factors, "default")
    copy.load_state_dict(weights)
    merged: nn.Module = tuner.merge_and_unload()
    return merged
