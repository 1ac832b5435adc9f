"""Progress in a log: a line now and then, with the time that is left."""

import pytest

from heads.common.progress import progress


def test_work_in_a_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    items = []
    for item in progress("abcde", "measuring"):
        items.append(item)
        now[0] += 20.0
    assert items == list("abcde")
    assert capsys.readouterr().err.splitlines() == [
        "measuring: 2 of 5, 0:01:00 left",
        "measuring: 4 of 5, 0:00:20 left",
    ]
