"""Workloads: prompts to measure on, and texts, which are answers of the target or from a log.

A workload is a bundled one by its name, the user's log, or a file of a published benchmark.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from data.config import DataConfig
from data.text.masks import samples_of
from data.text.parts import Messages, content_text
from data.text.prompts import WORKLOADS, Prompt, before_answers, locate, prompt_of, read_prompts, split_text
from data.text.records import Pretokenized, Record
from data.text.sources import check_source
from data.text.template import encode, render, with_opening
from eval.config import Selection
from eval.measures import metrics
from eval.measures.results import Measurement
from heads.base import Tokens
from heads.common.typed import Json
from inference.decode import RequestParams, autoregress
from inference.target.target import Target
from inference.target.tokenizer import RenderError, text_ids, tokenize

NO_ANSWER = "it has no answer to play back: give a log with answers; in eval/run.py text=own lets the target write them"


@dataclass(frozen=True)
class Text:
    """A prompt and its answer as tokens, the answer's start, and the limit of its tokens."""

    token: Tokens
    start: int
    limit: int

    @property
    def generated(self) -> int:
        """Return the number of the answer's tokens."""
        return len(self.token) - self.start


class RecordedText(NamedTuple):
    """A text of a log, with its record's id and category."""

    id: str
    category: str
    text: Text


def write(target: Target, prompts: Sequence[Tokens], params: RequestParams) -> list[Text]:
    """Let the target answer autoregressively; leave out answers of one token, which have no step."""
    texts = [of_answer(target, prompt, autoregress(target, prompt, params).tokens, params) for prompt in prompts]
    return [text for text in texts if text.generated > 1]


def of_answer(target: Target, prompt: Tokens, answer: Tokens, params: RequestParams) -> Text:
    """Return the text of a prompt and its answer."""
    return Text(prompt + answer, len(prompt), min(params.max_new_tokens, target.max_model_len - len(prompt)))


def recorded(record: Record, target: Target, turns: str, most: int) -> Iterator[RecordedText]:
    """Yield the first or all answers of a log's record, each after all messages before it, cut to `most` tokens.

    Tokens given by the record are used as they are. Other chats are tokenised as a whole through the chat template, and
    an answer is what training would mask as an answer, its end token included. Refuse a record without an answer, or
    with none that can be separated from its prompt.
    """
    answers = list(_answers(record, target))
    if not answers:
        raise ValueError(f"record {record.id}: {NO_ANSWER}")
    for turn, (token, start) in enumerate(answers if turns == "all" else answers[:1], 1):
        if not start:
            raise ValueError(f"record {record.id}: its answer follows nothing: give its prompt too")
        id_ = f"{record.id}.{turn}" if turns == "all" and len(answers) > 1 else record.id
        yield RecordedText(id_, record.category, Text(token[: start + most], start, most))


def _answers(record: Record, target: Target) -> Iterator[tuple[Tokens, int]]:
    """Yield the tokens up to the end of each answer, and the index of the answer's first token."""
    tokenizer: Any = target.tokenizer
    documents = list(record.pretokenized)
    if documents:
        pass  # its tokens are used as they are
    elif not record.messages:
        prompt, rest = split_text(record.text, tokenizer)
        if not rest:
            raise ValueError(f"record {record.id}: a text of {len(prompt)} token has no answer")
        yield prompt + rest, len(prompt)
    elif not tokenizer.chat_template:  # the texts are concatenated
        before: list[str] = []
        for message in record.messages:
            if message["role"] == "assistant":
                prompt = text_ids("\n\n".join(before), tokenizer)
                answer = tokenize(tokenizer, content_text(message), add_special_tokens=False)["input_ids"]
                yield prompt + answer + sorted(target.eos)[:1], len(prompt)
            before.append(content_text(message))
    else:
        dropped: Counter[str] = Counter()
        samples = samples_of(record, tokenizer, f"record {record.id}", MASKING, dropped)
        if not samples:
            cause = next(iter(+dropped), "no answer").removeprefix("dropped, ")
            why = NO_ANSWER if cause == "no answer" else f"no answer can be told from its prompt ({cause}): fix it"
            raise ValueError(f"record {record.id}: {why}")
        documents = [Pretokenized(sample.token, sample.loss_mask) for sample in samples]
    for document in documents:
        yield from ((document.token[:end], start) for start, end in document.answers())


# Settings of loss masks here: whole answers; records without one are left out.
MASKING = DataConfig(
    path="workload", weights=None, seed=0, streaming=False, split="", length=2, limit=None, prompts="", held_out=0,
    max_tokens=2**31, min_tokens=1, dedup=False, contamination=None, cache=None, turns="all", reasoning="keep",
    on_bad="drop", where=None,
)  # fmt: skip
# With less room most generations would end at the context's limit.
MIN_ANSWER_TOKENS = 8
SEARCHED = 10_000  # maximum records that are searched for prompts of all categories

Answer = Callable[[Tokens], str]  # the target's answer to a prompt
Readable = Record | Prompt


P = TypeVar("P", bound=Any)  # a measured item with a category: a prompt, a recorded text, a request
T = TypeVar("T")


@dataclass(frozen=True)
class Workload(Generic[P]):
    """A workload: its name in reports, the prompts to measure on, and those of the warm-up.

    `fresh` says that the warm-up prompts are not measured. `conversations` numbers the dialogue of each prompt: turns
    of one dialogue, and equal prompts, share a number; `distinct` is how many numbers there are.
    """

    name: str
    prompts: list[P]
    warmup: list[P]
    fresh: bool
    conversations: list[int]
    distinct: int

    def categories(self) -> dict[str, list[int]]:
        """Return the indices of each category's prompts; empty for a single category."""
        indices: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            indices.setdefault(prompt.category or "other", []).append(index)
        return indices if len(indices) > 1 else {}

    def measurement(
        self, temperature: float, batch_size: int, seed: int, memory_bytes: int = 0, **more: Any
    ) -> Measurement:
        """Return the settings that all rows of a measurement on this workload share; `more` holds more fields."""
        more |= {"categories": self.categories(), "conversations": self.conversations}
        return Measurement(self.name, temperature, batch_size, memory_bytes, seed, **more)


def prompt_counts(workloads: Sequence[Workload[Any]]) -> Json:
    """Return the report's counts of prompts."""
    return {
        "prompts": sum(len(workload.prompts) for workload in workloads),
        "distinct_prompts": sum(workload.distinct for workload in workloads),
        "warmup_prompts": "further ones" if all(workload.fresh for workload in workloads) else "measured ones",
    }


def cycled(items: Sequence[T], least: int) -> list[T]:
    """Return the items, repeated until there are at least `least`."""
    return list(islice(cycle(items), max(len(items), least)))


def load_workload(name: str, target: Target, limit: int, truncate: bool = False) -> list[Prompt]:
    """Return the first prompts of a workload as tokens of the target, as `read_workload` does."""
    return read_workload(name, target, Selection(limit, 0, truncate, "first", False)).prompts


def read_workload(name: str, target: Target, selection: Selection, answer: Answer = lambda _: "") -> Workload[Prompt]:
    """Read a workload's prompts as tokens of the target.

    `name` is a key of `WORKLOADS`, a file, a folder, a glob, or a Hub name; `answer` returns the target's answer, for
    dialogue turns without a recorded one. Refuse an unknown workload or shape, text that must be fetched first, and
    prompts that are empty, another target's, or leave no room in the context.
    """

    def read(record: Readable, turns: str) -> Iterator[Prompt]:
        if isinstance(record, Prompt):
            prompts: Iterable[Prompt] = [record]
        elif record.pretokenized:
            prompts = before_answers(record, turns)
        elif turns == "first" or sum(message["role"] == "user" for message in record.messages) < 2:
            prompts = [prompt_of(record, target.tokenizer)]
        else:
            prompts = _turns(record, target, answer)
        return (fit(prompt, target, selection.truncate) for prompt in prompts)

    return collect_prompts(name, selection, read, lambda prompt: tuple(prompt.token))


def read_log(name: str, target: Target, selection: Selection, most: int) -> Workload[RecordedText]:
    """Read a log's texts as tokens, with at most `most` answer tokens and no warm-up; refuse missing answers."""

    def read(record: Readable, turns: str) -> Iterator[RecordedText]:
        if isinstance(record, Prompt):
            raise ValueError(f"prompt {record.id}: {NO_ANSWER}")
        return recorded(record, target, turns, most)

    selection = replace(selection, warmup=0)
    workload = collect_prompts(name, selection, read, lambda entry: tuple(entry.text.token[: entry.text.start]))
    return replace(workload, fresh=False)


def collect_prompts(
    name: str,
    selection: Selection,
    read: Callable[[Readable, str], Iterable[P]],
    content: Callable[[P], tuple[Any, ...]],
) -> Workload[P]:
    """Return a workload of the prompts that `read` returns for each record and the turns to take.

    Warm-up prompts are the next ones, or the last measured ones if there are none; those of equal `content` are one.
    """
    most = selection.prompts + selection.warmup
    readable_records = islice(read_prompts(locate(name)), SEARCHED if selection.balanced else most)
    records = list(enumerate(readable_records))
    if not records:
        raise ValueError(f"workload {name} has no prompts: give a file with one prompt a line")
    selected = records
    if selection.balanced:  # the first of each category, then the second, and so on
        groups: dict[str, list[tuple[int, Readable]]] = {}
        for index, record in records:
            groups.setdefault(record.category, []).append((index, record))
        selected = [one for turn in zip_longest(*groups.values()) for one in turn if one is not None][:most]
    measured, spare = sorted(selected[: selection.prompts], key=itemgetter(0)), selected[selection.prompts : most]
    indexed = [(index, prompt) for index, record in measured for prompt in _named(name, record, read, selection.turns)]
    prompts = [prompt for _, prompt in indexed]
    warmup = [prompt for _, record in spare for prompt in _named(name, record, read, "first")]
    fresh = len(warmup) == selection.warmup
    warmup += [prompts[-1 - i % len(prompts)] for i in range(selection.warmup - len(warmup))]
    contents = [content(prompt) for prompt in prompts]
    conversations = metrics.cluster_prompts(contents, [index for index, _ in indexed])
    return Workload(short_name(name), prompts, warmup, fresh, conversations, len(set(contents)))


def fit(prompt: Prompt, target: Target, truncate: bool) -> Prompt:
    """Return a prompt with room for an answer, shortened if allowed; refuse empty, long and unknown ones."""
    if not prompt.token:
        raise ValueError(f"prompt {prompt.id}: is empty: remove it")
    check_known(prompt.token, f"prompt {prompt.id}", target)
    room = target.max_model_len - MIN_ANSWER_TOKENS
    if truncate:
        return prompt._replace(token=prompt.token[-room:])
    if len(prompt.token) > room:
        raise ValueError(
            f"prompt {prompt.id}: {len(prompt.token)} tokens, but the target's context of {target.max_model_len} has "
            f"room for {room}: shorten it, or set truncate=true to keep each prompt's end"
        )
    return prompt


def check_known(tokens: Sequence[Any], where: str, target: Target) -> None:
    """Refuse tokens outside the target's vocabulary; `where` names the text in the message."""
    vocabulary = range(target.spec.vocab_size)
    if not all(token in vocabulary for token in tokens):
        raise ValueError(
            f"{where}: its tokens are none of the target's {len(vocabulary)}: give text, or the prompts of a run of "
            "this target"
        )


def short_name(name: str) -> str:
    """Return a workload's name in reports: its key, a file's name without its folder, or the Hub's name."""
    path = Path(name).expanduser()
    keys = [key for key, bundled in WORKLOADS.items() if path.resolve() == bundled]
    return keys[0] if keys else path.name if path.is_file() else name


def workload_names(given: Any) -> list[str]:
    """Return the list of workload names, from one name or a list; refuse none, and a name that is no source of text."""
    names = [str(name) for name in (given if isinstance(given, list) else [given]) if name]
    if not names:
        raise ValueError("workload is missing: give a name, a file or a Hub data set")
    for name in names:
        check_source(locate(name))
    return names


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return the workloads' names in reports; files with equal names keep their paths."""
    short = list(map(short_name, names))
    return [name if short.count(one) > 1 else one for name, one in zip(names, short, strict=True)]


def _named(name: str, record: Readable, read: Callable[[Readable, str], Iterable[P]], turns: str) -> Iterator[P]:
    """Yield what `read` returns for a record; errors name the workload."""
    try:
        if isinstance(record, Record) and record.error is not None:
            raise ValueError(f"record {record.id} {record.error.message}")
        yield from read(record, turns)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"workload {name}, prompt {record.id}: it holds half a surrogate pair, which is no text; remove it"
        ) from error
    except RenderError as error:
        raise ValueError(f"workload {name}, prompt {record.id}: {error}; fix or remove the record") from error
    except ValueError as error:
        raise ValueError(f"workload {name}, {error}") from error


def _turns(record: Record, target: Target, answer: Answer) -> Iterator[Prompt]:
    """Yield a prompt for each question of a dialogue; the target writes the answers that are not recorded."""
    chat: Messages = []
    turn, last = 0, Prompt(record.id, [], record.category)
    messages, tokenizer = record.messages, target.tokenizer
    for message in with_opening(messages, tokenizer, record.tools) if tokenizer.chat_template else messages:
        question = message["role"] == "user"
        if question and chat and chat[-1]["role"] == "user":
            chat.append({"role": "assistant", "content": answer(last.token)})
        chat.append(message)
        if question:
            turn += 1
            if tokenizer.chat_template:
                (token,) = encode([render(chat, tokenizer, True, record.tools)], tokenizer)
            else:  # its texts one after another
                token = text_ids("\n\n".join(map(content_text, chat)), tokenizer)
            last = Prompt(f"{record.id}.{turn}", token, record.category, content_text(message))
            yield last
