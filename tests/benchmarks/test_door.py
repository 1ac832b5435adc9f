"""The benchmark of the door holds each command to its bar."""

import pytest

from benchmarks import door


@pytest.mark.parametrize(
    ("wall", "cpu", "expected"),
    [([1, 2, 9], [1, 1, 1], "pass"), ([4, 4, 1], [2, 3, 9], "busy"), ([4, 4, 4], [3.1, 3.1, 3.1], "FAIL")],
)
def test_the_median_counts(wall: list[float], cpu: list[float], expected: str) -> None:
    assert door.verdict(3.0, wall, cpu) == expected


def test_the_table_has_a_line_a_command_and_a_failure_exits_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(door.sys, "argv", ["door.py", "2"])
    monkeypatch.setattr(door, "timed", lambda one: (one.bar + 1, one.bar))
    door.main()
    assert capsys.readouterr().out.count("| busy |") == len(door.DOORS)
    monkeypatch.setattr(door, "timed", lambda one: (one.bar + 1, one.bar + 1))
    with pytest.raises(SystemExit):
        door.main()
    assert capsys.readouterr().out.count("| FAIL |") == len(door.DOORS)


def test_a_command_is_timed() -> None:
    wall, cpu = door.timed(door.DOORS[1])
    assert cpu > 0
    assert 0 < wall < 60
