"""user_errors(): one line and status 2 for users, a traceback when debugging or for a programmer's error."""

import logging

import pytest

from heads.common.errors import user_errors


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


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSTART_DEBUG", raising=False)
    with pytest.raises(SystemExit) as caught, user_errors():
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"


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
