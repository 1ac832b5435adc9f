"""Records to tokens: samples to train on with their loss masks, and prompts to generate from.

The loss mask has its one home here. It is 1 on the tokens that the target would produce: a chat's answers and the
tokens that end them; a plain text is all answer.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data.records import Message, Record, content_text, parse_all, read_records

log = logging.getLogger(__name__)

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
OPENING = 32  # tokens of a plain document that serve as a prompt, at most half of it
TEMPLATE_DATE = "26 Jul 2024"  # Llama 3's own default; without it a resumed run would see the new day's tokens


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
    if not samples:
        raise ValueError(f"{config.path}: nothing is left to train on; raise data.max_tokens or give other data")
    return samples[:most]


def load_prompts(path: str, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Prompt]:
    """Return the prompts of a file or Hub dataset: the questions of chats, else the openings of plain texts."""
    raw = read_records(path, split="")
    return [_prompt(record, tokenizer) for record in islice(parse_all(raw, range(len(raw)), path), limit)]


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
    token = _tokens(record.text, tokenizer)
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
        if GENERATION.search(tokenizer.get_chat_template()):
            made = [_tagged(messages, tokenizer)]
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


def _tagged(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Tokens and mask by the template's own {% generation %} blocks."""
    made: Any = tokenizer.apply_chat_template(
        messages,
        return_assistant_tokens_mask=True,
        return_dict=True,
        date_string=TEMPLATE_DATE,
        tokenizer_kwargs={"verbose": False},
    )
    return _settle(list(made["input_ids"]), list(made["assistant_masks"]), tokenizer)


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
    starts = [_render(messages[:answer], tokenizer, True) for answer in answers]
    ends = [_render(messages[: answer + 1], tokenizer, False) for answer in answers]
    encoded: Any = tokenizer([*starts, *ends], add_special_tokens=False, verbose=False)
    rows: list[list[int]] = encoded["input_ids"]
    token = rows[-1]
    if any(token[: len(row)] != row for row in rows):
        return None
    mask = [0] * len(token)
    for start, end in zip(rows[: len(answers)], rows[len(answers) :], strict=True):
        mask[len(start) : len(end)] = [1] * (len(end) - len(start))
    return token, mask


def _settle(token: list[int], mask: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Make every answer end with the token that ends the target's turn, and not behind it.

    Templates write a newline after it, which nobody samples, or leave it to the next turn, or out.
    """
    special, eos = _special(tokenizer), tokenizer.eos_token_id
    token, mask = list(token), list(mask)
    for end in [i + 1 for i, on in enumerate(mask) if on and not any(mask[i + 1 : i + 2])]:
        start = next((i + 1 for i in range(end - 1, -1, -1) if not mask[i]), 0)
        last = next((i for i in range(end - 1, start - 1, -1) if token[i] in special), None)
        if last is not None and not str(tokenizer.decode(token[last + 1 : end])).strip():
            mask[last + 1 : end] = [0] * (end - last - 1)
        elif eos is not None and end == len(token):
            token, mask = [*token, eos], [*mask, 1]
        elif eos is not None and token[end] == eos:
            mask[end] = 1
    return token, mask


@lru_cache(maxsize=8)
def _special(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _prompt(record: Record, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Return the first question of a chat after the chat template, or without one, or the opening of a plain text."""
    if _is_plain(record, tokenizer):
        token = _tokens(record.text, tokenizer)
        token = token[: max(1, min(OPENING, len(token) // 2))]
        text = str(tokenizer.decode(token, skip_special_tokens=True))
        return Prompt(record.id, token, record.category, text)
    first = next((i for i, message in enumerate(record.messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError(f"prompt {record.id}: the chat has no user message; remove it")
    asked = record.messages[: first + 1]
    text, system = content_text(asked[first]), "\n\n".join(content_text(message) for message in asked[:first])
    if tokenizer.chat_template:
        encoded: Any = tokenizer(_render(asked, tokenizer, True), add_special_tokens=False, verbose=False)
        return Prompt(record.id, encoded["input_ids"], record.category, text, system)
    return Prompt(record.id, _tokens(text, tokenizer), record.category, text, system)


def _render(messages: list[Message], tokenizer: PreTrainedTokenizerBase, generation_prompt: bool) -> str:
    return str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, date_string=TEMPLATE_DATE
        )
    )


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    encoded: Any = tokenizer(text, verbose=False)
    return list(encoded["input_ids"])
