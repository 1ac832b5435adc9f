"""Tables in Markdown hold whatever names are given."""

from eval.report.render import grid


def test_a_name_ends_neither_its_cell_nor_its_line() -> None:
    table = grid(("drafter", "workload"), [["eagle", "my|log\nof may.jsonl"]])
    assert table.splitlines() == ["| drafter | workload |", "| --- | --- |", "| eagle | my\\|log of may.jsonl |"]
