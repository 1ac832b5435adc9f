"""Documents whose tokens are given: records with a loss mask, and servers' logs of a prompt's and an answer's tokens.

vLLM and SGLang return tokens for requests with `return_token_ids`; in SGLang's `/generate` an answer's are
`output_ids`.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

PROMPT = ("prompt_token_ids", "input_ids")  # SGLang's requests have the second
ANSWER = ("token_ids", "response_token_ids", "output_ids")
MASKED = ("input_ids", "loss_mask")
CHOICES = ("choices", "outputs", "tokens")  # keys of a reply, of vLLM's RequestOutput, and of our own answers


class LoggedAnswer(NamedTuple):
    """The keys of a prompt's and its answer's tokens in a log."""

    prompt_token_ids: list[int]
    token_ids: list[int]


class Pretokenized(NamedTuple):
    """A document with given tokens and loss mask."""

    token: list[int]
    mask: list[int]

    def answers(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each run of tokens to train on."""
        start = 0
        for trained, run in groupby(self.mask):
            end = start + len(list(run))
            if trained:
                yield start, end
            start = end


def exact_tokens(raw: dict[str, Any], where: str) -> tuple[Pretokenized, ...]:
    """Return the documents whose tokens a record gives, none for text; refuse anything but lists of numbers."""
    if all(raw.get(key) is not None for key in MASKED):
        token, mask = (_ids(raw, key, where) for key in MASKED)
        return (Pretokenized(token, mask),)
    documents: list[Pretokenized] = []
    for prompt, answer in logged_answers(raw, where):
        before = documents[-1] if documents else Pretokenized([], [])
        if before.token and prompt[: len(before.token)] == before.token:  # the next turn of the same text
            documents.pop()
        else:
            before = Pretokenized([], [])
        context = [0] * (len(prompt) - len(before.token))
        documents.append(Pretokenized(prompt + answer, before.mask + context + [1] * len(answer)))
    return tuple(documents)


def logged_answers(raw: Mapping[str, Any], where: str) -> Iterator[LoggedAnswer]:
    """Yield the tokens of each prompt and answer in a log's record or a reply; refuse anything but numbers."""
    reply = reply_in(raw)
    choices = [choice for key in CHOICES if isinstance(reply.get(key), list) for choice in reply[key]]
    for answer in [reply, *(choice for choice in choices if isinstance(choice, dict))]:
        key = next((key for key in ANSWER if answer.get(key) is not None), None)
        holders = (holder for holder in (answer, reply, raw, raw.get("request")) if isinstance(holder, dict))
        asking = next(((holder, name) for holder in holders for name in PROMPT if holder.get(name) is not None), None)
        if key is not None and asking is not None:
            metadata, answered = answer.get("meta_info"), _ids(answer, key, where)
            count = metadata.get("completion_tokens") if isinstance(metadata, dict) else None
            if type(count) is int and count > 0:
                answered = answered[-count:]  # some of SGLang's begin with the prompt's end
            yield LoggedAnswer(_ids(*asking, where), answered)


def reply_in(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reply in a log's record, which may be next to its request, as in batches."""
    reply: Mapping[str, Any] = raw["response"] if isinstance(raw.get("response"), dict) else raw
    return reply["body"] if isinstance(reply.get("body"), dict) else reply


def _ids(holder: Mapping[str, Any], key: str, where: str) -> list[int]:
    value = holder[key]
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f"{where}: {key} is no list of token numbers: fix or remove the record")
    return list(value)
