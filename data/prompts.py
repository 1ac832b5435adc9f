"""Records to tokens: samples to train on, and prompts to generate from."""

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from data.config import DataConfig
from data.masks import Sample, is_plain, samples_of
from data.records import Record, content_text, parse_all, read_records
from data.template import encode, encode_plain, render

log = logging.getLogger(__name__)

UNKNOWN_SHARE = 0.02  # of the tokens, above which the data does not fit the tokenizer
OPENING = 32  # tokens of a plain document that serve as a prompt, at most half of it


class Prompt(NamedTuple):
    """Where generation starts: the tokens, and the user's (and the system's) words that they were made from."""

    id: str
    token: list[int]
    category: str
    text: str = ""
    system: str = ""


def load_samples(config: DataConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> list[Sample]:
    """Return the training samples of `config.path`, without the held-out records, at most the smaller limit.

    Raises:
        ValueError: unreadable or empty data, an unknown shape, a chat for a tokenizer without a chat template, a
            template that cannot be masked, or a chat whose mask is all zeros or all ones, which is named.
    """
    most = min((n for n in (config.limit, limit) if n is not None), default=None)
    samples: list[Sample] = []
    dropped = 0
    for record in _records(config, held_out=False):
        made = samples_of(record, tokenizer, config.path, config.max_tokens)
        kept = [sample for sample in made if any(sample.mask)]
        dropped += len(made) - len(kept)
        samples += kept
        if most is not None and len(samples) >= most:
            break
    if dropped:
        log.warning("%s: dropped %d chats: data.max_tokens cuts their answers away", config.path, dropped)
    _warn_of_unknown(samples, tokenizer, config.path)
    if not samples:
        raise ValueError(f"{config.path}: nothing is left to train on; raise data.max_tokens or give other data")
    return samples[:most]


def load_prompts(path: str, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Prompt]:
    """Return the prompts of a file or Hub dataset: the questions of chats, else the openings of plain texts.

    What `save_prompts` wrote comes back as it was, token for token.
    """
    raw = read_records(path, split="")
    if set(raw[0]) == set(Prompt._fields):
        return [Prompt(**record) for record in islice(raw, limit)]
    return [prompt_of(record, tokenizer) for record in islice(parse_all(raw, range(len(raw)), path), limit)]


def save_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write prompts with their tokens as JSON Lines, for `load_prompts` to read with the same target."""
    lines = [json.dumps(prompt._asdict(), ensure_ascii=False) + "\n" for prompt in prompts]
    path.write_text("".join(lines), encoding="utf-8")


def held_out_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Prompt]:
    """Return prompts that training never sees: those of `config.prompts`, else from the held-out end of the data."""
    if config.prompts:
        return load_prompts(config.prompts, tokenizer, limit)
    return [prompt_of(record, tokenizer) for record in islice(_records(config, held_out=True), limit)]


def training_records(config: DataConfig, limit: int | None) -> list[Record]:
    """Return the records that are trained on, whole, for the target to answer."""
    return list(islice(_records(config, held_out=False), limit))


def _records(config: DataConfig, held_out: bool) -> Iterator[Record]:
    raw = read_records(config.path, config.split)
    kept = len(raw) - (0 if config.prompts else config.held_out)
    if kept < 1:
        raise ValueError(f"{config.path}: {len(raw)} records, data.held_out={config.held_out} leaves none; lower it")
    return parse_all(raw, range(kept, len(raw)) if held_out else range(kept), config.path)


def _warn_of_unknown(samples: list[Sample], tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Say so where a tokenizer without byte fallback loses much of the text: a head would learn little from it."""
    unknown = tokenizer.unk_token_id
    share = sum(s.token.count(unknown) for s in samples) / max(1, sum(len(s.token) for s in samples))
    if unknown != tokenizer.eos_token_id and share > UNKNOWN_SHARE:
        log.warning(
            "%s: %.0f%% of the tokens are unknown to the tokenizer; is this the target's text?", path, 100 * share
        )


def prompt_of(record: Record, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Return the first question of a chat after the chat template, or without one, or the opening of a plain text."""
    if is_plain(record, tokenizer):
        token = encode_plain(record.text, tokenizer)
        token = token[: max(1, min(OPENING, len(token) // 2))]
        text = str(tokenizer.decode(token, skip_special_tokens=True))
        return Prompt(record.id, token, record.category, text)
    first = next((i for i, message in enumerate(record.messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError(f"prompt {record.id}: the chat has no user message; remove it")
    asked = record.messages[: first + 1]
    text, system = content_text(asked[first]), "\n\n".join(content_text(message) for message in asked[:first])
    if tokenizer.chat_template:
        (token,) = encode([render(asked, tokenizer, True)], tokenizer)
        return Prompt(record.id, token, record.category, text, system)
    return Prompt(record.id, encode_plain(text, tokenizer), record.category, text, system)
