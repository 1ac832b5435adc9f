"""Toy models that assist the toy target, saved where the draft sources load them from."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from heads.common.typed import build
from inference.drafters.assistant import Assistant
from inference.drafters.policy import TreeConfig
from inference.target.target import Target
from tests import toys

CHAIN = toys.TREES["chain"]


def words(names: list[str]) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer whose token i reads the i-th name."""
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def reordered(model: PreTrainedModel, order: list[int]) -> PreTrainedModel:
    """Return a copy whose token i is the model's token order[i]."""
    config = LlamaConfig(**{**model.config.to_dict(), "vocab_size": len(order)})
    made = AutoModelForCausalLM.from_config(config).to(model.dtype)
    weights: dict[str, Tensor] = {
        name: value[order] if "embed" in name or "lm_head" in name else value
        for name, value in model.state_dict().items()
    }
    made.load_state_dict(weights)
    return made


def noisy(model: PreTrainedModel, std: float, seed: int = 3) -> PreTrainedModel:
    """Return a copy that mostly agrees with the model and sometimes does not."""
    made = reordered(model, list(range(model.config.vocab_size)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=std)
    return made


def tiny(vocab: int, seed: int, layers: int = 1) -> PreTrainedModel:
    """Return a random model of a few tokens in fp64, for laws that are enumerated."""
    torch.manual_seed(seed)
    sizes = {**toys.SIZES, "vocab_size": vocab, "hidden_size": 16, "num_hidden_layers": layers}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).double()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """Save both and return the path."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def assistant(path: str, of: Target, **changes: Any) -> Assistant:
    """Return the draft source; `changes` are configuration values."""
    values: dict[str, Any] = {
        "model": path, "match": "same", "dtype": None, "device": None, "trust_remote_code": False, "tree": CHAIN,
        "confidence": 0.0, **changes,
    }  # fmt: skip
    config = build(Assistant.Config, values, "drafter.assistant", {"tree": values["tree"]})
    return Assistant(config, of, "assistant")


def chain(depth: int) -> TreeConfig:
    """Return the policy of a chain."""
    return TreeConfig("chain", depth, 0, 0, [], [])
