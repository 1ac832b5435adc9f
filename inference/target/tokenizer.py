"""A target's tokenizer without its model: enough for the draft sources that read the text and nothing else."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import BatchEncoding, GenerationConfig, PreTrainedTokenizerBase

from heads.common.errors import one_line, panicked
from heads.common.target_config import UNFIT, read_target_config, reason
from inference.target import loading


@runtime_checkable
class Reads(Protocol):
    """What a source that drafts from the text alone asks of a target; a `Target` has it too."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    device: torch.device
    takes_trees: bool


@dataclass
class Reader:
    """A tokenizer, and the tokens that end an answer."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    eos: frozenset[int]
    device: torch.device
    takes_trees: bool

    @classmethod
    def load(cls, path: str, trust_remote_code: bool) -> "Reader":
        """Load the tokenizer of a folder or Hub name, no weights; refuse a path that none loads from."""
        tokenizer = loading.load_tokenizer(path, trust_remote_code)
        configured = _configured(path, trust_remote_code)
        return cls(path, tokenizer, end_tokens(configured, tokenizer), torch.device("cpu"), True)


def _configured(path: str, trust_remote_code: bool) -> GenerationConfig | None:
    """Return a model's generation config, as loading the model would make it; None where only a tokenizer is there."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        pass
    except UNFIT as error:
        raise ValueError(f"model.path={path}: its generation_config.json is damaged ({reason(error)})") from error
    try:
        return GenerationConfig.from_model_config(read_target_config(path, trust_remote_code))
    except ValueError:
        return None


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str | list[str], **options: Any) -> BatchEncoding:
    """Return what a tokenizer makes of one text or several.

    Raises:
        UnicodeEncodeError: one holds half a surrogate pair, which is no text; tokenizers call it a TypeError.
        ValueError: the tokenizer fails at it.
    """
    for one_text in [text] if isinstance(text, str) else text:
        one_text.encode()
    try:
        return tokenizer(text, verbose=False, **options)
    except BaseException as error:
        if not panicked(error):
            raise
        name = tokenizer.name_or_path or "the tokenizer"
        raise ValueError(f"{name}: its tokenizer fails at a text ({one_line(error)}); download it again") from error


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of running text, with the special tokens that the tokenizer begins it with.

    The end token that some tokenizers (add_eos_token) append is left out: a target writes nothing after it.

    Raises:
        UnicodeEncodeError, ValueError: as `tokenize`.
    """
    token = list(tokenize(tokenizer, text)["input_ids"])
    if token[-1:] != [tokenizer.eos_token_id]:
        return token
    without_special = list(tokenize(tokenizer, text, add_special_tokens=False)["input_ids"])
    before = token[:-1]
    appended = before[len(before) - len(without_special) :] == without_special  # else the text itself ends with it
    return before if before and appended else token


def end_tokens(configured: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer: those of the generation config, and the tokenizer's."""
    eos = configured.eos_token_id if configured else None
    tokens = eos if isinstance(eos, list) else [eos]
    return frozenset(token for token in [*tokens, tokenizer.eos_token_id] if isinstance(token, int))
