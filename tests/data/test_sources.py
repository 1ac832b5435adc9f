"""Files, folders, globs and Hub data sets, and mixtures of them."""

import gzip
import hashlib
import io
import json
import lzma
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast as Tokenizer

from data.config import DataConfig
from data.text import files
from data.text.prompts import load_training
from data.text.records import parse
from data.text.sources import (
    Hub,
    check_source,
    divide,
    interleave,
    open_source,
    open_sources,
    read_all,
    training_records,
)
from tests.data.chatml import load_samples
from tests.refusals import refuses

Config = Callable[..., DataConfig]
Write = Callable[..., str]


def read(path: str, split: str = "") -> list[dict[str, Any]]:
    """Return the raw records of a source."""
    return list(open_source(path, split))


def names(config: DataConfig, count: int | None = None) -> list[str]:
    """Return the ids of the records to train on."""
    parts = divide(open_sources(config), config)
    return [record.id for record in islice(training_records(parts, config), count)]


def open_zst(path: Path, mode: str, encoding: str) -> Any:
    assert mode == "wt"
    return io.TextIOWrapper(pyarrow.output_stream(str(path), compression="zstd"), encoding)


@pytest.mark.parametrize(("name", "indent"), [
    ("a.json", 2), ("a.jsonl", None), ("a.json.gz", None), ("a.jsonl.xz", 2), ("a.jsonl.zst", None), ("a.json.zst", 2),
])  # fmt: skip
def test_json_in_every_packing(tmp_path: Path, name: str, indent: int | None) -> None:
    records = [{"text": "one"}, {"text": "two"}]
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": open_zst}
    opener = openers.get(Path(name).suffix, open)
    with opener(tmp_path / name, "wt", encoding="utf-8") as file:
        file.write(" " + json.dumps(records, indent=indent))
    assert read(str(tmp_path / name), "") == records
    path = tmp_path / "printed.json"
    path.write_text(json.dumps({"events": [{"message": json.dumps(record)} for record in records]}, indent=2))
    assert read(str(path), "") == records
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "one\u2028line"}\r\n\n{"text": "two"}', encoding="utf-8-sig")
    assert read(str(path), "") == [{"text": "one\u2028line"}, {"text": "two"}]


class Served:
    """A stand-in for the Hub: what `load_dataset` gives, and what it was asked for."""

    def __init__(self, records: Any) -> None:
        self.records = records
        self.asked: list[Any] = []

    def load(self, *asked: Any, split: str | None, streaming: bool) -> Any:
        self.asked.append((*asked, split, streaming))
        table = self.records if streaming else Dataset.from_generator(lambda: iter(self.records))
        return table if split else {"train": table, "test": table}

    def dataset_info(self, name: str) -> Any:
        return type("Info", (), {"sha": f"revision of {name}"})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], Served]:
    """Return a function that puts records on the stand-in."""

    def start(records: Any) -> Served:
        served = Served(records)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
        monkeypatch.setattr("datasets.load_dataset", served.load)
        monkeypatch.setattr("data.text.sources.check_reachable", lambda *_: None)
        monkeypatch.setattr("data.text.sources.HfApi", lambda: served)
        return served

    return start


def calls(record: dict[str, Any]) -> Any:
    """Return the arguments of a record's calls, and the parameters of its tools."""
    found = parse(record, 0, "f")
    arguments = [call["function"]["arguments"] for m in found.messages for call in m.get("tool_calls", [])]
    return arguments, [tool["function"]["parameters"] for tool in found.tools]


# Arrow makes one type of all arguments, and of all parameters: what a record lacks is a null in its row.
TOWN, DAY = {"town": "Bern"}, {"day": {"of": "May"}}
CALLING = [
    {
        "messages": [
            {"role": "user", "content": "why"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": of}} for of in arguments]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": given}}}],
    }
    for given, arguments in ((TOWN, [TOWN, DAY]), (DAY, [DAY]))
]


def test_what_arrow_adds_to_calls_and_tools_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Dataset.from_list(CALLING).to_parquet(tmp_path / "a.parquet")
    written = [calls(record) for record in CALLING]
    assert [calls(record) for record in read(str(tmp_path / "a.parquet"))] == written
    serve(CALLING)
    hub = open_source("me/set", "train")
    assert [calls(record) for record in hub] == written


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files of two splits, one of none, and others."""
    made = tmp_path / "set"
    (made / "more").mkdir(parents=True)
    (made / "train.jsonl").write_text('{"text": "trained"}\n')
    (made / "more" / "my-test-0.txt").write_text("tested\n")
    (made / "constraint.jsonl").write_text('{"text": "any"}\n')
    (made / "README.md").write_text("# not data")
    (made / ".git").mkdir()
    for hidden in (".hidden.jsonl", ".git/hidden.jsonl"):
        (made / hidden).write_text('{"text": "hidden"}\n')
    return made


@pytest.mark.parametrize(
    ("split", "texts"), [("train", ["any", "trained"]), ("", ["any", "tested"]), ("mine", ["any"])]
)
def test_a_folder_by_split(folder: Path, split: str, texts: list[str]) -> None:
    assert [record["text"] for record in read(str(folder), split)] == texts
    (folder / "again.txt").symlink_to(folder / "more" / "my-test-0.txt")  # a glob finds each file once
    assert sorted(record["text"] for record in read(str(folder / "**" / "**" / "*.txt"))) == ["tested"]
    assert [record["text"] for record in read(str(folder / "**" / "*t*.*"), "train")] == ["any", "tested", "trained"]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("one\ntwo\n\n three \n", ["one", "two", "three"]),
        ("one\u2028line\r\ntwo\n", ["one\u2028line", "two"]),
        ("one\nstill one\n<|endoftext|>\ntwo\n<|endoftext|>\n", ["one\nstill one", "two"]),
    ],
)
@pytest.mark.parametrize("most", [27, files.HEAD])
def test_text_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, texts: list[str], most: int) -> None:
    monkeypatch.setattr(files, "HEAD", most)
    (tmp_path / "a.txt").write_text(content, encoding="utf-8-sig")
    assert [record["text"] for record in read(str(tmp_path / "a.txt"), "")] == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "holds no records"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"line 2 is no JSON .*; fix or remove it"),
        ("a.json", b'[{"text": "x"},\n{"text": }]', r"line 2 is no JSON .*; fix or remove it"),
        ("a.jsonl", b"3\n", "every record must be a JSON object"),
        ("a.jsonl", b"\xff\xfe", "cannot be read"),
        ("gone.jsonl", None, "neither a file here nor a Hub dataset"),
        ("pipe.jsonl", None, "a pipe, a socket or a device, which is not read"),
        ("*.none", None, "no file matches"),
        ("empty", None, "empty: holds no file in the formats read"),
        ("unsplit", None, r"no file's name holds the split validation; set data\.split"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:-9], "cannot be read"),
        ("a.jsonl.zst", pyarrow.compress(b'{"text": "x"}\n' * 99, "zstd", asbytes=True)[:-9], "cannot be read"),
        ("a.jsonl.zst", b'{"text": "x"}', "cannot be read"),
        ("a.jsonl", b'{"text": ' + b"[" * 99999, r"line 1 cannot be read \(nested too deeply"),
        ("a.parquet", b"PAR1 and no more", "a.parquet: record 0 cannot be read"),
        ("a.csv", b"x", r"the formats read are .json, .jsonl"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unsplit").mkdir()
    (tmp_path / "unsplit" / "train.txt").write_text("x")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    line = refuses(message, read, str(tmp_path / name), "validation")
    assert name in line


@pytest.mark.parametrize(("seed", "sizes"), [(0, (1500, 500)), (1, (5, 400)), (2, (1, 1))])
def test_a_mixture_is_that_of_datasets(seed: int, sizes: tuple[int, int]) -> None:
    columns = [[f"{i}-{k}" for k in range(size)] for i, size in enumerate(sizes)]
    mixed = list(interleave([iter(column) for column in columns], [3.0, 1.0], seed))
    tables = [Dataset.from_dict({"x": column}) for column in columns]
    theirs = datasets.interleave_datasets(tables, [0.75, 0.25], seed, stopping_strategy="first_exhausted")
    assert mixed == list(theirs["x"])


def test_a_mixture_follows_from_its_weights_and_its_seed(write: Write, config: Config) -> None:
    paths = [write(*({"id": f"{k}{i}", "text": f"{k}{i}"} for i in range(90)), name=f"{k}.jsonl") for k in "ab"]
    mixed = names(config(paths, weights=[3.0, 1.0], seed=5))
    expected = interleave([iter([f"{k}{i}" for i in range(90)]) for k in "ab"], [3.0, 1.0], 5)
    assert mixed == list(expected)
    assert mixed != names(config(paths, weights=[3.0, 1.0], seed=6))


def test_every_source_of_a_mixture_holds_its_share_out(write: Write, config: Config, bare: Tokenizer) -> None:
    paths = [write(*({"id": f"{k}{i}", "text": f"{k} {i}"} for i in range(4)), name=f"{k}.jsonl") for k in "ab"]
    mixed = config(paths, held_out=3)  # of which the first gives two, half of its records
    assert [prompt.id for prompt in load_training(mixed, bare, 9).held_out] == ["a2", "b3", "a3"]
    assert names(mixed) == ["a0", "a1", "b0", "b1", "b2"]
    path = write({"id": "a", "text": "x"}, {"text": "y"}, {"id": "a", "text": "z"})  # ids fall back to the index
    assert [record.id for record in read_all(open_source(path, ""))] == ["a", "1", "a@2"]
    assert names(config([path, path])) == ["a", "1", "a@2", "a@3", "1@4", "a@5"]


@pytest.mark.parametrize("kind", ["file", "where", "streaming", "hub"])
@pytest.mark.parametrize(("size", "asked", "count"), [(2, 64, 1), (40, 64, 4), (127, 64, 12), (128, 64, 64), (5, 3, 1)])
def test_a_small_source_holds_out_a_tenth(
    kind: str, size: int, asked: int, count: int, write: Write, config: Config, serve: Callable[[Any], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    records = [{"id": str(i), "text": f"t {i}"} for i in range(size)]
    serve(records)
    path = "me/set" if kind == "hub" else write(*records)
    options = {"streaming": {"streaming": True, "limit": 9999}, "where": {"where": {"id": ">=0"}}}.get(kind, {})
    given = config(path, held_out=asked, **options)
    (part,) = divide(open_sources(given), given)
    held_out, trained = [raw["id"] for _, raw in part.held_out], [record.id for record in part.trained()]
    at = count if kind == "streaming" else size - count
    halves = [str(i) for i in range(at)], [str(i) for i in range(at, size)]
    assert (held_out, trained) == (halves if kind == "streaming" else halves[::-1])
    told = f"{path}: holds {size} records, and data.held_out={asked} would be more than half: {count} held out"
    assert caplog.messages == ([] if count == asked else [told])


def test_a_single_record_is_not_held_out(write: Write, config: Config) -> None:
    path, told = write({"text": "a"}), r"data\.jsonl: holds a single record, .*: add records, or give data\.held_out=0"
    refuses(told, names, config(path, held_out=64))
    refuses(told, check_source, path, "", 2)
    assert names(config(path)) == ["0"]
    check_source(write({"text": "a"}, {"text": "b"}), "", 2)


@pytest.mark.parametrize(
    ("path", "changed", "message"),
    [
        ([], {}, "data.path"),
        (["a", ""], {}, "data.path"),
        (3, {}, "data.path"),
        (["a", "b"], {"weights": [1.0]}, "give 2 positive numbers"),
        (["a", "b"], {"weights": [1.0, 0.0]}, "give 2 positive numbers"),
        ("a", {"streaming": True}, "set data.limit"),
        ("a", {"min_tokens": 0}, "data.min_tokens=0"),
    ],
)
def test_a_mixture_that_is_none_is_refused(config: Config, path: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(path, **changed)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.xz", "a.txt"])
def test_streaming_reads_no_further_than_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config, bare: Tokenizer, name: str
) -> None:
    monkeypatch.setattr(files, "HEAD", 99)
    opener: Callable[..., Any] = lzma.open if name.endswith(".xz") else open
    line = "t {}\n" if name == "a.txt" else '{{"text": "t {}"}}\n'
    with opener(tmp_path / name, "wb") as file:
        file.write(b"".join(line.format(i).encode() for i in range(20_000)) + b"\xff")
    streamed = config(str(tmp_path / name), streaming=True, limit=3, held_out=2)
    samples = [(sample.id, bare.decode(sample.token[:-1])) for sample in load_samples(streamed, bare)]
    assert samples == [("2", "t 2"), ("3", "t 3"), ("4", "t 4")]
    assert [prompt.id for prompt in load_training(streamed, bare, 9).held_out] == ["0", "1"]
    with pytest.raises(ValueError, match="cannot be read"):
        load_samples(config(str(tmp_path / name), limit=3, held_out=2), bare)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_data_set_by_name_and_configuration(
    serve: Callable[[Any], Served], config: Config, bare: Tokenizer, streaming: bool
) -> None:
    served = serve([{"text": f"t {i}"} for i in range(9)])
    hub = config("me/set:small", split="train_sft", streaming=streaming, limit=4, held_out=2)
    first = 2 if streaming else 0
    texts = [bare.decode(sample.token[:-1]) for sample in load_samples(hub, bare)]
    assert texts == [f"t {i}" for i in range(first, first + 4)]
    assert served.asked == [("me/set", "small", "train_sft", streaming)]
    assert [prompt.text for prompt in load_training(hub, bare, 9).held_out] == (["t", "t"])
    assert open_source("me/set", "", streaming).identity() != open_source("me/other", "", streaming).identity()


def test_a_hub_data_set_that_breaks_off_is_named_with_its_record(serve: Callable[[Any], Served]) -> None:
    class Broken:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from ({"text": "x"} for _ in range(3))
            raise OSError("connection\nreset")

    serve(Broken())
    with pytest.raises(ValueError, match=r"me/set: record 3 cannot be read \(connection reset\)"):
        list(open_source("me/set", "train", streaming=True))


def provenance(config: DataConfig) -> dict[str, Any]:
    (source,) = open_sources(config)
    return source.provenance()


def test_provenance_tells_hashes_and_who_wrote_the_answers(tmp_path: Path, config: Config) -> None:
    file, meta = tmp_path / "a.txt", tmp_path / "a.txt.meta.json"
    file.write_text("one")
    settings = {"by": "engine", "target": {"fingerprint": "f00d"}, "data": {"sources": []}, "api_key": "s3cr3t-s3cr3t"}
    meta.write_text(json.dumps({"settings": settings, "counts": {}}))
    told = {"by": "engine", "target": {"fingerprint": "f00d"}, "api_key": "[redacted]"}
    digest = hashlib.sha256(b"one").hexdigest()
    assert provenance(config(str(file))) == {"name": str(file), "files": 1, "sha256": digest, "answers": told}
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "b.txt.meta.json").write_text(meta.read_text())
    before = provenance(config(str(tmp_path)))
    assert (before["files"], before["answers"]) == (2, told)
    (tmp_path / "b.txt").write_text("three")
    (tmp_path / "b.txt.meta.json").write_text(json.dumps({"settings": {"by": "b"}}))
    after = provenance(config(str(tmp_path)))
    assert (after["sha256"] != before["sha256"], after["answers"]) == (True, {"by": "several"})
    meta.write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json: damaged .*; restore it, or remove it"):
        provenance(config(str(file)))
    assert Hub("me/chats:en", [], "abc").provenance() == {"name": "me/chats:en", "revision": "abc"}
