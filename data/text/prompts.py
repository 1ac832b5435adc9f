"""Records to tokens: samples to train on, and prompts to generate from; and a cache of tokenised samples."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from glob import has_magic
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from data.config import DataConfig
from data.text.files import Raw, content_hash
from data.text.filters import Counts, Filters
from data.text.masks import BAD, Sample, bad_sample, check_vocabulary, count_bad, counts_line, is_plain, samples_of
from data.text.parts import BadSampleError, content_text
from data.text.records import Record, label
from data.text.sources import Source, divide, held_out_records, open_source, open_sources, read_all, training_records
from data.text.template import encode, last_token, render, with_opening
from heads.common.files import claim, read_checked, replacing, write_checked
from heads.common.progress import progress
from heads.common.resolvers import ROOT
from heads.common.typed import Json, convert
from inference.target.tokenizer import text_ids

log = logging.getLogger(__name__)

WORKLOADS = {"tiny": ROOT / "examples" / "tiny" / "prompts.jsonl"}
LOST = 1 / 5  # maximum share of bad records; a larger share stops a run
# The cache is FOLDER/<key>/ with these files, written atomically under a lock; META has the counts and sizes.
SAMPLES, PROMPTS, META = "samples.arrow", "prompts.jsonl", "meta.json"
NOT_IN_CACHE_KEY = ("length", "cache")  # options that do not affect the samples
# Code outside of this package that affects the samples: parsing, rendering, encoding.
CODE = ("data/config.py", "heads/common/untrusted.py", "inference/target/tokenizer.py")
BATCH = 1000  # samples in memory at once
OPENING = 128  # maximum tokens of a plain text's prompt: enough words to check contamination, even if tokens are bytes


class Prompt(NamedTuple):
    """A prompt: its tokens, and the text of its user and system messages."""

    id: str
    token: list[int]
    category: str
    text: str = ""
    system: str = ""

    @classmethod
    def read(cls, raw: Raw, index: int, path: str) -> "Prompt":
        """Return a prompt from a record that `save_prompts` wrote; refuse other keys and types."""
        kinds = cls.__annotations__
        try:
            if raw.keys() != kinds.keys():
                raise ValueError
            values = {key: convert(kind, raw[key], key) for key, kind in kinds.items()}
        except ValueError:
            why = "is not a saved prompt: fix or remove the record"
            raise ValueError(f"{path}: record {index} {why}") from None
        return cls(**values | {key: label(raw[key]) for key in ("id", "category")})


class TrainingData(NamedTuple):
    """A run's samples, held-out prompts, and record counts."""

    samples: Sequence[Sample]
    held_out: list[Prompt]
    counts: Counts


Prepared = tuple[list[Prompt], Counts, Iterator[Sample]]


def load_training(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, prompts: int, workload: str | None = None,
    max_prompt_tokens: int | None = None,
) -> TrainingData:  # fmt: skip
    """Return the samples of `config.path` and at most `prompts` held-out prompts.

    With `config.cache` one process tokenises the samples; other processes and later runs with equal data map them.

    Args:
        prompts: number of held-out prompts to return; contamination is checked against all.
        workload: more evaluation prompts that no sample may contain, a name for `locate`; None for none.
        max_prompt_tokens: maximum tokens of a returned prompt; None for no limit.

    Raises:
        ValueError: data are unreadable, empty or of unknown shape, or cannot be masked; or, unless data.on_bad=drop, a
            chat has no answer, or a held-out prompt no room for one; or a prompt of data.prompts has no room.
    """
    evaluation = [name for name in (config.prompts, locate(workload) if workload else "") if name]
    if config.contamination is None:
        evaluation = []
    sources = open_sources(config)
    prepare = partial(_prepare, config, tokenizer, sources, evaluation)
    if config.cache is None:
        held_out, counts, masked = prepare()
        samples: Sequence[Sample] = list(masked)
    else:
        opened = [*sources, *(open_source(name, "") for name in evaluation)]
        key = cache_key(config, tokenizer, [source.identity() for source in opened])
        folder = Path(config.cache).expanduser() / key

        def fill(rough: Path) -> Json:
            held_out, counts, masked = prepare()
            save_prompts(held_out, rough / PROMPTS)
            write_samples(masked, rough / SAMPLES)
            return counts.report()

        counts = Counts.read(cached(folder, fill))
        most = prompts if max_prompt_tokens is None else None  # all prompts, since some may be too long
        held_out = load_prompts(str(folder / PROMPTS), tokenizer, most) if counts.held_out else []
        samples = CachedSamples(folder / SAMPLES)
    if config.prompts and prompts:
        held_out = load_prompts(config.prompts, tokenizer, prompts)
    if max_prompt_tokens is not None:
        held_out = _with_room(held_out, prompts, max_prompt_tokens, config, counts)
    if +counts.chats:
        log.warning("%s: of its chats, %s", config.named, counts_line(counts.chats))
    return TrainingData(samples, held_out[:prompts], counts)


def load_prompts(path: str, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Prompt]:
    """Return the prompts of a file or Hub data set: saved ones unchanged, chats' first questions, pieces of texts."""
    return [
        one if isinstance(one, Prompt) else prompt_of(one, tokenizer, f"{one.source}: ")
        for one in islice(read_prompts(path), limit)
    ]


def read_prompts(path: str) -> Iterator[Prompt | Record]:
    """Yield the saved prompts, or the records, of a file or Hub data set."""
    source = open_source(path, split="")
    if set(next(iter(source))) == set(Prompt._fields):
        return (Prompt.read(record, index, path) for index, record in enumerate(source))
    return read_all(source)


def locate(name: str) -> str:
    """Return the path or Hub name of a workload; refuse unknown names."""
    if name in WORKLOADS:
        return str(WORKLOADS[name])
    if Path(name).expanduser().exists() or "/" in name or has_magic(name):
        return name
    raise ValueError(
        f"workload {name} is neither a file or folder here nor one of {', '.join(sorted(WORKLOADS))}: give either, or "
        "a Hub data set as OWNER/NAME"
    )


def save_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Write prompts with their tokens as JSON Lines, for `load_prompts` with the same target."""
    lines = [json.dumps(prompt._asdict(), ensure_ascii=False) + "\n" for prompt in prompts]
    path.write_text("".join(lines), encoding="utf-8")


def records_to_answer(config: DataConfig, limit: int | None) -> list[Record]:
    """Return the training records for the target to answer, at most the smaller limit."""
    limits = [value for value in (limit, config.limit) if value is not None]
    records, counts = training_records(divide(open_sources(config), config), config), Counter[str]()
    usable = list(islice((record for record, _ in _usable(records, config, counts)), min(limits, default=None)))
    if counts:
        log.warning("%s: of its records, %s", config.named, counts_line(counts))
    return usable


def _prepare(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, sources: Sequence[Source], evaluation: Sequence[str]
) -> Prepared:
    """Return the held-out prompts, the counts (updated by the iterator), and an iterator of the samples."""
    parts = divide(sources, config)
    dropped = Counter[str]()
    pairs = list(_usable(held_out_records(parts), config, dropped, tokenizer))
    reserved, held_out = [record for record, _ in pairs], [prompt for _, prompt in pairs if prompt is not None]
    others = [prompt for name in evaluation for prompt in load_prompts(name, tokenizer, None)]
    filters = Filters(config, reserved, [prompt.text for prompt in held_out + others])
    counts = filters.counts
    counts.held_out, counts.chats = len(reserved), dropped
    records = training_records(parts, config)
    if config.contamination is not None:
        records = (with_text(record, tokenizer) for record in records)
    records = filters(records)

    def samples() -> Iterator[Sample]:
        """Tokenise and mask records one after another, and count shapes, samples and tokens."""
        for record in progress(records, "tokenising"):
            counts.shapes[record.shape if record.error is None else "unused"] += 1
            for sample in samples_of(record, tokenizer, record.source, config, counts.chats):
                if len(sample.token) < config.min_tokens:
                    counts.short += 1
                else:
                    counts.samples += 1
                    counts.tokens += len(sample.token)
                    counts.trained += sum(sample.loss_mask)
                    yield sample
                    if counts.samples == config.limit:
                        return
        for source in sources:
            counts.chats.update(source.left_out)
        lost = Counter({cause: count for cause, count in counts.chats.items() if cause.startswith("dropped, ")})
        size = counts.held_out + sum(counts.records.values())
        if config.on_bad == "drop" and counts.samples and lost.total() > LOST * size:  # errors in a log are not lost
            raise ValueError(
                f"{config.named}: {lost.total()} of {size} records cannot be used ({counts_line(lost)}): more than a "
                "fifth; data.on_bad=fail shows the first of them, data.where selects others"
            )
        if not counts.samples:
            remedy = (
                "data/run.py answers=FILE lets the target answer them"
                if lost.keys() == {"dropped, no answer"}
                else "raise data.max_tokens, lower data.min_tokens, or give other data; data.on_bad=fail shows the "
                "first that is dropped"
            )
            what = "; ".join(filter(None, (counts.line(config), counts_line(counts.chats))))
            raise ValueError(f"{config.named}: nothing is left to train on ({what}); {remedy}")

    return held_out, counts, samples()


def _usable(
    records: Iterator[Record],
    config: DataConfig,
    drop_counts: Counter[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Iterator[tuple[Record, Prompt | None]]:
    """Yield records, with a tokenizer also their prompts; with data.on_bad=drop count and skip bad records."""
    for record in records:
        try:
            if record.error is not None:
                raise record.error
            yield record, None if tokenizer is None else _prompt(record, tokenizer)
        except BAD as error:
            count_bad(error, f"{record.source}: prompt {record.id}", config, drop_counts)


def _with_room(
    prompts: list[Prompt], most: int, max_prompt_tokens: int, config: DataConfig, counts: Counts
) -> list[Prompt]:
    """Return at most `most` prompts of up to `max_prompt_tokens`; with data.on_bad=drop count longer held-out ones."""
    source = f"data.prompts={config.prompts}" if config.prompts else f"{config.named}, held out"
    remedy = "" if config.prompts else ", or set data.on_bad=drop"
    fitting: list[Prompt] = []
    for prompt in prompts:
        if len(fitting) == most:
            break
        if len(prompt.token) <= max_prompt_tokens:
            fitting.append(prompt)
        elif config.on_bad == "drop" and not config.prompts:
            counts.chats["dropped, too long a prompt to measure on"] += 1
            counts.held_out -= 1
        else:
            raise ValueError(
                f"{source}: prompt {prompt.id} has {len(prompt.token)} tokens, but the target's context leaves room "
                f"for {max_prompt_tokens}: shorten or remove it{remedy}"
            )
    if prompts and most and not fitting:
        raise ValueError(
            f"{source}: no prompt has at most {max_prompt_tokens} tokens, which the target's context leaves room for: "
            "raise data.held_out, or give data.prompts"
        )
    return fitting


def with_text(record: Record, tokenizer: PreTrainedTokenizerBase) -> Record:
    """Return a record of tokens with its decoded text, to check contamination."""
    if not record.pretokenized or record.messages:
        return record
    last = last_token(tokenizer)
    token = [number for document in record.pretokenized for number in document.token if 0 <= number <= last]
    return record._replace(text=str(tokenizer.decode(token, skip_special_tokens=True)))


def prompt_of(record: Record, tokenizer: PreTrainedTokenizerBase, where: str = "") -> Prompt:
    """Return the prompt of a record: a chat's first question, in its chat template if any, or a piece of a text.

    Of given tokens, those before the first answer, without a text: a system prompt shared by all records would count
    as contamination. A record without a prompt that can be rendered is refused by `where` and its id.
    """
    try:
        return _prompt(record, tokenizer)
    except BAD as error:
        raise ValueError(f"{where}prompt {record.id}: {bad_sample(error).message}") from error


def _prompt(record: Record, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Return the prompt of a record as `prompt_of` does, or raise one of BAD."""
    text = system = ""
    if record.error is not None:
        raise record.error
    if record.pretokenized:
        ((_, token, *_),), whole = before_answers(record, "first"), record.pretokenized[0].token
        check_vocabulary(whole, tokenizer)
        token = token or whole[: max(1, len(whole) // 2)]
    elif is_plain(record, tokenizer):
        if not record.text.strip():
            raise BadSampleError("no question and no text", "has no user message and no text; remove it")
        token, _ = split_text(record.text, tokenizer)
        text = str(tokenizer.decode(token, skip_special_tokens=True))
    else:
        first = next((i for i, message in enumerate(record.messages) if message["role"] == "user"), None)
        if first is None:
            raise BadSampleError("no question", "the chat has no user message; remove it")
        text = content_text(record.messages[first])
        before = (message for message in record.messages[:first] if message["role"] != "assistant")
        system = "\n\n".join(map(content_text, before))
        if tokenizer.chat_template:
            messages = with_opening(record.messages[: first + 1], tokenizer, record.tools)
            (token,) = encode([render(messages, tokenizer, True, record.tools)], tokenizer)
        else:
            token = text_ids(text, tokenizer)
    if not token:
        raise BadSampleError("no tokens", "is empty: remove it")
    return Prompt(record.id, token, record.category, text, system)


def before_answers(record: Record, turns: str) -> Iterator[Prompt]:
    """Yield the tokens before the first answer of a record with given tokens; with turns=all before each answer."""
    prompts = [document.token[:start] for document in record.pretokenized for start, _ in document.answers()]
    prompts = (prompts or [record.pretokenized[0].token])[: None if turns == "all" else 1]
    for number, token in enumerate(prompts, 1):
        yield Prompt(f"{record.id}.{number}" if len(prompts) > 1 else record.id, token, record.category)


def split_text(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Split a plain text's tokens in the middle: a prompt, and the rest.

    Texts of one kind often begin with the same words, so the prompt of a long text is the end of its first half.
    """
    token = text_ids(text, tokenizer)
    half = max(1, len(token) // 2)
    if half <= OPENING:
        return token[:half], token[half:]
    piece = str(tokenizer.decode(token[half - OPENING : half], skip_special_tokens=True))
    return text_ids(piece.partition(" ")[2] or piece, tokenizer), token[half:]  # starts at the beginning of a word


class CachedSamples(Sequence[Sample]):
    """The samples of a memory-mapped Arrow file."""

    def __init__(self, path: Path) -> None:
        import datasets

        self._table: Any = datasets.Dataset.from_file(str(path))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        return Sample(**self._table[index])

    def arrays(self) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Yield each sample's tokens and mask as views of the mapped file."""
        token, mask = (self._table.data.column(name).chunks for name in ("token", "loss_mask"))
        for tokens, masks in zip(token, mask, strict=True):
            offsets = tokens.offsets.to_numpy()
            flat, on = tokens.values.to_numpy(), masks.values.to_numpy()
            for start, end in pairwise(offsets):
                yield flat[start:end], on[start:end]


def cache_key(config: DataConfig, tokenizer: PreTrainedTokenizerBase, sources: Sequence[str]) -> str:
    """Return the cache key: a hash of all that affects the samples.

    That is the tokenizer and its chat template, the options outside NOT_IN_CACHE_KEY, the identities of the data and of
    the evaluation prompts (`sources`), the code of this package and of CODE, and the tokenising libraries.
    """
    files = (*(ROOT / name for name in CODE), *sorted(Path(__file__).parent.glob("*.py")))
    code = [content_hash(file) for file in files]
    parts = {
        "tokenizer": tokenizer_identity(tokenizer),
        "data": {key: value for key, value in asdict(config).items() if key not in NOT_IN_CACHE_KEY},
        "sources": list(sources),
        "code": code,
        "libraries": [transformers.__version__, tokenizers.__version__],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of a tokenizer: its model, special tokens and chat template."""
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer.to_str()
    else:
        with TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            core = repr([(file.name, content_hash(file)) for file in sorted(Path(folder).iterdir())])
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    parts = [type(tokenizer).__name__, core, special, tokenizer.all_special_ids, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def write_samples(samples: Iterable[Sample], path: Path) -> None:
    """Write samples as an Arrow file, for `CachedSamples` to map."""
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    columns = {"id": Value("string"), "token": List(Value("int32")), "loss_mask": List(Value("int8"))}
    writer = ArrowWriter(features=Features(columns), path=str(path), writer_batch_size=BATCH)
    try:
        for sample in samples:
            writer.write(vars(sample))
    finally:
        writer.finalize()


def cached(folder: Path, fill: Callable[[Path], Json]) -> Json:
    """Return the report of a cache folder; one process fills it if it is missing or its files are cut.

    `fill` writes SAMPLES and PROMPTS into a folder, which is then renamed, and returns the report.
    """

    def known() -> Json | None:
        with suppress(OSError, ValueError, KeyError):
            meta = read_checked(folder / META)
            whole = all((folder / name).stat().st_size == size for name, size in meta["bytes"].items())
            return dict(meta["report"]) if whole else None
        return None

    try:
        if (report := known()) is None:
            with claim(folder.with_suffix(".lock"), wait=True):
                if (report := known()) is None:  # another process may have filled it meanwhile
                    with replacing(folder) as rough:
                        report = fill(rough)
                        sizes = {name: (rough / name).stat().st_size for name in (SAMPLES, PROMPTS)}
                        write_checked(rough / META, {"bytes": sizes, "report": report})
        return report
    except OSError as error:
        raise ValueError(
            f"data.cache={folder.parent}: cannot be written ({error}); make room, name another folder, or null for none"
        ) from error
