"""Both outcomes of what a report says by comparing numbers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from eval.measures.losslessness import Gate
from eval.report import sections
from eval.report.write import Report
from tests.eval.stubs import ROW


def report(*changes: Mapping[str, Any], gate: Gate | None = None) -> dict[str, Any]:
    gates = {} if gate is None else {"eagle": gate}
    rows = [replace(ROW, **change) for change in changes]
    return Report({"name": "tiny"}, {"name": "a CPU", "dtype": "float32"}, {"prompts": 8}, gates, rows).as_dict()


@pytest.mark.parametrize(
    ("change", "words", "others"),
    [
        ({}, "writes the same text 1.77 times as fast (1.61 to 1.93)", "not shown to be faster"),
        ({"speedup_ci": (0.99, 2.5)}, "(not shown to be faster; more prompts narrow the interval)", "under coupled"),
        ({"speedup_ci": (1.0, 2.5)}, "(not shown to be faster", "under coupled"),
        ({"speedup_ci": (1.01, 2.5)}, "(1.01 to 2.50)", "not shown"),
        ({"speedup": 0.9, "speedup_ci": (0.8, 1.1)}, "0.90 times as fast (0.80 to 1.10)", "not shown"),  # as is said
        ({"temperature": 1.0, "rule": "coupled"}, "the same text", "under coupled"),
        ({"temperature": 1.0, "rule": "block"}, "text of the same distribution", "the same text"),
        ({"temperature": 1.0, "rule": "coupled + block"}, "identical under coupled noise", "the same text"),
        ({"speedup_hf": None}, "7 of 8 answers identical, 1 the same but for rounding.", "HF generate"),
        ({"speedup_hf": 2.0}, "2.00 times HF generate", "was not checked"),
        ({"lossless": {"checked": 0}}, "; whether the text is the same was not checked.", "writes the same text"),
    ],
)
def test_the_sentence_for_everybody(change: dict[str, Any], words: str, others: str) -> None:
    said = sections.sentence(report(change))
    assert words in said
    assert others not in said


def test_without_a_lossless_speedup_there_is_no_sentence() -> None:
    silent = {"speedup": None, "speedup_ci": None, "speedup_hf": None}
    assert sections.sentence(report(silent)) == ""
    assert sections.sentence(report({"drafter": "plain"})) == ""
    assert sections.sentence(report({"request_rate": 2.0})) == ""
    assert sections.sentence(report(silent, gate=Gate(8, 7, 0, 1))) == ""


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0.1, 0.3, "], clear"), (-0.3, -0.1, "], clear"), (-0.1, 0.1, "], not clear"), (0.0, 0.2, "], not clear")],
)
def test_a_difference_is_clear_of_zero_where_its_interval_is(low: float, high: float, words: str) -> None:
    change = {"difference": (low + high) / 2, "low": low, "high": high}
    pair = {"drafter": "eagle", "base": "mlp", "prompts": 8, "workload": "w", "temperature": 0.0, "batch_size": 1}
    (line,) = sections.compared({"paired": [pair | {"tau": change, "tokens_per_second": change}]})
    assert line.count(f"{words} of zero") == 2
