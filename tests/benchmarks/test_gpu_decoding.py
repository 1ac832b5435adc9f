"""The decoding benchmark: what its tables make of numbers, what it goes on with, and the whole of it at toy size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import vl_convert

from benchmarks.gpu import decoding
from benchmarks.gpu.common import Asked, earlier, random_target, record
from benchmarks.gpu.decoding_tables import figures, goals, speedup, tables
from benchmarks.gpu.sequences import TOY_TREE, Sequences, random_head
from tests.benchmarks.gpu_scripts import toy

ORDER = ["1 x 64", "1 x 64, eager", "generate", "2 x 64"]


def parts(verify: float, draft: float = 0.0, rest: float = 0.0) -> dict[str, float]:
    return {"draft": draft, "verify": verify, "rest": rest, "step": draft + verify + rest}


def numbers(plain: float = 1.2, large: float = 1.3) -> dict[str, Any]:
    cell = {"batch": 1, "context": 64, "compiled": True, "plain": parts(plain), "heads": {"a": parts(2.0, 0.5, 0.5)}}
    return {
        "limits": {"bandwidth": 10.0, "weight_bytes": 10, "row_bytes": 1 / 64, "tree": "dynamic"},
        "1 x 64": {**cell, "nodes": {"8": parts(1.2), "64": parts(large), "128": parts(9.0)}},
        "generate": {"prompt": 4, "tokens": 8, "rates": {"HF": 5.0, "here, compiled": 10.0}},
        "2 x 64": {"failed": "out of memory"},
    }


def rows(found: dict[str, Any], start: str) -> list[list[str]]:
    made = next(table for table in tables(found, ORDER) if table.caption.startswith(start))
    assert all(len(row) == len(made.header) for row in made.rows)
    return [list(row) for row in made.rows]


def test_goals_are_judged_by_their_ratios() -> None:
    found = numbers()
    judged = goals(found, found["1 x 64"])
    assert [each["measured"] for each in judged] == pytest.approx([1.2, 1.3 / 1.2])
    assert [each["met"] for each in judged] == [True, True]
    assert [each["met"] for each in goals(found, numbers(plain=1.3)["1 x 64"])] == [False, True]
    assert [each["met"] for each in goals(found, numbers(large=1.4)["1 x 64"])] == [True, False]
    assert rows(numbers(plain=1.3), "Goals")[0][-1] == "missed"


def test_a_goal_is_not_judged_before_its_cell_is_there() -> None:
    found = numbers()
    del found["1 x 64"]
    assert rows(found, "Goals") == [["all", "not measured", "", "not judged"]]


def test_a_step_is_told_over_the_weights_and_over_weights_and_cache() -> None:
    first = rows(numbers(), "The baseline beside")[0]
    assert first[-2:] == ["1.20", f"{1.2 / 1.1:.2f}"]


def test_the_speedup_is_as_many_plain_steps_over_the_whole_step() -> None:
    cell = numbers()["1 x 64"]
    assert speedup(cell, "a", 5) == pytest.approx(5 * 1.2 / 3.0)
    assert rows(numbers(), "What a step costs")[0][-1] == "2.00"


def test_every_cell_has_a_row_also_the_one_that_failed_and_the_one_to_come() -> None:
    grid = rows(numbers(), "What a step costs")
    assert [row[0] for row in grid] == ["1 x 64", "2 x 64"]
    assert set(grid[1][2:]) == {"out of memory"}
    assert [row[1] for row in rows(numbers(), "The baseline beside")][1:] == ["not measured", "out of memory"]


def test_the_figures_are_drawn_and_hold_every_cell() -> None:
    for each in figures(numbers(), ORDER):
        assert vl_convert.vegalite_to_png(json.dumps(dict(each.spec)))
    gains, spent = (each.spec["data"]["values"] for each in figures(numbers(), ORDER))
    assert [each["tau"] for each in gains] == [1, 2, 3, 4, 5]
    assert {each["part"]: each["ms"] for each in spent} == {"plain": 1200, "verify": 2000, "draft": 500, "rest": 500}


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [("device", "name", "another"), ("provenance", "revision", "def"), ("provenance", "dirty", None), ("", "", "")],
)
def test_a_record_of_other_code_or_another_device_is_not_gone_on_with(
    tmp_path: Path, part: str, key: str, value: Any
) -> None:
    asked = Asked(torch.device("cpu"), True, tmp_path)
    assert earlier(asked, "decoding") == {}
    record(asked, "decoding", numbers(), [])
    told = json.loads((tmp_path / "decoding.json").read_text())
    if part:
        told[part][key] = value
    (tmp_path / "decoding.json").write_text(json.dumps(told))
    assert earlier(asked, "decoding") == ({} if part else numbers())
    assert earlier(Asked(asked.device, False, tmp_path), "decoding") == {}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("no room"), "out of memory"),
        (RuntimeError("CUDA error: out of memory"), "out of memory"),
        (RuntimeError("no such kernel"), "no such kernel"),
    ],
)
def test_a_cell_that_fails_is_told_in_a_word(error: Exception, said: str, tmp_path: Path) -> None:
    asked = Asked(torch.device("cpu"), True, tmp_path)
    bench = decoding.Bench(asked, random_target(asked), 1)

    def fails(_: decoding.Bench) -> dict[str, Any]:
        raise error

    assert decoding.measured(bench, fails) == {"failed": said}


def test_a_step_is_taken_again_from_the_same_place(tmp_path: Path) -> None:
    asked = Asked(torch.device("cpu"), True, tmp_path)
    target = random_target(asked)
    sequences = Sequences(target, 2, 40)
    head = random_head("eagle", target)
    drafters = sequences.drafted(head, TOY_TREE)
    step = sequences.stepper(drafters)
    taken = [step() for _ in range(3)]
    assert all(min(each.draft, each.verify, each.rest) > 0 for each in taken)
    assert [each.length for each in sequences.caches] == [40, 40]
    drafts: Any = drafters[0]
    assert drafts.batch.cache.length.tolist() == [40, 40]
    assert sequences.cache.storage.capacity < 2 * 40 + 512  # no buffer has doubled


@pytest.mark.slow
def test_the_whole_benchmark_at_toy_size_goes_on_where_it_stopped(tmp_path: Path) -> None:
    small = ["--batches", "1", "2", "--contexts", "64"]
    begun = toy("decoding", tmp_path, *small, "--minutes", "0.001")["numbers"]
    whole = toy("decoding", tmp_path, *small)
    found = whole["numbers"]
    assert set(begun) == {"limits", "1 x 64"}
    assert begun.items() <= found.items()
    assert set(found) == {"limits", *ORDER}
    cells = [found[name] for name in ("1 x 64", "2 x 64", "1 x 64, eager")]
    assert [cell["compiled"] for cell in cells] == [True, True, False]
    for cell in cells:
        for step in [cell["plain"], *cell["heads"].values(), *cell["nodes"].values()]:
            assert step["step"] == pytest.approx(step["draft"] + step["verify"] + step["rest"])
        assert all(step["draft"] > cell["plain"]["draft"] for step in cell["heads"].values())
    assert list(cells[0]["heads"]) == list(cells[2]["heads"]) == ["eagle3", "eagle"]
    assert list(cells[0]["nodes"]) == ["8", "16"]
    assert len(found["generate"]["rates"]) == 5
    assert [len(table["rows"]) for table in whole["tables"]] == [2, 3, 4, 4, 2, 5]
