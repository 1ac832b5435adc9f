"""Loss masks: 1 on the tokens that the target would produce, a chat's answers and the tokens that end them.

Their one home. A plain text is all answer. In a chat, an answer starts and ends where the chat template's
{% generation %} says, else where rendering the chat up to there ends. The tokens are those of the whole chat as the
template renders it, never of its parts put together.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from transformers import PreTrainedTokenizerBase

from data.config import DataConfig
from data.text.files import HEAD
from data.text.records import Record
from data.text.template import Span, encode, encode_plain, encode_spans, turn_end_tokens
from data.text.turns import BadSampleError, joined, turns_of
from inference.chat_template import RenderError


@dataclass(frozen=True)
class Sample:
    """One document: its tokens, and its loss mask: for each token 1 if the target would produce it, else 0."""

    id: str
    token: list[int]
    mask: list[int]


def is_plain(record: Record, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the record is read as plain text: it is no chat, or has a text too and there is no chat template."""
    return not record.messages or bool(record.text and not tokenizer.chat_template)


def samples_of(
    record: Record, tokenizer: PreTrainedTokenizerBase, path: str, config: DataConfig, seen: Counter[str]
) -> list[Sample]:
    """Return a record's samples: a text's pieces, or a chat, in some templates as several samples.

    Args:
        record: the record to mask.
        tokenizer: the target's.
        path: the record's source, for errors.
        config: its turns, reasoning, max_tokens and on_bad are read.
        seen: counts of dropped records by cause, and of cut ones.

    Raises:
        ValueError: a chat for a tokenizer without a chat template; unless data.on_bad=drop, a chat without an answer,
            one that the template refuses, whose mask is all zeros or all ones, or whose answers data.max_tokens cuts
            away. `path` and the sample are named.
    """
    plain = is_plain(record, tokenizer)
    if not plain and not tokenizer.chat_template:
        raise ValueError(
            f"{path}: holds chats, but the tokenizer {tokenizer.name_or_path!r} has no chat template; "
            'put a chat_template.jinja beside the model, or give plain text ({"text"} records or .txt)'
        )
    try:
        return _plain(record, tokenizer, config.max_tokens, seen) if plain else _chat(record, tokenizer, config, seen)
    except BadSampleError as bad:
        if config.on_bad == "fail":
            raise ValueError(f"{path}: sample {record.id}: {bad}") from bad
        seen[f"dropped, {bad.cause}"] += 1
        return []


def counts_line(seen: Counter[str]) -> str:
    """Format counts as a line, the most frequent first."""
    return "; ".join(f"{count} {cause}" for cause, count in (+seen).most_common())


def _plain(record: Record, tokenizer: PreTrainedTokenizerBase, max_tokens: int, seen: Counter[str]) -> list[Sample]:
    if not record.text.strip():
        seen["dropped, no question and no text"] += 1
        return []
    if len(record.text) > HEAD:
        message = f"its text has {len(record.text)} characters, at most {HEAD} are read; cut it, or write it as .txt"
        raise BadSampleError("too long a text", message)
    try:
        token = encode_plain(record.text, tokenizer)
    except UnicodeEncodeError as error:
        raise _broken(error) from error
    if tokenizer.eos_token_id is not None and token[-1:] != [tokenizer.eos_token_id]:
        token = [*token, tokenizer.eos_token_id]
    pieces = [token[start : start + max_tokens] for start in range(0, len(token), max_tokens)]
    names = [record.id if start == 0 else f"{record.id}#{start}" for start in range(len(pieces))]
    return [Sample(name, piece, [1] * len(piece)) for name, piece in zip(names, pieces, strict=True)]


def _chat(record: Record, tokenizer: PreTrainedTokenizerBase, config: DataConfig, seen: Counter[str]) -> list[Sample]:
    """Return the chat as one sample, or as several where the template renders earlier turns differently."""
    try:
        turns = turns_of(record, tokenizer, config, seen)
    except RenderError as error:
        raise BadSampleError("refused by the chat template", f"{error}; fix or remove the sample") from error
    try:
        masked = [_end_turns(*_mask(text, spans, tokenizer), tokenizer) for text, spans in joined(turns)]
    except UnicodeEncodeError as error:
        raise _broken(error) from error
    for _, mask in masked:
        if len(set(mask)) < 2:
            value = "ones" if any(mask) else "zeros"
            raise BadSampleError(
                f"mask all {value}",
                f"the loss mask is all {value}; check its messages (is an answer empty?), and where the chat template "
                "puts {% generation %}",
            )
    names = [record.id if len(masked) == 1 else f"{record.id}#{number}" for number in range(len(masked))]
    samples = [
        Sample(name, *_cut(token, mask, config.max_tokens))
        for name, (token, mask) in zip(names, masked, strict=True)
        if any(mask[: config.max_tokens])
    ]
    if not samples:
        raise BadSampleError(
            "answers beyond data.max_tokens",
            f"data.max_tokens={config.max_tokens} cuts its answers away; raise it, shorten or remove the sample",
        )
    seen["cut at data.max_tokens"] += any(len(token) > config.max_tokens for token, _ in masked)
    return samples


def _broken(error: UnicodeEncodeError) -> BadSampleError:
    half = ascii(error.object[error.start])
    return BadSampleError("no text", f"it holds half a surrogate pair, {half}, which is no text; fix or remove it")


def _mask(text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the text's tokens, and 1 for each that lies in a span with all its characters."""
    edges = [0, *chain.from_iterable(spans), len(text)]
    # Pieces that join to the whole's tokens show where each starts, and cost much less to encode than prefixes do.
    whole, *pieces = encode([text, *(text[a:b] for a, b in pairwise(edges))], tokenizer)
    bounds = list(accumulate(len(piece) for piece in pieces))
    if whole != list(chain.from_iterable(pieces)):
        prefixes = encode([text[:edge] for edge in edges[1:]], tokenizer)  # SentencePiece begins every text its own way
        bounds = [len(prefix) for prefix in prefixes]
        if any(whole[: len(prefix)] != prefix for prefix in prefixes):
            return _by_characters(text, spans, tokenizer)
    mask = [0] * len(whole)
    for start, end in zip(bounds[::2], bounds[1::2], strict=False):
        mask[start:end] = [1] * (end - start)
    return whole, mask


def _by_characters(text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Mask where tokens span an answer's edge: the target at decoding never writes such a token."""
    if not tokenizer.is_fast:
        raise BadSampleError(
            "tokens across an answer's edge",
            "its tokens span the edge of an answer, and the tokenizer does not tell their characters; "
            "use the model's fast tokenizer (tokenizer.json)",
        )
    token, offsets = encode_spans(text, tokenizer)
    return token, [int(any(a <= start and end <= b for a, b in spans)) for start, end in offsets]


def _end_turns(token: list[int], mask: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Make every answer end with the token that ends the target's turn, and not after it.

    Templates write a newline after it, which the target never samples, or leave it to the next turn, or out.
    """
    special, eos = turn_end_tokens(tokenizer), tokenizer.eos_token_id
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


def _cut(token: list[int], mask: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
    """Cut after the last trained token within the limit: the rest would cost a forward pass and train nothing."""
    if len(token) <= max_tokens:
        return token, mask
    end = max(i for i, on in enumerate(mask[:max_tokens]) if on) + 1
    return token[:end], mask[:end]
