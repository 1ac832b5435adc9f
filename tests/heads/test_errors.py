"""user_errors(): one line and status 2 for users, a traceback when debugging or for a programmer's error."""

import logging
import os
import signal

import pytest

from heads.common.errors import keeping, terminate, user_errors


class PanicException(BaseException):
    """As pyo3 makes them for a library in Rust, which cannot be imported."""


@pytest.mark.parametrize(
    "error", [ValueError("a\n  b"), FileNotFoundError("a b"), OSError("a b"), PanicException("a b"), Exception("a b")]
)
def test_one_line_and_status(
    error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADSTART_DEBUG", raising=False)
    with pytest.raises(SystemExit) as caught, user_errors():
        raise error
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: a b\n"


@pytest.mark.parametrize(
    ("number", "name", "status"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)]
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_signal_is_one_line_of_the_first_process(
    number: int, name: str, status: int, rank: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADSTART_DEBUG", raising=False)
    monkeypatch.setenv("RANK", rank)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(SystemExit) as caught, user_errors(), keeping(lambda: "all"), keeping(lambda: "two files"):
            os.kill(os.getpid(), number)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == status
    assert capsys.readouterr().err == ("" if rank == "1" else f"stopped by {name}; two files\n")


def test_decorates() -> None:
    @user_errors()
    def double(x: int) -> int:
        return 2 * x

    assert double(3) == 6


def test_debug_keeps_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_DEBUG", "1")
    with pytest.raises(ValueError, match="why"), user_errors():
        raise ValueError("why")


def test_programmer_errors_pass() -> None:
    with pytest.raises(AssertionError), user_errors():
        raise AssertionError


def test_requests_to_the_hub_are_no_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), user_errors():
        logging.getLogger("httpx").info("HTTP Request: GET")
        logging.getLogger("httpx").warning("lost")
    assert caplog.messages == ["lost"]


def test_what_libraries_say_of_a_file_is_not_beside_our_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), user_errors():
        logging.getLogger("transformers.modeling_utils").warning("LOAD REPORT\nlines of it")
        logging.getLogger("datasets.packaged_modules.parquet").error("Failed to read schema")
    assert caplog.messages == []
