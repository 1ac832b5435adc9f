"""Workloads by name and by path, in the shapes of logs and benchmarks; and what is wrong with the others."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from data.text.prompts import Prompt, load_prompts, save_prompts
from data.text.records import IDS, UNFETCHED
from eval.config import Selection
from eval.inputs import workloads
from eval.inputs.workloads import distinct_names, load_workload, read_workload, short_name
from eval.report.view import without_ending
from eval.run import evaluate
from inference.target.target import Target
from tests import toys
from tests.eval.small import small
from tests.eval.stubs import StubTarget
from tests.refusals import refuses

FIRST = Selection(8, 0, False, "first", True)
ALL = Selection(8, 0, False, "all", True)


@pytest.fixture
def three(tmp_path: Path) -> str:
    """Return a file of prompts of 3, 60 and 5 tokens."""
    save_prompts([Prompt(f"p{i}", list(range(i)), "code") for i in (3, 60, 5)], tmp_path / "three.jsonl")
    return str(tmp_path / "three.jsonl")


def written(folder: Path, *records: dict[str, Any]) -> str:
    """Write records as JSON Lines and return the file."""
    (folder / "mine.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return str(folder / "mine.jsonl")


def words(target: Target, prompt: Prompt) -> str:
    return str(target.tokenizer.decode(prompt.token))


def test_a_name_is_a_bundled_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (prompt,) = load_workload("tiny", toys.target(), 1)
    assert prompt.id == "_pytest/_py/path.py:stat"


def test_a_prompt_without_room_is_named_or_keeps_its_end(three: str) -> None:
    refuses(r"p60: 60 tokens.*64.*56", load_workload, three, StubTarget(), 3)
    assert [prompt.id for prompt in load_workload(three, StubTarget(), 1)] == ["p3"]
    prompts = load_workload(three, StubTarget(), 3, truncate=True)
    assert [len(prompt.token) for prompt in prompts] == [3, 56, 5]
    assert prompts[1].token[-1] == 59


def test_short_names_show_no_folder(tmp_path: Path) -> None:
    assert short_name(written(tmp_path, {})) == "mine.jsonl"
    assert short_name(str(workloads.WORKLOADS["tiny"])) == short_name("tiny") == "tiny"
    assert short_name("me/prompts") == "me/prompts"


def test_files_that_are_called_alike_have_the_names_that_they_were_given_by(tmp_path: Path) -> None:
    """All of them were "prompts.jsonl" in the report: a run calls its held-out prompts so."""
    for folder in ("a/x", "b/x", "c"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "prompts.jsonl").write_text("{}")
    files = [str(tmp_path / name / "prompts.jsonl") for name in ("a/x", "b/x", "c")]
    assert distinct_names([files[0], "me/prompts", "tiny"]) == ["prompts.jsonl", "me/prompts", "tiny"]
    assert distinct_names([*files, "tiny"]) == [*files, "tiny"]


def test_a_workload_is_shown_without_the_ending_of_a_file() -> None:
    names = {"a/mine.jsonl": "a/mine", "log.json.gz": "log", "me/arena-v2.0": "me/arena-v2.0", "notes.md": "notes.md"}
    assert {name: without_ending(name) for name in names} == names


SHAPES: dict[str, dict[str, Any]] = {
    "Spec-Bench": {"question_id": 81, "category": "writing", "turns": ["w1 w2", "w3"]},
    "HumanEval": {"task_id": "HumanEval/0", "prompt": "w1 w2", "canonical_solution": "w9", "entry_point": "f"},
    "QA": {"question": "w1 w2", "answer": ["w9", "w8"]},
    "MT-Bench of the Hub": {"prompt": ["w1 w2", "w3"], "prompt_id": 7, "category": "writing", "reference": []},
    "Arena-Hard v0.1": {"question_id": "f00d", "category": "hard", "cluster": "A", "turns": [{"content": "w1 w2"}]},
    "MBPP": {
        "task_id": 11, "text": "w1 w2", "code": "w9", "test_list": ["w8"], "test_setup_code": "",
        "challenge_test_list": [],
    },
    "MBPP, sanitized": {
        "source_file": "w7", "task_id": 11, "prompt": "w1 w2", "code": "w9", "test_imports": [], "test_list": ["w8"],
    },
    "MATH-500": {
        "problem": "w1 w2", "solution": "w8 w9", "answer": "w9", "subject": "Algebra", "level": 2,
        "unique_id": "test/algebra/1.json",
    },
    "AIME": {"ID": "2024-I-1", "Problem": "w1 w2", "Solution": "w8 w9", "Answer": 204},
    "LiveCodeBench": {
        "question_title": "w7", "question_content": "w1 w2", "platform": "atcoder", "question_id": "abc301_a",
        "contest_id": "abc301", "contest_date": "2023-05-13", "starter_code": "", "difficulty": "easy",
        "public_test_cases": "[]", "private_test_cases": "", "metadata": "{}",
    },
    "AlpacaEval": {"dataset": "helpful_base", "instruction": "w1 w2", "output": "w9", "generator": "w7"},
    "IFEval": {"key": 1000, "prompt": "w1 w2", "instruction_id_list": ["length:words"], "kwargs": [{"num_words": 3}]},
    "SWE-bench": {
        "repo": "a/b", "instance_id": "a__b-1", "base_commit": "f00d", "patch": "w9", "test_patch": "w8",
        "problem_statement": "w1 w2", "hints_text": "w7", "version": "1", "FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]",
    },
    "SWE-bench, oracle": {"instance_id": "a__b-1", "text": "w1 w2", "problem_statement": "w1", "patch": "w9"},
    "LongBench": {
        "input": "w2", "context": "w1", "answers": ["w9"], "length": 1, "dataset": "hotpotqa", "language": "en",
        "all_classes": None, "_id": "f00d",
    },
    "LongBench v2": {
        "_id": "f00d", "domain": "w7", "sub_domain": "w7", "difficulty": "easy", "length": "short", "question": "w2",
        "choice_A": "", "choice_B": "", "choice_C": "", "choice_D": "", "answer": "A", "context": "w1",
    },
    "SPEED-Bench": {
        "question_id": "c", "category": "coding", "sub_category": "", "turns": ["w1 w2"], "source": "hle",
        "src_id": "s", "difficulty": "", "multiturn": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_logs_and_benchmarks_are_read_as_they_are_published(tmp_path: Path, shape: str) -> None:
    target = toys.target()
    file, own = written(tmp_path, SHAPES[shape]), {**SHAPES[shape]}
    found = read_workload(file, target, FIRST)
    assert [words(target, prompt) for prompt in found.prompts] == ["w1 w2"]
    assert found.prompts[0].category == own.get("category", "")
    assert found.prompts[0].id == next((str(own[key]) for key in IDS if key in own), "0")
    assert load_prompts(file, target.tokenizer, None) == found.prompts  # what no text to train on may hold


def test_articles_are_to_be_summarized_and_human_eval_is_read_packed(tmp_path: Path) -> None:
    found = read_workload(written(tmp_path, {"id": "x", "article": "w1 w2", "highlights": "w9"}), toys.target(), FIRST)
    assert found.prompts[0].text == "Summarize: w1 w2"
    file = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf-8") as packed:
        packed.write(json.dumps(SHAPES["HumanEval"]))
    found = read_workload(str(file), toys.target(), FIRST)
    assert (found.name, found.prompts[0].id) == ("HumanEval.jsonl.gz", "HumanEval/0")


def test_text_that_must_be_fetched_is_not_measured(tmp_path: Path) -> None:
    hollow = {"question_id": "q7", "turns": [f"{UNFETCHED} FROM THE SOURCE USING SPECDEC_BENCH"]}
    refuses(r"q7 holds a placeholder.*prepare_data", read_workload, written(tmp_path, hollow), toys.target(), FIRST)


def test_all_turns_follow_the_recorded_answers_else_the_targets(tmp_path: Path) -> None:
    target, asked = toys.target(), list[list[int]]()
    log = [{"from": who, "value": f"w{i}"} for i, who in enumerate(("human", "gpt", "human"), 1)]
    file = written(tmp_path, {"id": "log", "conversations": log}, {"question_id": "b", "turns": ["w4", "w5", "w6"]})

    def answer(token: list[int]) -> str:
        asked.append(token)
        return f"w{20 + len(asked)}"

    found = read_workload(file, target, ALL, answer)
    assert {prompt.id: words(target, prompt) for prompt in found.prompts} == {
        "log.1": "w1", "log.2": "w1 w2 w3", "b.1": "w4", "b.2": "w4 w21 w5", "b.3": "w4 w21 w5 w22 w6",
    }  # fmt: skip
    assert [target.tokenizer.decode(token) for token in asked] == ["w4", "w4 w21 w5"]
    assert found.conversations == [0, 0, 1, 1, 1]
    first = read_workload(file, target, FIRST)
    assert first.conversations == [0, 1]
    assert [words(target, prompt) for prompt in first.prompts] == ["w1", "w4"]


def test_what_the_chat_template_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target()
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ 1 / 0 }}")
    file = written(tmp_path, {"id": "b", "turns": ["w4", "w5"]})
    for wanted in (FIRST, ALL):
        with pytest.raises(ValueError, match=r"^[^\n]*mine.jsonl, prompt b: the chat template of .* refuses it: Zero"):
            read_workload(file, target, wanted, lambda _: "w1")


def kinds(folder: Path) -> str:
    records = [{"id": f"{kind}{i}", "category": kind, "prompt": f"w{i}"} for kind in "abc" for i in range(4)]
    return written(folder, *records)


def test_few_prompts_are_of_all_categories_in_the_files_order(tmp_path: Path) -> None:
    file = kinds(tmp_path)
    found = read_workload(file, toys.target(), Selection(5, 0, False, "first", True))
    assert [prompt.id for prompt in found.prompts] == ["a0", "a1", "b0", "b1", "c0"]
    assert found.categories() == {"a": [0, 1], "b": [2, 3], "c": [4]}
    plain = read_workload(file, toys.target(), Selection(3, 0, False, "first", False))
    assert [prompt.id for prompt in plain.prompts] == ["a0", "a1", "a2"]
    assert plain.categories() == {}


def test_warm_up_prompts_are_further_ones_if_there_are_any(tmp_path: Path) -> None:
    file = kinds(tmp_path)
    found = read_workload(file, toys.target(), Selection(5, 2, False, "first", True))
    assert ([prompt.id for prompt in found.warmup], found.fresh) == (["c1", "a2"], True)
    whole = read_workload(file, toys.target(), Selection(12, 2, False, "first", True))
    assert (len(whole.prompts), len(whole.warmup), whole.fresh) == (12, 2, False)
    most = read_workload(file, toys.target(), Selection(11, 2, False, "first", True))
    assert ([prompt.id for prompt in most.warmup], most.fresh) == (["c3", "c2"], False), "a measured one"


def test_records_of_one_name_are_told_apart(tmp_path: Path) -> None:
    found = read_workload(written(tmp_path, *[{"id": "x", "prompt": "w1"}] * 2), toys.target(), FIRST)
    assert [prompt.id for prompt in found.prompts] == ["x", "x@1"]


def test_copies_of_a_prompt_count_as_one(tmp_path: Path) -> None:
    records = [{"id": f"p{i}", "prompt": text} for i, text in enumerate(["w1", "w2", "w1", "w3", "w2"])]
    found = read_workload(written(tmp_path, *records), toys.target(), FIRST)
    assert (len(found.prompts), found.distinct, found.conversations) == (5, 3, [0, 1, 0, 3, 1])
    asked = [{"id": i, "turns": ["w1", follow]} for i, follow in enumerate(["w2", "w2", "w3"])]
    turns = read_workload(written(tmp_path, *asked), toys.target(), ALL, lambda _: "w9")
    assert (turns.distinct, turns.conversations) == (3, [0, 0, 0, 0, 0, 2])


@pytest.fixture
def mess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of workloads that cannot be measured, and a machine without a network."""
    monkeypatch.chdir(tmp_path)
    saved = {"id": "a", "category": "", "text": "", "system": ""}
    texts = {
        "shape.jsonl": '{"prompt": "w1"}\n{"foo": 1}\n',
        "empty.jsonl": "",
        "log.jsonl.gz": '{"prompt": "w1"}',
        "silent.jsonl": '{"prompt": ""}',
        "unasked.jsonl": '{"messages": [{"role": "assistant", "content": "w1"}]}',
        "half.jsonl": '{"turns": ["w1 \\ud800", "w2"]}',
        "other.jsonl": json.dumps({**saved, "token": [3, 50_000]}),
        "spoilt.jsonl": json.dumps({**saved, "token": "w1 w2"}),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "w1"}' * 50)[:-20])

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'me/prompts' on the Hub\n(no route to host)")

    monkeypatch.setattr("data.text.sources.check_reachable", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    return tmp_path


BAD = {
    "shape.jsonl": 'workload shape.jsonl, record 1 is of no known shape: {"foo": 1} The shapes read are {"messages"',
    "empty.jsonl": "empty.jsonl: holds no records",
    "log.jsonl.gz": "log.jsonl.gz: cannot be read (Not a gzipped file",
    "cut.jsonl.gz": "cut.jsonl.gz: cannot be read (Compressed file ended",
    "silent.jsonl": "workload silent.jsonl, prompt 0: is empty: remove it",
    "unasked.jsonl": "workload unasked.jsonl, prompt 0: the chat has no user message",
    "half.jsonl": "workload half.jsonl, prompt 0: it holds half a surrogate pair",
    "other.jsonl": "workload other.jsonl, prompt a: its tokens are none of the target's 40",
    "spoilt.jsonl": "spoilt.jsonl: record 0 is not a saved prompt: fix or remove the record",
    "nonesuch": "workload nonesuch is neither a file or folder here nor one of tiny",
    "me/prompts": "me/prompts: neither a file here nor a Hub dataset, name or name:config, that loads: Couldn't reach",
}


def test_a_bad_workload_is_one_line_and_nothing_is_written(runs: Path, mess: Path) -> None:
    before = sorted(mess.rglob("*"))
    for number, (name, told) in enumerate(BAD.items()):
        config = small(runs, Path("there"), workload=name, turns=("first", "all")[number % 2])
        refuses(f"^{re.escape(told)}", evaluate, config)
    assert sorted(mess.rglob("*")) == before
