"""user_errors(): one line and status 2 for users, a traceback when debugging or for a programmer's error."""

import logging
import os
import signal
from collections.abc import Callable

import pytest

from data.text.filters import Counts
from data.text.prompts import TrainingData
from eval.measures import machine
from heads.common import progress
from heads.common.errors import (
    HIDDEN,
    one_line,
    redact_logs,
    redacted,
    redacted_values,
    redacted_words,
    report_on_interrupt,
    terminate,
    user_errors,
)
from tests import toys
from train.build import provenance


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
        with (
            pytest.raises(SystemExit) as caught,
            user_errors(),
            report_on_interrupt(lambda: "all"),
            report_on_interrupt(lambda: "two files"),
        ):
            os.kill(os.getpid(), number)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == status
    assert capsys.readouterr().err == ("" if rank == "1" else f"stopped by {name}; two files\n")


def test_debug_keeps_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_DEBUG", "1")
    with pytest.raises(ValueError, match="why"), user_errors():
        raise ValueError("why")


def test_programmer_errors_pass() -> None:
    with pytest.raises(AssertionError), user_errors():
        raise AssertionError


def test_what_libraries_say_besides_is_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), user_errors():
        logging.getLogger("httpx").info("HTTP Request: GET")
        logging.getLogger("httpx").warning("lost")
        logging.getLogger("transformers.modeling_utils").warning("LOAD REPORT\nlines of it")
        logging.getLogger("datasets.packaged_modules.parquet").error("Failed to read schema")
    assert caplog.messages == ["lost"]


HUB, OPENAI, KEY = "hf_" + "aB3" * 10, "sk-proj-" + "x1" * 12, "0123456789abcdef" * 2 + "01234567"
SECRETS = [
    HUB, OPENAI, f"HF_TOKEN={HUB[:9]}", f"Authorization: Bearer {KEY}", f"wandb_api_key={KEY}",
    f"trainer.wandb_key={KEY}",
    "+hub.token='two words'", f"https://me:{KEY}@host/x", f"https://host/x?api_key={KEY}&y=1", "password=hunter2",
    f"https://s3/x?X-Amz-Credential={KEY}&X-Amz-Date=1&X-Amz-Signature={KEY}",
    f"https://cdn/x?Expires=1&Policy={KEY}&Signature={KEY}&Key-Pair-Id=K", f"https://blob/x?sv=1&sig={KEY}",
    f"hf_oauth_eyJ{KEY}.{KEY}.{KEY}", f"hf_jwt_eyJ{KEY}.{KEY}",
    *(prefix + "a1" * 15 for prefix in ("ghp_", "gho_", "github_pat_", "glpat-", "wandb_v1_")), "AKIA" + "A1B2" * 4,
    *(f"{name}={KEY}" for name in ("client_secret", "passwd", "credentials", "access_key", "private-key")),
    f"https://s3/x?X-Amz-Security-Token={KEY}", f"eyJ{KEY}.{KEY}.{KEY}",
]  # fmt: skip
HARMLESS = (
    "eos_token=</s> mask_token=<m> bos_token=<s> pad_token=<p> unk_token=<u> sep_token=<x> cls_token=<c> "
    "image_token=<i> special_token=<q> stop_token=w per_token=w drafted_token=w next_token=w first_token=w "
    "last_token=w new_token=w "
    "accepted_per_draft_token=0.5 trainer.batch_tokens=4096 max_new_tokens=64 token=null "
    "objective.normalize=token revision=0123456789abcdef0123456789abcdef01234567 disk-aaaaaaaaaaaaaaaa hf_run"
)


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_hidden(text: str) -> None:
    said = redacted(f"python train/run.py {text} model=tiny")
    assert HIDDEN in said
    assert said.startswith("python train/run.py ")
    assert said.endswith(" model=tiny")
    assert not any(part in said for part in (HUB[:9], OPENAI, KEY, "two", "words", "hunter2", "a1a1", "A1B2"))


def test_what_only_looks_like_one_stays() -> None:
    assert redacted(HARMLESS) == HARMLESS
    assert redacted_words(HARMLESS.split()) == HARMLESS.split()


def test_an_item_of_a_mapping_is_hidden_by_its_key() -> None:
    words = ["extra={api_key: hunter2, eos_token: w, top_k: 3}", "+a={b: 1, 'hub.token': 'two words'}"]
    assert redacted_words(words) == [
        f"extra={{api_key: {HIDDEN}, eos_token: w, top_k: 3}}", f"+a={{b: 1, 'hub.token': {HIDDEN}}}"
    ]  # fmt: skip


def test_a_value_of_the_environment_is_known_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEY in redacted(f"key {KEY}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("OTHER_TOKEN", "seven77")
    monkeypatch.setenv("THIRD_TOKEN", "eight888")
    assert redacted(f"key {KEY} seven77 eight888") == f"key {HIDDEN} seven77 {HIDDEN}", "what is short may be a word"


def test_a_configuration_is_hidden_by_its_keys_too() -> None:
    assert redacted_values({f"https://a:{KEY}@b": 3}) == {f"https://{HIDDEN}@b": 3}
    config = {
        "api_key": "x",
        "token": None,
        "hub": [("a", {"url": f"https://a:{KEY}@b"})],
        "eos_token": "</s>",
        "lr": 0.1,
    }
    assert redacted_values(config) == {**config, "api_key": HIDDEN, "hub": [["a", {"url": f"https://{HIDDEN}@b"}]]}


def test_provenance_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train/run.py", f"+hub.token={HUB[:9]} rest", f"a={OPENAI}", "steps=3"])
    trained = provenance(1, "ddp", TrainingData([], [], Counts()), toys.target().tokenizer)
    for told in (trained["command"], machine.provenance()["command"]):
        assert HIDDEN in told
        assert "steps=3" in told
        assert not any(part in told for part in (HUB[:9], OPENAI, "rest"))


def test_errors_have_none_and_move_no_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADSTART_DEBUG", raising=False)
    with pytest.raises(SystemExit), user_errors():
        raise ValueError(f"{HUB}\x1b[2J")
    assert capsys.readouterr().err == f"error: {HIDDEN}\N{REPLACEMENT CHARACTER}[2J\n"
    assert one_line(ValueError("a\n b")) == "a b"


def test_log_lines_have_none(caplog: pytest.LogCaptureFixture) -> None:
    factory = logging.getLogRecordFactory()
    try:
        redact_logs()
        logging.getLogger("x").warning("with %s and %d", HUB, 3)
        logging.getLogger("x").warning("plain %d", 4)
        logging.getLogger("x").warning("of %s\n\tand", "a\x1b[2J\ud800")
    finally:
        logging.setLogRecordFactory(factory)
    assert [record.getMessage() for record in caplog.records] == [
        f"with {HIDDEN} and 3", "plain 4", "of a\ufffd[2J\ufffd\n\tand",
    ]  # fmt: skip
    assert caplog.records[1].args == (4,)


Read = Callable[[], list[str]]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock, and forget the lines that other tests caused."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(progress.Bar, "last", -99.0)
    return clock


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Read:
    """Return a function that reads the lines on stderr."""

    def lines() -> list[str]:
        return capsys.readouterr().err.splitlines()

    return lines


def work(now: list[float], seconds: float, items: int = 5, label: str = "measuring") -> None:
    for _ in progress.progress(range(items), label):
        now[0] += seconds


def test_work_in_a_log_gets_a_line_now_and_then(now: list[float], read: Read) -> None:
    work(now, 20.0)
    assert read() == ["measuring: 2 of 5, 3.0/min, 0:01:00 left", "measuring: 4 of 5, 3.0/min, 0:00:20 left"]
