"""The records of a log that an adaptation trains on and proves itself by: what is left out, and what is for what."""

import json
from pathlib import Path
from typing import Any

import pytest

from ops.traffic import Hygiene, split
from tests import toys
from tests.ops.test_loop import answer, write


def lines(records: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(record).encode() + b"\n" for record in records]


def logged(count: int, **more: Any) -> list[dict[str, Any]]:
    target = toys.target()
    records = []
    for i in range(count):
        prompt = toys.prompt(1000 + i, 6)
        records.append({"prompt_token_ids": prompt, "token_ids": answer(target, prompt), **more})
    return records


def remarks(records: list[dict[str, Any]], more: tuple[bytes, ...] = ()) -> tuple[int, str]:
    hygiene = Hygiene(toys.target(), "log", 64)
    return len(hygiene.entries([*lines(records), *more])), " ".join(hygiene.remarks())


def test_a_clean_log_is_taken_whole_without_a_remark() -> None:
    assert remarks(logged(12)) == (12, "")


def test_copies_secrets_foreign_tokens_and_broken_lines_are_left_out_and_counted() -> None:
    good = logged(10)
    secret = {"prompt": "w1 w2", "answer": "the key is sk-abcdefghijklmnopqrstuvwx"}
    foreign = {"prompt_token_ids": [1, 2], "token_ids": [toys.VOCAB + 5, 3]}
    later = [{"prompt_token_ids": [1], "token_ids": [2, 3]}, {"prompt_token_ids": [4, -1], "token_ids": [5]}]
    hidden = {
        "prompt": "w3 w4",
        "answer": "w5 w6 w7",
        "headers": {"authorization": "Bearer sk-abcdefghijklmnopqrstuvwx"},
    }
    both = [good[0], good[1], secret, hidden, foreign, {"choices": later}]
    count, said = remarks([*good, *both], (b"{broken\n", b"\n"))
    assert count == 10
    for cause in ("2 of 17 records copies", "2 of 17 records with a secret", "2 of 17 records with tokens of another",
                  "of no known shape"):  # fmt: skip
        assert cause in said, said


def test_answers_that_repeat_themselves_are_left_out_whatever_their_prompts_are_like() -> None:
    varied = " ".join(f"w{i * i % 89}" for i in range(12))
    said = [("user", "w1"), ("assistant", varied), ("user", "w2"), ("assistant", "w7 w8 " * 70)]
    looping = {"messages": [{"role": role, "content": content} for role, content in said]}
    table = {"prompt": "w1 w3 " * 70, "answer": varied}
    hygiene = Hygiene(toys.target(), "log", 150)
    assert [entry.line for entry in hygiene.entries(lines([looping, table]))] == lines([table])
    assert "1 of 2 records that repeat themselves" in hygiene.remarks()[0]


def test_a_user_with_most_of_the_requests_is_cut_to_half() -> None:
    users = [{"user": "a" if i < 18 else f"b{i}"} for i in range(20)]
    for records in (
        [record | user for record, user in zip(logged(20), users, strict=True)],
        [{"response": record, "request": user} for record, user in zip(logged(20), users, strict=True)],
    ):
        count, said = remarks(records)
        assert count == 4
        assert "one user with 90%" in said


def test_text_of_another_model_is_refused() -> None:
    target = toys.target()
    hygiene = Hygiene(target, "log", 64)
    right = hygiene.entries(lines(logged(8)))
    assert hygiene.check_likely(right) > 0
    other = [{"prompt_token_ids": toys.prompt(i, 6), "token_ids": toys.prompt(500 + i, 12)} for i in range(8)]
    with pytest.raises(ValueError, match="another tokenizer or another model"):
        hygiene.check_likely(Hygiene(target, "log", 64).entries(lines(other)))


def test_an_empty_log_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", logged(5))
    with pytest.raises(ValueError, match=r"0 new records can be used .*least=8"):
        split(log, 5, Hygiene(toys.target(), "log", 64), 0.25, 8, tmp_path / "x", ("a", "b", "c", "d"))
    assert not (tmp_path / "x").exists()


def test_the_proof_has_the_last_requests_and_training_none_of_them(tmp_path: Path) -> None:
    records = logged(40)
    log = write(tmp_path / "log.jsonl", records)
    names = ("new", "proof_new", "old", "proof_old")
    split(log, 20, Hygiene(toys.target(), "log", 64), 0.4, 8, tmp_path / "x", names)
    parts = {name: (tmp_path / "x" / name).read_bytes().splitlines(keepends=True) for name in names}
    assert parts["old"] + parts["proof_old"] + parts["new"] + parts["proof_new"] == lines(records)
    assert [len(parts[name]) for name in names] == [12, 8, 12, 8]


def test_a_prompt_that_is_trained_on_proves_nothing(tmp_path: Path) -> None:
    records = logged(20)
    again = [{**records[i], "token_ids": records[i]["token_ids"][:-1]} for i in (0, 18)]  # other answers, sampled
    log = write(tmp_path / "log.jsonl", [*records, *again])
    names = ("new", "proof_new", "old", "proof_old")
    counts = split(log, 0, Hygiene(toys.target(), "log", 64), 0.5, 8, tmp_path / "x", names)
    assert (tmp_path / "x" / "proof_new").read_bytes() == b"".join(lines(records[11:20]))
    assert counts["remarks"] == ["proof_new: left out 2 requests whose prompt another one has"]


def test_requests_that_are_all_asked_again_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    records = logged(10)
    again = [{**one, "token_ids": one["token_ids"][:-1]} for one in records]
    log, names = write(tmp_path / "log.jsonl", [*records, *again]), ("new", "proof_new", "old", "proof_old")
    with pytest.raises(ValueError, match=r"of the 10 new requests .* 0 have a prompt that no other one has, and 8 are"):
        split(log, 0, Hygiene(toys.target(), "log", 64), 0.5, 8, tmp_path / "x", names)
    assert not (tmp_path / "x").exists()
