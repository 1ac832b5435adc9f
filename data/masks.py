"""Loss masks: 1 on the tokens that the target would produce, a chat's answers and the tokens that end them.

Their one home. A plain text is all answer. A chat's mask is the chat template's own where it marks its answers by
{% generation %}, else drawn by rendering the chat up to where each answer begins and ends.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data.records import Message, Record
from data.template import encode, encode_plain, is_tagged, render, render_tagged, turn_ends


@dataclass(frozen=True)
class Sample:
    """One document: its tokens, and for each 1 if the target would produce it, else 0."""

    id: str
    token: list[int]
    mask: list[int]


def is_plain(record: Record, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the record is read as running text: it is no chat, or has a text too and no template makes it a chat."""
    return not record.messages or bool(record.text and not tokenizer.chat_template)


def samples_of(record: Record, tokenizer: PreTrainedTokenizerBase, path: str, max_tokens: int) -> list[Sample]:
    """Return a record's samples: a text's pieces, or a chat, in some templates as one sample an answer.

    Raises:
        ValueError: a chat for a tokenizer without a chat template, a template that cannot be masked, or a chat whose
            mask is all zeros or all ones; `path` and the sample are named.
    """
    if is_plain(record, tokenizer):
        return _plain(record, tokenizer, max_tokens)
    if tokenizer.chat_template:
        return _chat(record, tokenizer, path, max_tokens)
    raise ValueError(
        f"{path}: holds chats, but the tokenizer {tokenizer.name_or_path!r} has no chat template; "
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


def _chat(record: Record, tokenizer: PreTrainedTokenizerBase, path: str, max_tokens: int) -> list[Sample]:
    """Return the chat as one sample, or as one an answer where the template rewrites earlier turns."""
    where = f"{path}: sample {record.id}"
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
        samples.append(Sample(name, token[:max_tokens], mask[:max_tokens]))
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
