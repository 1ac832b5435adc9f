"""What vLLM reads of a measurement: the tokens to draft by batch size."""

import json
from dataclasses import replace
from pathlib import Path

from eval.report.write import SERVING, Report, serving_config, serving_schedule
from tests.eval.stubs import ROW

CHAIN = replace(ROW, drafter="eagle3", tree="chain-5", rule="greedy", speedup=1.5)


def test_ranges_begin_at_one_and_meet() -> None:
    assert serving_config({4: 3, 8: 3, 16: 1, 32: 0, 64: 0}) == {
        "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 15, 3], [16, 31, 1], [32, 64, 0]],
    }  # fmt: skip
    assert serving_config({4: 0, 64: 0})["num_speculative_tokens"] == 1, "of 0 vLLM takes none"


def test_a_report_has_a_schedule_where_it_has_one_chain_in_batches() -> None:
    plain = [replace(ROW, drafter="plain", rule="none", tree="none", batch_size=size, speedup=1.0) for size in (1, 24)]
    rows = [*plain, *(replace(CHAIN, batch_size=size, speedup=gain) for size, gain in ((24, 0.9), (1, 1.5), (4, 1.01)))]
    written = serving_schedule(rows)
    assert written == {"num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": [[1, 23, 5], [24, 24, 0]]}
    assert serving_schedule([*rows, replace(CHAIN, tier="teacher_forced", speedup=None)]) == written
    assert serving_schedule([*plain, CHAIN]) is None, "of one batch size"
    assert serving_schedule([*rows, replace(CHAIN, tree="chain-3")]) is None
    changes = {
        "tree": "dynamic-d4k3n8", "tier": "teacher_forced", "request_rate": 2.0, "lossless": {"failed": 1},
        "temperature": 0.5, "category": "maths", "speedup": None,
    }  # fmt: skip

    def changed(**change: object) -> object:
        return serving_schedule([row if row.drafter == "plain" else replace(row, **change) for row in rows])

    assert [key for key, value in changes.items() if changed(**{key: value}) is not None] == []
    served = {"mlp": False, "hydra runs/a": False, "suffix": True}
    assert {drafter: changed(drafter=drafter) is not None for drafter in served} == served
    for tree, depth in (("served, depth 7", 7), ("served", 2)):
        assert serving_schedule([replace(row, tree=tree) for row in rows[2:]])["num_speculative_tokens"] == depth


def test_the_schedule_stands_beside_its_report_and_goes_with_it(tmp_path: Path) -> None:
    rows = [replace(CHAIN, batch_size=size) for size in (1, 4)]
    Report({}, {}, {}, {}, rows).write(tmp_path)
    assert json.loads((tmp_path / SERVING).read_text(encoding="utf-8")) == serving_schedule(rows)
    Report({}, {}, {}, {}, [ROW]).write(tmp_path)
    assert not (tmp_path / SERVING).exists()
