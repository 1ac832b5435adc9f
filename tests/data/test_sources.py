"""Files, folders, globs and Hub data sets, and mixtures of them."""

import gzip
import json
import logging
import lzma
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, load_dataset
from hydra import compose, initialize_config_dir
from transformers import PreTrainedTokenizerFast as Tokenizer

from data.config import DataConfig
from data.text import files
from data.text.files import BATCH
from data.text.prompts import held_out_prompts, load_samples
from data.text.records import parse
from data.text.sources import divide, interleave, open_source, open_sources, read_all, training_records
from heads.common.resolvers import ROOT, register_resolvers
from heads.common.typed import typed

Config = Callable[..., DataConfig]
Write = Callable[..., str]


def read(path: str, split: str = "") -> list[dict[str, Any]]:
    """Return the raw records of a source."""
    return list(open_source(path, split))


def names(config: DataConfig, count: int | None = None) -> list[str]:
    """Return the ids of the records to train on."""
    parts = divide(open_sources(config), config)
    return [record.id for record in islice(training_records(parts, config), count)]


def test_ids_are_unique_and_fall_back_to_the_index(write: Write, config: Config) -> None:
    raw = [{"id": "a", "text": "x"}, {"text": "y"}, {"id": "a", "text": "z"}]
    path = write(*raw)
    assert [record.id for record in read_all(open_source(path, ""))] == ["a", "1", "a@2"]
    assert names(config([path, path])) == ["a", "1", "a@2", "a@3", "1@4", "a@5"]


def test_json_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\u2028line"}\r\n\n{"text": "two"}', encoding="utf-8")
    assert read(str(path), "") == [{"text": "one\u2028line"}, {"text": "two"}]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.jsonl.xz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_in_every_packing(tmp_path: Path, name: str, indent: int | None) -> None:
    records = [{"text": "one"}, {"text": "two"}]
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    opener = openers.get(Path(name).suffix, open)
    with opener(tmp_path / name, "wt", encoding="utf-8") as file:
        file.write(" " + json.dumps(records, indent=indent))
    assert read(str(tmp_path / name), "") == records


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    chat = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    Dataset.from_list([{"messages": chat}]).to_parquet(tmp_path / "a.parquet")
    assert parse(read(str(tmp_path / "a.parquet"))[0], 0, "f").messages == chat


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
    assert [calls(record) for record in hub] == [calls(record) for record in hub.ends(2)[1]] == written


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


def test_a_folder_without_the_split_or_without_files_is_named(folder: Path) -> None:
    (folder / "constraint.jsonl").unlink()
    with pytest.raises(ValueError, match=r"set: no file's name holds the split validation; set data\.split"):
        read(str(folder), "validation")
    (folder / "train.jsonl").unlink()
    (folder / "more" / "my-test-0.txt").unlink()
    with pytest.raises(ValueError, match="set: holds no file in the formats read"):
        read(str(folder))


def test_a_glob_finds_each_file_once(folder: Path) -> None:
    (folder / "again.txt").symlink_to(folder / "more" / "my-test-0.txt")
    assert sorted(record["text"] for record in read(str(folder / "**" / "**" / "*.txt"))) == ["tested"]


def test_a_parquet_file_of_one_huge_group_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Dataset.from_list([{"text": str(i)} for i in range(3 * BATCH)]).to_parquet(tmp_path / "a.parquet")
    asked: list[int] = []

    def load(*args: Any, **named: Any) -> Any:
        asked.append(named["batch_size"])
        return load_dataset(*args, **named)

    monkeypatch.setattr("datasets.load_dataset", load)
    assert len(read(str(tmp_path / "a.parquet"))) == 3 * BATCH
    assert asked == [BATCH]

    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("datasets.load_dataset", full)
    with pytest.raises(ValueError, match=r"a\.parquet: record 0 cannot be read \(MemoryError\)"):
        read(str(tmp_path / "a.parquet"))


def test_a_glob(folder: Path) -> None:
    assert [record["text"] for record in read(str(folder / "**" / "*t*.*"), "train")] == ["any", "tested", "trained"]
    with pytest.raises(ValueError, match="no file matches"):
        read(str(folder / "*.xz"))


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("one\ntwo\n\n three \n", ["one", "two", "three"]),
        ("one\u2028line\r\ntwo\n", ["one\u2028line", "two"]),
        ("one\nstill one\n<|endoftext|>\ntwo\n<|endoftext|>\n", ["one\nstill one", "two"]),
    ],
)
@pytest.mark.parametrize("most", [27, 30, 41, files.HEAD])
def test_text_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, texts: list[str], most: int) -> None:
    monkeypatch.setattr(files, "HEAD", most)
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    assert [record["text"] for record in read(str(tmp_path / "a.txt"), "")] == texts


@pytest.mark.parametrize("end", ["\n", files.SEPARATOR])
def test_a_text_without_an_end_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(files, "HEAD", 40)
    book, one = "so " * 200, "a" * 500
    (tmp_path / "a.txt").write_text(end.join(["x", book, one, "y"]), encoding="utf-8")
    texts = [record["text"] for record in read(str(tmp_path / "a.txt"), "")]
    assert all(len(text) <= 40 for text in texts)
    assert " ".join(text for text in texts if "s" in text) == book.strip()  # no word is cut
    assert "".join(text for text in texts if "a" in text) == one
    assert (texts[0], texts[-1]) == ("x", "y")


@pytest.mark.parametrize(
    ("content", "what"), [('{"text": "%s"}', "is a record"), ('[{"text": "%s"}]', "begins an array")]
)
def test_a_line_without_an_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, what: str
) -> None:
    monkeypatch.setattr(files, "LONGEST", 40)
    monkeypatch.setattr(files, "WHOLE", 80)
    short = '{"text": "x"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((short + content % ("a" * 90)).encode()))
    with pytest.raises(ValueError, match=rf"a\.jsonl\.gz: line 2 {what} of more than .0 characters"):
        read(str(tmp_path / "a.jsonl.gz"), "")
    (tmp_path / "a.jsonl").write_text(short + "[" + ", ".join([short] * 4) + "]")
    assert len(read(str(tmp_path / "a.jsonl"), "")) == 5


def test_a_file_of_empty_lines_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "EMPTY", 9)
    (tmp_path / "a.jsonl").write_text("\n".join(['{"text": "x"}' + "\n" * 9] * 2))
    assert len(read(str(tmp_path / "a.jsonl"), "")) == 2
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + " \n" * 10 + '{"text": "y"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl: the 9 lines before line 11 are empty; remove them"):
        read(str(tmp_path / "a.jsonl"), "")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "holds no records"),
        ("a.txt", b"\n \n", "holds no records"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"line 2 is no JSON .*; fix or remove it"),
        ("a.json", b'[{"text": "x"},\n{"text": }]', r"line 2 is no JSON .*; fix or remove it"),
        ("a.jsonl", b"3\n", "every record must be a JSON object"),
        ("a.jsonl", b"\xff\xfe", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:-9], "cannot be read"),
        ("a.jsonl.xz", b"not xz", "cannot be read"),
        ("a.jsonl.gz", b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 9, r"cannot be read \(Error -3"),
        ("a.jsonl", b'{"text": ' + b"[" * 99999, r"line 1 cannot be read \(nested too deeply"),
        ("a.jsonl", b'{"id": %s}' % (b"[" * 500 + b"]" * 500), r"line 1 cannot be read \(nested too deeply"),
        ("a.jsonl", b"[" * 500 + b"]" * 500, r"line 1 cannot be read \(nested too deeply"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "y", "n": %s}' % (b"9" * 5000),
            r"line 2 cannot be read \(Exceeds the lim",
        ),
        ("a.parquet", b"PAR1 and no more", "a.parquet: record 0 cannot be read"),
        ("a.csv", b"x", r"the formats read are .json, .jsonl"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read(str(tmp_path / name), "")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_that_cannot_be_read_logs_no_lines_beside_the_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    logger = logging.getLogger("datasets")  # hands nothing on to the root
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(ValueError, match="record 0 cannot be read"):
            read(str(tmp_path / "a.parquet"), "")
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.records == []


def test_a_pipe_is_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl: a pipe, a socket or a device, which is not read"):
        read(str(tmp_path / "a.jsonl"), "")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.jsonl: neither a file here nor a Hub dataset") as caught:
        read(str(tmp_path / "gone.jsonl"), "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [(1500, 500), (5, 400), (1, 1)])
def test_a_mixture_is_that_of_datasets(seed: int, sizes: tuple[int, int]) -> None:
    columns = [[f"{i}-{k}" for k in range(size)] for i, size in enumerate(sizes)]
    mixed = list(interleave([iter(column) for column in columns], [3.0, 1.0], seed))
    tables = [Dataset.from_dict({"x": column}) for column in columns]
    theirs = datasets.interleave_datasets(tables, [0.75, 0.25], seed, stopping_strategy="first_exhausted")
    assert mixed == list(theirs["x"])


def test_a_mixture_has_its_shares_repeats_nothing_and_ends_with_a_source(write: Write, config: Config) -> None:
    paths = [write(*({"text": f"{k}{i}"} for i in range(900)), name=f"{k}.jsonl") for k in "ab"]
    mixed = config(paths, weights=[3.0, 1.0], seed=5)
    parts = divide(open_sources(mixed), mixed)
    texts = [record.text for record in training_records(parts, mixed)]
    counts = {k: sum(text[0] == k for text in texts) for k in "ab"}
    assert counts["a"] == 900
    assert abs(counts["b"] - 300) < 4 * (900 * 4 / 9) ** 0.5  # negative binomial: 900 successes of probability 3/4
    assert len(set(texts)) == len(texts)
    assert [text for text in texts if text[0] == "b"] == [f"b{i}" for i in range(counts["b"])]
    assert names(mixed) == names(mixed)
    assert names(mixed) != names(config(paths, weights=[3.0, 1.0], seed=6))


def test_sources_without_weights_follow_one_another(write: Write, config: Config, bare: Tokenizer) -> None:
    paths = [write(*({"text": f"{k}{i}"} for i in range(3)), name=f"{k}.jsonl") for k in "ab"]
    samples = load_samples(config(paths), bare)
    assert [bare.decode(sample.token[:-1]) for sample in samples] == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_every_source_of_a_mixture_holds_its_share_out(write: Write, config: Config, bare: Tokenizer) -> None:
    paths = [write(*({"id": f"{k}{i}", "text": f"{k} {i}"} for i in range(4)), name=f"{k}.jsonl") for k in "ab"]
    mixed = config(paths, held_out=3)
    assert [prompt.id for prompt in held_out_prompts(mixed, bare, None)] == ["a2", "b3", "a3"]
    assert names(mixed) == ["a0", "a1", "b0", "b1", "b2"]
    with pytest.raises(ValueError, match=r"a\.jsonl: 4 records, data\.held_out=8 leaves none"):
        names(config(paths, held_out=8))


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
        ("a", {"contamination": 0}, "data.contamination is 0"),
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
    assert [prompt.id for prompt in held_out_prompts(streamed, bare, None)] == ["0", "1"]
    with pytest.raises(ValueError, match="cannot be read"):
        load_samples(config(str(tmp_path / name), limit=3, held_out=2), bare)


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
    assert [prompt.text for prompt in held_out_prompts(hub, bare, None)] == (["t", "t"])
    if not streaming:
        with pytest.raises(ValueError, match=r"me/set: 9 records, data\.held_out=30 leaves none"):
            load_samples(config("me/set", split="train", held_out=30), bare)
    assert open_source("me/set", "", streaming).identity() != open_source("me/other", "", streaming).identity()


def test_a_hub_data_set_that_breaks_off_is_named_with_its_record(serve: Callable[[Any], Served]) -> None:
    class Broken:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from ({"text": "x"} for _ in range(3))
            raise OSError("connection\nreset")

    serve(Broken())
    with pytest.raises(ValueError, match=r"me/set: record 3 cannot be read \(connection reset\)"):
        list(open_source("me/set", "train", streaming=True))


def test_a_list_of_sources_comes_through_the_command_line() -> None:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose("train", ["data.path=[a.jsonl,me/set:small]", "data.weights=[3,1]"])
    mixed = typed(DataConfig, composed.data)
    assert (mixed.paths, mixed.weights, mixed.prompts) == (["a.jsonl", "me/set:small"], [3.0, 1.0], "")
