"""LoRA adapters (Hu et al., arXiv 2106.09685) on an existing head, for a new domain or a fine-tuned target.

The adapters are peft's, on linear layers of the head, whose own weights stay frozen. Heads that are decoded with or
saved have the adapters merged into their weights.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from torch import Tensor, nn

from heads.common.ranges import Count, Decay, Width
from heads.common.typed import typed


@dataclass(frozen=True)
class WholeConfig:
    """Train every weight of the head."""

    method: str


@dataclass(frozen=True)
class LoraAdapterConfig:
    """Train LoRA adapters on some of the head's linear layers; conf/peft/lora.yaml says what each key means.

    `rslora`: Kalajdzievski, arXiv 2312.03732. Embeddings, norms and an lm_head that is no linear layer stay frozen.
    """

    method: str
    rank: Width
    alpha: Count
    dropout: Decay
    rslora: bool
    target_modules: list[str] | None


AdaptConfig = WholeConfig | LoraAdapterConfig
METHODS: dict[str, type[AdaptConfig]] = {"none": WholeConfig, "lora": LoraAdapterConfig}


def peft_config(values: DictConfig) -> AdaptConfig:
    """Return a configuration of conf/peft as the Config of its method; refuse unknown methods and keys."""
    method = values.get("method")
    if method not in METHODS:
        raise ValueError(f"peft.method is {method!r}: choose one of {', '.join(METHODS)}")
    return typed(METHODS[method], values)


def adapt(head: nn.Module, config: AdaptConfig) -> None:
    """Inject the adapters into a head and freeze the rest; refuse `target_modules` that name no linear layer of it.

    They add nothing yet, the second of each pair being zero.
    """
    if isinstance(config, WholeConfig):
        return
    linear = [name for name, module in head.named_modules() if isinstance(module, nn.Linear)]
    modules = linear if config.target_modules is None else config.target_modules
    unknown = [suffix for suffix in modules if not any(f".{name}".endswith(f".{suffix}") for name in linear)]
    if unknown or not modules:
        raise ValueError(
            f"peft.target_modules={unknown}: the head has no such linear layer; choose among {', '.join(linear)}"
        )
    from peft import LoraConfig, inject_adapter_in_model

    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        target_modules=modules,
    )
    inject_adapter_in_model(lora, head)


def merged_copy(head: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Return a new head of the same kind on the CPU with these weights, its adapters merged into the others."""
    build: Any = type(head)
    copy: nn.Module = build(head.config, head.embeddings)
    adapters: dict[str, Any] | None = vars(head).get("peft_config")  # where peft records what it injected
    if adapters is None:
        copy.load_state_dict(weights)
        return copy
    from peft import LoraModel

    tuner: Any = LoraModel(copy, adapters, "default")
    copy.load_state_dict(weights)
    merged: nn.Module = tuner.merge_and_unload()
    return merged
