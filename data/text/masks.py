"""Loss masks: 1 on the assistant's tokens, which are a chat's answers and their EOS tokens.

A plain text is one answer. In a chat, an answer is a {% generation %} block of the chat template; without such blocks
it is found by rendering the chat up to the answer's start and end. Tokens always come from the whole rendered chat.
"""

import dataclasses
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from data.config import DataConfig
from data.text import template
from data.text.parts import REASONING, BadSampleError, LeftOutError, Message, content_text, first
from data.text.records import Record
from inference.target.tokenizer import RenderError, encode_one, text_ids

OPEN = r"(?:<think(?::\w+)?>|\[THINK\]|<\|START_THINKING\|>|<seed:think>)"
CLOSE = r"(?:</think(?::\w+)?>|\[/THINK\]|<\|END_THINKING\|>|</seed:think>)"
EMPTY = re.compile(rf"\s*(?:{OPEN}\s*)?{CLOSE}\n*")
BLOCK = re.compile(rf"\s*{OPEN}.*?{CLOSE}\s*", re.DOTALL)
REST = re.compile(rf".*?{CLOSE}\s*", re.DOTALL)
ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?:<\|start\|>assistant)?", re.DOTALL)
THINK, THOUGHT = "<think>", "</think>"  # tags of a reasoning block, which servers may leave in an answer
UNFINISHED = "with an answer that was cut off, trained without an end"
OPENING_DROPPED = "with a turn of the assistant before the first question, which the chat template refuses"
CHECK = "check its messages or given mask, and where the chat template puts {% generation %}"
OPENED = re.compile(rf"{OPEN}\s*\Z")
# A reasoning block, open or empty, at the end of a generation prompt; Gemma 4's is a channel.
PROMPTED = re.compile(rf"(?:(?:{OPEN}\s*)?(?:{CLOSE}\s*)?|<\|channel>thought\s*<channel\|>)\Z")
TRAINED = re.compile(b"\1+")  # a run of ones in the bytes of a mask
Masked = tuple[list[int], list[int]]  # tokens, and their loss mask


def reasoning_of(message: Message) -> str:
    """Return an answer's reasoning, or empty."""
    field = str(first(message, REASONING, ""))
    block = BLOCK.match(message["content"]) if isinstance(message["content"], str) else None
    return field or (re.sub(rf"{OPEN}|{CLOSE}", "", block[0]) if block else "")


def under_all_names(message: Message) -> Message:
    """Return the message with its reasoning under every name that templates read."""
    field = first(message, REASONING)
    return message if field is None else {**message, "reasoning_content": field, "thinking": field}


def without_reasoning(message: Message) -> Message:
    """Return the message without its reasoning, which is a field or a block at the start of its content."""
    answer = {key: value for key, value in message.items() if key not in REASONING}
    if message["role"] == "assistant" and isinstance(answer["content"], str) and BLOCK.match(answer["content"]):
        answer["content"] = BLOCK.sub("", answer["content"], count=1)
    return answer


def is_empty(message: Message) -> bool:
    """Return whether an answer has no text, tool calls or reasoning."""
    return not ((content_text(without_reasoning(message)) + reasoning_of(message)).strip() or message.get("tool_calls"))


def skip(text: str, start: int, end: int, strip: bool) -> int:
    """Return where training starts in the answer text[start:end].

    An empty reasoning block belongs to the prompt: servers add it to switch thinking off. With `strip`, other reasoning
    blocks are skipped too: some templates write them from other fields.
    """
    opened = OPENED.search(text, 0, start) is not None
    patterns = [EMPTY, REST if opened else BLOCK, ANALYSIS] if strip else [EMPTY]
    return next((match.end() for pattern in patterns if (match := pattern.match(text, start, end))), start)


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Split a text into the reasoning of a think block, which the text or the prompt opens, and the answer."""
    if not text.lstrip().startswith(THINK) and not (opened and THOUGHT in text):
        return "", text
    reasoning, _, answer = text.partition(THOUGHT)
    return reasoning.lstrip().removeprefix(THINK).strip("\n"), answer.lstrip("\n")


@dataclass(frozen=True)
class Sample:
    """A document's tokens and loss mask: 1 for tokens that the target would write, otherwise 0."""

    id: str
    token: list[int]
    loss_mask: list[int]


BAD = (BadSampleError, RenderError, UnicodeEncodeError)  # errors of a bad record


class Turn(NamedTuple):
    """A chat up to the end of an answer: the rendering, and the character spans to train."""

    text: str
    spans: list[template.Span]
    unfinished: list[int]  # ends of answers that were cut off or continue elsewhere: their EOS tokens are not trained


def is_plain(record: Record, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a record is plain text: not a chat, or a chat with a text and no chat template."""
    return not record.messages or bool(record.text and not tokenizer.chat_template)


def samples_of(
    record: Record, tokenizer: PreTrainedTokenizerBase, path: str, config: DataConfig, drop_counts: Counter[str]
) -> list[Sample]:
    """Return a record's samples: its given tokens, a text's pieces, or a chat, which some templates split.

    Raises:
        ValueError: by `path` and sample: there is no chat template for a chat; or, unless data.on_bad=drop, a chat has
            no answer, is refused by the template, has a mask of one value, or loses all answers to data.max_tokens.
    """
    plain = is_plain(record, tokenizer)
    if not (plain or record.pretokenized or record.error) and not tokenizer.chat_template:
        raise ValueError(
            f"{path}: holds chats, but the tokenizer {tokenizer.name_or_path!r} has no chat template; "
            'put a chat_template.jinja next to the model, or give plain text ({"text"} records or .txt)'
        )
    try:
        if record.error is not None:
            raise record.error
        if record.pretokenized:
            for token, mask in record.pretokenized:
                check_vocabulary(token, tokenizer)
                if len(mask) != len(token) or set(mask) - {0, 1}:
                    message = f"it has {len(token)} tokens and a loss_mask of {len(mask)}; give a 0 or 1 for each token"
                    raise BadSampleError("mask that does not fit", message)
            samples = _samples(record.id, record.pretokenized, config.max_tokens, drop_counts)
        elif plain:
            samples = _plain(record, tokenizer, config.max_tokens, drop_counts)
        else:
            turns = joined(turns_of(record, tokenizer, config, drop_counts))
            masked = []
            for turn in turns:
                token, mask = _end_turns(*_mask(turn.text, turn.spans, tokenizer), tokenizer)
                if unfinished := turn.unfinished:  # an answer that was cut off has no end token
                    starts = [start for start, _ in turn.spans]
                    ends = [(end, min((s for s in starts if s > end), default=len(turn.text))) for end in unfinished]
                    _, written = _mask(turn.text, ends, tokenizer)
                    if unfinished[-1] > starts[-1]:  # what a finished answer adds after it stays
                        token, mask = token[: len(written)], mask[: len(written)]
                    mask = [int(a and not b) for a, b in zip_longest(mask, written, fillvalue=0)]
                if any(mask) or not unfinished:
                    masked.append((token, mask))
            if not masked:
                message = "the chat template writes nothing of its answer; remove the sample"
                raise BadSampleError("an answer that the chat template leaves out", message)
            if any(0 not in mask for _, mask in masked):
                raise BadSampleError("mask all ones", f"the loss mask is all ones; {CHECK}")
            samples = _samples(record.id, masked, config.max_tokens, drop_counts)
    except BAD as error:
        count_bad(error, f"{path}: sample {record.id}", config, drop_counts)
        return []
    drop_counts.update(record.notes)
    target = str(tokenizer.name_or_path).rstrip("/").rpartition("/")[2]
    if record.model and record.model.rpartition("/")[2].casefold() != target.casefold():
        drop_counts[
            f"answered by {record.model}, which is not {target} by name: answers=FILE writes the target's own"
        ] += 1
    if config.turns == "text":
        return [dataclasses.replace(sample, loss_mask=[1] * len(sample.loss_mask)) for sample in samples]
    return samples


def bad_sample(error: ValueError) -> BadSampleError:
    """Return the BadSampleError for an error of a template or an encoding."""
    if isinstance(error, BadSampleError):
        return error
    if isinstance(error, UnicodeEncodeError):
        half = ascii(error.object[error.start])
        return BadSampleError("no text", f"it holds half a surrogate pair, {half}, which is no text; fix or remove it")
    return BadSampleError("refused by the chat template", f"{error}; fix or remove the record")


def count_bad(error: ValueError, name: str, config: DataConfig, drop_counts: Counter[str]) -> None:
    """Count a bad record by its cause; with data.on_bad=fail refuse it by its name, unless it holds no answer."""
    bad = bad_sample(error)
    is_left_out = isinstance(bad, LeftOutError)
    if config.on_bad == "fail" and not is_left_out:
        raise ValueError(f"{name}: {bad}") from error
    drop_counts[f"{'left out' if is_left_out else 'dropped'}, {bad.cause}"] += 1


def check_vocabulary(token: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse tokens outside of the tokenizer's vocabulary."""
    last, media = template.last_token(tokenizer), template.media_tokens(tokenizer)
    for number in token:
        if not 0 <= number <= last:
            message = f"token {number} is not among the tokenizer's 0 to {last}; give the model.path that wrote it"
            raise BadSampleError("token of another vocabulary", message)
        if number in media:
            message = f"token {number} ({media[number]}) is more than text, and only text is read; remove the record"
            raise BadSampleError("more than text", message)


def counts_line(drop_counts: Counter[str]) -> str:
    """Format counts as a line, the most frequent first."""
    return "; ".join(f"{count} {cause}" for cause, count in (+drop_counts).most_common())


def _plain(
    record: Record, tokenizer: PreTrainedTokenizerBase, max_tokens: int, drop_counts: Counter[str]
) -> list[Sample]:
    if not record.text.strip():
        drop_counts["dropped, no question and no text"] += 1
        return []
    token, eos = text_ids(record.text, tokenizer), tokenizer.eos_token_id
    drop_counts[UNFINISHED] += not record.ended
    if record.ended and eos is not None and token[-1:] != [eos]:
        token = [*token, eos]
    pieces = [token[start : start + max_tokens] for start in range(0, len(token), max_tokens)]
    return [Sample(f"{record.id}#{i}" if i else record.id, piece, [1] * len(piece)) for i, piece in enumerate(pieces)]


def _samples(id_: str, masked: Sequence[Masked], max_tokens: int, drop_counts: Counter[str]) -> list[Sample]:
    """Return masked documents as samples, truncated at max_tokens."""
    names = [id_ if len(masked) == 1 else f"{id_}#{number}" for number in range(len(masked))]
    samples: list[Sample] = []
    for name, (token, mask) in zip(names, masked, strict=True):
        if 1 not in mask:
            raise BadSampleError("mask all zeros", f"the loss mask is all zeros; {CHECK}")
        within = mask[:max_tokens]
        if 1 in within:  # truncated after the last trained token: later tokens would not be trained
            end = len(token) if len(token) <= max_tokens else max_tokens - within[::-1].index(1)
            samples.append(Sample(name, token[:end], mask[:end]))
    if not samples:
        raise BadSampleError(
            "answers beyond data.max_tokens",
            f"data.max_tokens={max_tokens} cuts its answers away; raise it, shorten or remove the sample",
        )
    drop_counts["truncated at data.max_tokens"] += any(len(token) > max_tokens for token, _ in masked)
    return samples


def turns_of(
    record: Record, tokenizer: PreTrainedTokenizerBase, config: DataConfig, drop_counts: Counter[str]
) -> list[Turn]:
    """Return the chat up to each answer that is trained on."""
    strip = config.reasoning == "cut"
    chat = template.with_opening(record.messages, tokenizer, record.tools)
    drop_counts[OPENING_DROPPED] += len(chat) < len(record.messages)
    messages = [(without_reasoning if strip else under_all_names)(message) for message in chat]
    roles = [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else -1
    # An empty answer would only train the end token.
    empty_by_index = {i: is_empty(messages[i]) for i, role in enumerate(roles) if role == "assistant" and i > first}
    answers = [i for i, empty in empty_by_index.items() if messages[i].get("weight") != 0 and not empty]
    if not answers:
        message = "the loss mask is all zeros, for the chat has no answer, or empty ones only; remove the sample"
        raise BadSampleError("no answer", message)
    drop_counts["with an empty answer, which trains nothing"] += any(empty_by_index.values())
    if config.turns == "last":
        question = max((i for i, role in enumerate(roles[: answers[-1]]) if role == "user"), default=-1)
        answers = [i for i in answers if i > question]
    turns = [_turn(record._replace(messages=messages[: i + 1]), tokenizer, strip) for i in answers]
    drop_counts[UNFINISHED] += any(messages[i].get("finish_reason") == "length" for i in answers)
    left_out = dict.fromkeys(("reasoning", "tool calls", "text"), False)
    for i, turn in zip(answers, turns, strict=True):
        answer = "".join(turn.text[a:b] for a, b in turn.spans)
        left_out["reasoning"] |= reasoning_of(messages[i]).strip() not in turn.text
        left_out["tool calls"] |= _has_other_calls(messages[i], answer)
        left_out["text"] |= content_text(without_reasoning(messages[i])).strip() not in turn.text
    for before in messages[: answers[-1]]:
        if (role := before["role"]) not in ("assistant", "tool"):
            name = "system prompt" if role in ("system", "developer") else f"{role} message"
            left_out[name] = left_out.get(name, False) or content_text(before).strip() not in turns[-1].text
    drop_counts.update({f"whose {name} the chat template leaves out": is_lost for name, is_lost in left_out.items()})
    return turns


def _has_other_calls(message: Message, answer: str) -> bool:
    """Return whether a message has tool calls that its rendered answer lacks next to the reasoning and text."""
    calls = message.get("tool_calls") or ()
    for text in (reasoning_of(message), content_text(without_reasoning(message))) if calls else ():
        answer = answer.replace(text.strip(), "", 1)
    return any(str((call.get("function") or call).get("name")) not in answer for call in calls)


def _turn(record: Record, tokenizer: PreTrainedTokenizerBase, strip: bool) -> Turn:
    """Find a chat's last answer: after the target's prompt, up to the chat's end.

    Some templates shorten earlier messages after an answer (Mistral's system prompt, gpt-oss's reasoning before a tool
    call); the prompt is then the one that the target had.
    """
    tools, before = record.tools, record.messages[:-1]
    prompt = template.render(before, tokenizer, True, tools)
    text, blocks = template.render_tagged(record.messages, tokenizer, tools)
    ends = template.ends_of(tokenizer)  # Phi-3 and others append the end token to any finished last turn
    if ends.text.search(text) and ends.text.search(template.render(before, tokenizer, False, tools)):
        text = text.removesuffix(str(tokenizer.eos_token))
    start = len(prompt) if text.startswith(prompt) else None
    if start is None:
        start = _start(prompt, text, template.render(before, tokenizer, False, tools), content_text(before[-1]).strip())
    if "add_generation_prompt" not in tokenizer.get_chat_template(tools=list(tools) or None):
        # Command R7B writes the next header behind an answer, too.
        size = bisect_left(range(1, len(prompt)), True, key=lambda size: not text.endswith(prompt[-size:]))
        if ended := ends.turn.search(text, len(text) - size):
            text = text[: ended.end()]
    if blocks is not None:
        least = start
        if least is None:  # where the prompt and the text differ first
            least = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(text))
        inside = [(max(a, least), min(b, len(text))) for a, b in blocks if a < len(text) and b > least]
        spans = _block_spans(text, inside, least, ends)
    elif start is None:
        raise BadSampleError(
            "answer not after its generation prompt",
            "the chat template writes the answer otherwise than after its generation prompt, so there is no exact "
            "loss mask; put {% generation %} and {% endgeneration %} around the answer in the template",
        )
    else:
        spans = [(start, len(text))]
    closed = PROMPTED.sub("", prompt)
    if spans and not text.startswith(closed):
        start = spans[0][0] if start is None else start
        given = prompt if text[:start].endswith(prompt[len(closed) :]) else closed
        text, shift = given + text[start:], len(given) - start
        spans = [(a + shift, b + shift) for a, b in spans]
    spans = [(skip(text, a, b, strip), b) for a, b in spans]
    return Turn(text, spans, _unfinished_end(record.messages[-1], text, spans, ends))


def _block_spans(text: str, spans: list[template.Span], least: int, ends: template.Ends) -> list[template.Span]:
    """Return {% generation %} spans with the whitespace before the first, from `least` on, and the end of the turn."""
    if spans:
        if least < spans[0][0] and not text[least : spans[0][0]].strip():
            spans[0] = least, spans[0][1]
        ended = ends.turn.match(text, spans[-1][1])
        spans[-1] = spans[-1][0], ended.end() if ended else spans[-1][1]
    return spans


def _unfinished_end(message: Message, text: str, spans: list[template.Span], ends: template.Ends) -> list[int]:
    """Return where the model stopped in an answer that it did not finish; empty if it finished it."""
    answer = "".join(text[a:b] for a, b in spans)
    if not spans or not (message.get("finish_reason") == "length" or _has_other_calls(message, answer)):
        return []
    start, end = spans[-1]
    written = ends.rest.sub("", text[start:end])
    if not content_text(message):  # cut off in the reasoning, so the template wrote its end
        written = re.sub(rf"\s*{CLOSE}\s*\Z", "", written)
    return [start + len(written)]


def _start(generation_prompt: str, text: str, chat: str, question: str) -> int | None:
    """Return the start of the answer to `question`, the end of `chat`: after the prompt or a suffix of the prompt.

    The suffix is the longest one that the text contains; it includes all of `question`.
    """
    for prompt in (generation_prompt, PROMPTED.sub("", generation_prompt)):  # without the reasoning block that it opens
        if text.startswith(prompt):
            return len(prompt)
        if question and prompt.startswith(chat):
            sizes = range(len(prompt) + 1)
            size = bisect_left(sizes, True, key=lambda size: prompt[len(prompt) - size :] not in text) - 1
            if question in chat[len(prompt) - size :]:
                return text.rfind(prompt[len(prompt) - size :]) + size
    return None


def joined(turns: list[Turn]) -> list[Turn]:
    """Join the answers of chats that are prefixes of each other into one text with all their spans.

    Some templates render earlier turns differently (Qwen3 drops their reasoning): then each answer is its own text.
    """
    texts: list[Turn] = []
    for turn in reversed(turns):
        longer = next((other for other in texts if other.text.startswith(turn.text)), None)
        if longer is None:
            texts.append(turn)
        else:
            longer.spans[:0] = turn.spans
            longer.unfinished[:0] = turn.unfinished
    return texts[::-1]


def _mask(text: str, spans: list[template.Span], tokenizer: PreTrainedTokenizerBase) -> Masked:
    """Return the text's tokens, and 1 for each token that is entirely in a span; the target writes no other.

    A token that seems to start before a span may follow a space outside every token; the prefix's own tokens decide.
    """
    token, mask, straddles = list[int](), list[int](), True
    if tokenizer.is_fast:
        encoded = encode_one(text, tokenizer)
        token, straddles = encoded.ids, False
        mask = [0] * len(token)
        for start, end in spans:
            (first, begins), (last, _) = (_token_at(edge, encoded, len(text)) for edge in (start, end))
            first += not begins
            mask[first:last] = [1] * (last - first)
            straddles |= not begins
    if not straddles:
        return token, mask
    whole, *prefixes = template.encode([text, *(text[:edge] for edge in chain.from_iterable(spans))], tokenizer)
    if any(whole[: len(prefix)] != prefix for prefix in prefixes):
        if tokenizer.is_fast:
            return token, mask
        raise BadSampleError(
            "tokens across an answer's edge",
            "its tokens span the edge of an answer, and the tokenizer does not tell their characters; "
            "use the model's fast tokenizer (tokenizer.json)",
        )
    mask = [0] * len(whole)
    bounds = list(map(len, prefixes))
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        mask[start:end] = [1] * (end - start)
    return whole, mask


def _token_at(character: int, encoded: Any, length: int) -> tuple[int, bool]:
    """Return the index of the token that has a character of a text of `length`, and whether the token begins there.

    Characters between two tokens are the later one's: byte-level tokenizers leave the space before a word out.
    """
    having = map(encoded.char_to_token, range(character, length))
    index = next((token for token in having if token is not None), len(encoded))
    while index and encoded.token_to_chars(index - 1)[0] >= character:  # a token without characters
        index -= 1
    begin = encoded.token_to_chars(index)[0] if index < len(encoded) else length
    return index, min(begin, encoded.token_to_chars(index - 1)[1] if index else 0) >= character


def _end_turns(token: list[int], mask: list[int], tokenizer: PreTrainedTokenizerBase) -> Masked:
    """End every answer with the token that ends the target's turn.

    Templates may add a newline after it, which the target never samples, or omit the token until the next turn.
    """
    special = template.turn_end_tokens(tokenizer)
    for end in [run.end() for run in TRAINED.finditer(bytes(mask))]:
        last = end - 1
        while last > 0 and mask[last - 1] and token[last] not in special and template.is_space(tokenizer, token[last]):
            last -= 1
        if token[last] in special:
            mask[last + 1 : end] = [0] * (end - last - 1)
        elif (eos := tokenizer.eos_token_id) is not None and token[end : end + 1] in ([], [eos]):
            token[end : end + 1], mask[end : end + 1] = [eos], [1]
    return token, mask
