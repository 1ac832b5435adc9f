import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from data.records import Record, parse, parse_all, read_records

QUESTION = {"role": "user", "content": "why"}
ANSWER = {"role": "assistant", "content": "so"}
SYSTEM = {"role": "system", "content": "be brief"}
SHAREGPT = [{"from": "system", "value": "be brief"}, {"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]


@pytest.mark.parametrize(
    ("raw", "messages", "text"),
    [
        ({"messages": [SYSTEM, QUESTION, ANSWER]}, [SYSTEM, QUESTION, ANSWER], ""),
        ({"conversations": [QUESTION, ANSWER]}, [QUESTION, ANSWER], ""),
        ({"conversations": SHAREGPT}, [SYSTEM, QUESTION, ANSWER], ""),
        ({"prompt": "why", "answer": "so"}, [QUESTION, ANSWER], ""),
        ({"prompt": "why", "answer": "so", "system": "be brief"}, [SYSTEM, QUESTION, ANSWER], ""),
        ({"question": "why", "answer": "so"}, [QUESTION, ANSWER], ""),
        ({"instruction": "why", "input": "", "output": "so"}, [QUESTION, ANSWER], ""),
        ({"instruction": "why", "input": "x", "output": "so"}, [{"role": "user", "content": "why\n\nx"}, ANSWER], ""),
        ({"prompt": "the first turn", "messages": [QUESTION, ANSWER]}, [QUESTION, ANSWER], ""),
        ({"turns": ["why", "really"]}, [QUESTION], ""),
        ({"prompt": ["why", "really"]}, [QUESTION], ""),
        ({"prompt": "why"}, [QUESTION], ""),
        ({"prompt": "why", "answer": None}, [QUESTION], ""),
        ({"text": "a story"}, [], "a story"),
        ({"prompt": "why", "answer": "so", "text": "whyso"}, [QUESTION, ANSWER], "whyso"),
        ({"messages": [{**QUESTION, "tool_calls": None}, ANSWER]}, [QUESTION, ANSWER], ""),
        ({"messages": [SYSTEM, ANSWER, QUESTION, ANSWER]}, [SYSTEM, QUESTION, ANSWER], ""),
    ],
)
def test_every_shape_is_recognised(raw: dict[str, Any], messages: list[dict[str, Any]], text: str) -> None:
    assert parse({**raw, "id": 7, "category": "c"}, 0, "f") == Record("7", "c", messages, text)


def test_an_unknown_shape_shows_its_keys() -> None:
    with pytest.raises(ValueError, match=r"f: record 3 has the keys \['chosen', 'rejected'\]; the shapes read are"):
        parse({"rejected": "a", "chosen": "b"}, 3, "f")


def test_ids_are_unique_and_fall_back_to_the_index() -> None:
    raw = [{"id": "a", "text": "x"}, {"text": "y"}, {"id": "a", "text": "z"}]
    assert [record.id for record in parse_all(raw, range(3), "f")] == ["a", "1", "a@2"]


def test_json_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\u2028line"}\r\n\n{"text": "two"}', encoding="utf-8")
    assert list(read_records(str(path), "")) == [{"text": "one\u2028line"}, {"text": "two"}]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz", "a.jsonl.xz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_in_every_packing(tmp_path: Path, name: str, indent: int | None) -> None:
    records = [{"text": "one"}, {"text": "two"}]
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    opener = openers.get(Path(name).suffix, open)
    with opener(tmp_path / name, "wt", encoding="utf-8") as file:
        file.write(json.dumps(records, indent=indent))
    assert list(read_records(str(tmp_path / name), "")) == records


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Dataset.from_list([{"messages": [QUESTION, ANSWER]}]).to_parquet(tmp_path / "a.parquet")
    raw = read_records(str(tmp_path / "a.parquet"), "")
    assert parse(raw[0], 0, "f").messages == [QUESTION, ANSWER]


@pytest.mark.parametrize(("split", "text"), [("train", "trained"), ("", "tested")])
def test_a_dataset_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, text: str) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "trained"}\n')
    (folder / "test.jsonl").write_text('{"text": "tested"}\n')
    assert read_records(str(folder), split)[0]["text"] == text


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("one\ntwo\n\n three \n", ["one", "two", "three"]),
        ("one\u2028line\r\ntwo\n", ["one\u2028line", "two"]),
        ("one\nstill one\n<|endoftext|>\ntwo\n<|endoftext|>\n", ["one\nstill one", "two"]),
    ],
)
def test_text_files(tmp_path: Path, content: str, texts: list[str]) -> None:
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    assert [record["text"] for record in read_records(str(tmp_path / "a.txt"), "")] == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "holds no records"),
        ("a.txt", b"\n \n", "holds no records"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"line 2 is no JSON .*; mend or remove it"),
        ("a.jsonl", b"3\n", "every record must be a JSON object"),
        ("a.jsonl", b"\xff\xfe", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:-9], "cannot be read"),
        ("a.jsonl.xz", b"not xz", "cannot be read"),
        ("a.csv", b"x", r"the formats read are .json, .jsonl"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_records(str(tmp_path / name), "")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.jsonl: neither a file here nor a Hub dataset") as caught:
        read_records(str(tmp_path / "gone.jsonl"), "train")
    assert "\n" not in str(caught.value)
