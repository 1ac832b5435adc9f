"""Toy tokenizers with and without chat templates, records on disk, and the folder of real files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.config import DataConfig
from tests.data.chatml import PLAIN, RECORDS, SPECIAL, Tokens, data_config


@pytest.fixture
def tokenizer_with() -> Tokens:
    """Return a function from a chat template to a byte-level tokenizer with ChatML's tokens."""

    def build(template: str | None) -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {symbol: i for i, symbol in enumerate(SPECIAL + alphabet)}
        core = Tokenizer(models.BPE(vocabulary, []))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made = PreTrainedTokenizerFast(
            tokenizer_object=core, eos_token="<|im_end|>", additional_special_tokens=SPECIAL, name_or_path="toy"
        )
        made.chat_template = template
        return made

    return build


@pytest.fixture
def chat(tokenizer_with: Tokens) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a chat template that has no {% generation %}."""
    return tokenizer_with(PLAIN)


@pytest.fixture
def bare(tokenizer_with: Tokens) -> PreTrainedTokenizerFast:
    """Return a tokenizer without a chat template."""
    return tokenizer_with(None)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes records as JSON Lines and returns the file's path."""

    def make(*records: dict[str, Any], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return str(path)

    return make


@pytest.fixture
def tolerant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let data lose more than a fifth of its records."""
    monkeypatch.setattr("data.text.prompts.LOST", 1)


@pytest.fixture
def config() -> Callable[..., DataConfig]:
    """Return a function that makes a DataConfig for a path, with some values changed."""
    return data_config


@pytest.fixture
def cached(
    write: Callable[..., str], config: Callable[..., DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> DataConfig:
    """Return a configuration with a cache, for more records than are written at once."""
    monkeypatch.setattr("data.text.prompts.BATCH", 25)
    return config(write(*RECORDS), cache=str(tmp_path / "cache"), held_out=3)
