"""Records to tokens: samples to train on with their loss masks, and prompts to generate from.

The loss mask has its one home here. It is 1 on the tokens that the target would produce: a chat's answers and the
tokens that end them; a plain text is all answer.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data.records import Message, Record, content_text, parse_all, read_records
from data.template import encode, encode_plain, is_tagged, render, render_tagged, turn_ends

log = logging.getLogger(__name__)

UNKNOWN_SHARE = 0.02  # of the tokens, above which the data does not fit the tokenizer
OPENING = 32  # tokens of a plain document that serve as a prompt, at most half of it


@dataclass(frozen=True)
class DataConfig:
    """Which documents to train on.

    Attributes:
        path: a local file (.json, .jsonl, .txt, .parquet; also .gz, .xz) or a Hub dataset, `name` or `name:config`.
        split: the Hub dataset's split; a file has but one.
        length: tokens of a packed row.
        limit: samples at most; None takes all.
        prompts: a file or Hub dataset of held-out evaluation prompts; empty takes them from the end of `path`.
        held_out: how many records at the end of `path` are then kept away from training.
        max_tokens: tokens of a sample at most. A longer text is cut into several samples; of a longer chat the rest is
            dropped, and the whole chat where no answer is left.
    """

    path: str
    split: str
    length: int
    limit: int | None
    prompts: str
    held_out: int
    max_tokens: int

    def __post_init__(self) -> None:
        """Refuse sizes that leave nothing to train on."""
        for name in ("length", "max_tokens"):
            if getattr(self, name) < 2:
                raise ValueError(f"data.{name}={getattr(self, name)}: must be at least 2 tokens")
        if self.held_out < 0 or (self.limit is not None and self.limit < 1):
            raise ValueError("data.held_out must not be negative, and data.limit must be positive or null")


@dataclass(frozen=True)
class Sample:
    """One document: its tokens, and for each 1 if the target would produce it, else 0."""

    id: str
    token: list[int]
    mask: list[int]


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
        made = _samples(record, tokenizer, config)
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
    return [_prompt(record, tokenizer) for record in islice(parse_all(raw, range(len(raw)), path), limit)]


def save_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write prompts with their tokens as JSON Lines, for `load_prompts` to read with the same target."""
    lines = [json.dumps(prompt._asdict(), ensure_ascii=False) + "\n" for prompt in prompts]
    path.write_text("".join(lines), encoding="utf-8")


def held_out_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Prompt]:
    """Return prompts that training never sees: those of `config.prompts`, else from the held-out end of the data."""
    if config.prompts:
        return load_prompts(config.prompts, tokenizer, limit)
    return [_prompt(record, tokenizer) for record in islice(_records(config, held_out=True), limit)]


def training_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Prompt]:
    """Return the prompts of the records that are trained on, for the target to answer."""
    return [_prompt(record, tokenizer) for record in islice(_records(config, held_out=False), limit)]


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


def _is_plain(record: Record, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the record is read as running text: it is no chat, or has a text too and no template makes it a chat."""
    return not record.messages or bool(record.text and not tokenizer.chat_template)


def _samples(record: Record, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[Sample]:
    if _is_plain(record, tokenizer):
        return _plain(record, tokenizer, config.max_tokens)
    if tokenizer.chat_template:
        return _chat(record, tokenizer, config)
    raise ValueError(
        f"{config.path}: holds chats, but the tokenizer {tokenizer.name_or_path!r} has no chat template; "
        'put a chat_template.jinja beside the model, or give plain text ({"text"} records or .txt)'
    )


def _plain(record: Record, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Sample]:
    if not record.text.strip():
        return []
    token = encode_plain(record.text, tokenizer)
    if tokenizer.eos_token_id is not None and token[-1:] != [tokenizer.eos_token_id]:
        token = [*token, tokenizer.eos_token_id]
    pieces = [token[start : start + max_tokens] for start in range(0, len(token), max_tokens)]
    names = [record.id if start == 0 else f"{record.id}#{start}" for start in range(len(pieces))]
    return [Sample(name, piece, [1] * len(piece)) for name, piece in zip(names, pieces, strict=True)]


def _chat(record: Record, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[Sample]:
    """Return the chat as one sample, or as one an answer where the template rewrites earlier turns."""
    where = f"{config.path}: sample {record.id}"
    answers = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError(f"{where}: the loss mask is all zeros, for the chat has no answer; remove the sample")
    # What follows the last answer is answered by nobody: it would cost a forward pass and train nothing.
    messages = record.messages[: answers[-1] + 1]
    try:
        if is_tagged(tokenizer):
            made = [_settle(*render_tagged(messages, tokenizer), tokenizer)]
        else:
            made = _prefixed(messages, answers, tokenizer, where)
    except TemplateError as error:
        raise ValueError(f"{where}: the chat template refuses it: {error}; mend or remove the sample") from error
    samples = []
    for number, (token, mask) in enumerate(made):
        if len(set(mask)) < 2:
            value = "ones" if any(mask) else "zeros"
            raise ValueError(
                f"{where}: the loss mask is all {value}; "
                "check its messages, and where the chat template puts {% generation %}"
            )
        name = record.id if len(made) == 1 else f"{record.id}#{number}"
        samples.append(Sample(name, token[: config.max_tokens], mask[: config.max_tokens]))
    return samples


def _prefixed(
    messages: list[Message], answers: list[int], tokenizer: PreTrainedTokenizerBase, where: str
) -> list[tuple[list[int], list[int]]]:
    """Tokens and mask by rendering the chat up to each answer's start and end.

    Both must be token prefixes of the whole rendering, as the target at decoding sees just the first of them. Some
    templates write a turn otherwise once it is past (Qwen3 drops its reasoning); then every answer stands as the last
    of a chat of its own, which is how the target meets it.
    """
    whole = _answers_of(messages, answers, tokenizer)
    if whole is not None:
        return [_settle(*whole, tokenizer)]
    alone = [_answers_of(messages[: answer + 1], [answer], tokenizer) for answer in answers]
    made = [_settle(*one, tokenizer) for one in alone if one is not None]
    if len(made) < len(answers):
        raise ValueError(
            f"{where}: the chat template writes the answer otherwise than after its generation prompt, so no loss mask "
            "can be drawn; put {% generation %} and {% endgeneration %} around the answer in the template"
        )
    return made


def _answers_of(
    messages: list[Message], answers: list[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]] | None:
    """Mask what stands between each answer's generation prompt and its end; None if these are no prefixes."""
    cuts = [render(messages[: i + past], tokenizer, not past) for i in answers for past in (0, 1)]
    if not all(cuts[-1].startswith(text) for text in cuts):
        return None
    # Pieces that join to the whole's tokens show the same as the prefixes themselves, and cost much less to encode.
    lengths = [0, *(len(text) for text in cuts)]
    whole, *pieces = encode([cuts[-1], *(cuts[-1][i:k] for i, k in pairwise(lengths))], tokenizer)
    ends = list(accumulate(len(piece) for piece in pieces))
    if whole != [token for piece in pieces for token in piece]:
        prefixes = encode(cuts, tokenizer)  # a tokenizer that begins every text in its own way (SentencePiece)
        if any(whole[: len(prefix)] != prefix for prefix in prefixes):
            return None
        ends = [len(prefix) for prefix in prefixes]
    mask = [0] * len(whole)
    for start, end in zip(ends[::2], ends[1::2], strict=True):
        mask[start:end] = [1] * (end - start)
    return whole, mask


def _settle(token: list[int], mask: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Make every answer end with the token that ends the target's turn, and not behind it.

    Templates write a newline after it, which nobody samples, or leave it to the next turn, or out.
    """
    special, eos = turn_ends(tokenizer), tokenizer.eos_token_id
    token, mask = list(token), list(mask)
    for end in [i for i, (on, following) in enumerate(pairwise([*mask, 0]), 1) if on and not following]:
        last = end - 1
        while (
            last > 0
            and mask[last - 1]
            and token[last] not in special
            and not str(tokenizer.decode(token[last])).strip()
        ):
            last -= 1
        if token[last] in special:
            mask[last + 1 : end] = [0] * (end - last - 1)
        elif eos is not None and end == len(token):
            token, mask = [*token, eos], [*mask, 1]
        elif eos is not None and token[end] == eos:
            mask[end] = 1
    return token, mask


def _prompt(record: Record, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Return the first question of a chat after the chat template, or without one, or the opening of a plain text."""
    if _is_plain(record, tokenizer):
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
