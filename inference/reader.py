"""A target's tokenizer without its model: enough for the draft sources that read the text and nothing else."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from inference import loading


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
        """Load the tokenizer of a folder or Hub name; weights are not looked at.

        Raises:
            ValueError: none loads from there, and why.
        """
        tokenizer = loading.load_tokenizer(path, trust_remote_code)
        try:
            configured = GenerationConfig.from_pretrained(path)
        except OSError:  # a folder may have none
            configured = None
        return cls(path, tokenizer, end_tokens(configured, tokenizer), torch.device("cpu"), True)


def end_tokens(configured: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer: those of the generation config, and the tokenizer's."""
    own = configured.eos_token_id if configured else None
    ends = own if isinstance(own, list) else [own]
    return frozenset(token for token in [*ends, tokenizer.eos_token_id] if isinstance(token, int))
