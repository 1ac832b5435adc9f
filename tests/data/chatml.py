"""ChatML: special tokens, chat templates without and with {% generation %}, chats for them, and configurations."""

from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast

from data.config import DataConfig
from data.text.masks import Sample
from data.text.prompts import load_training
from heads.common.typed import typed

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{%- generation -%}{{ m['content'] + '<|im_end|>' }}{%- endgeneration -%}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Tokens = Callable[[str | None], PreTrainedTokenizerFast]

RECORDS = [{"id": f"r{i}", "prompt": f"why {i}", "answer": "so " * (i % 7 + 1)} for i in range(60)]


def data_config(path: str | list[str], **changed: Any) -> DataConfig:
    """Return a configuration for a path, with some values changed."""
    values = {
        "path": path, "split": "train", "length": 64, "limit": None, "prompts": "", "held_out": 0, "max_tokens": 4096,
        "weights": None, "seed": 0, "streaming": False, "min_tokens": 1, "dedup": True, "contamination": None,
        "cache": None, "turns": "all", "reasoning": "keep", "on_bad": "fail", "where": None,
    }  # fmt: skip
    return typed(DataConfig, OmegaConf.create({"data": values | changed}).data)


def load_samples(config: DataConfig, tokenizer: Any) -> Sequence[Sample]:
    """Return the training samples."""
    return load_training(config, tokenizer, 0).samples
