"""A target's tokenizer: text to tokens, and the tokens that end an answer."""

from typing import Any

from transformers import BatchEncoding, GenerationConfig, PreTrainedTokenizerBase

from heads.common.errors import one_line, panicked


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str | list[str], **options: Any) -> BatchEncoding:
    """Tokenize one text or several.

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
    """Return the tokens of plain text, with the tokenizer's special tokens at the start.

    An end token that some tokenizers append (add_eos_token) is left out: a target writes nothing after it.

    Raises:
        UnicodeEncodeError, ValueError: as `tokenize`.
    """
    token = list(tokenize(tokenizer, text)["input_ids"])
    if token[:2] == [tokenizer.bos_token_id] * 2:  # the text ends with the token that the tokenizer adds
        token = token[1:]
    if token[-1:] != [tokenizer.eos_token_id]:
        return token
    without_special = list(tokenize(tokenizer, text, add_special_tokens=False)["input_ids"])
    before = token[:-1]
    appended = before[len(before) - len(without_special) :] == without_special  # else it is the text's own
    return before if before and appended else token


def end_tokens(configured: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer: those of the generation config, and the tokenizer's."""
    eos = configured.eos_token_id if configured else None
    tokens = eos if isinstance(eos, list) else [eos]
    return frozenset(token for token in [*tokens, tokenizer.eos_token_id] if isinstance(token, int))
