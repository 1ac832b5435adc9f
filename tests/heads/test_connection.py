"""Without a connection to the Hub its cache alone is asked, and what is not in it is refused at once."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, get_session

from heads.common import connection
from heads.common.connection import check_reachable
from tests.train.hub_server import Hub, become


@pytest.fixture(autouse=True)
def connected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A session that has still to ask the Hub, at a port that nobody serves; an empty cache."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and never answers, as behind a firewall."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_what_was_not_downloaded_is_refused(kind: str, tmp_path: Path) -> None:
    other = {"model": "hub/datasets--org--name", "dataset": "hub/models--org--name"}[kind]
    (tmp_path / other).mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^neither here nor downloaded before, and http://127\.0\.0\.1:9 cannot"):
            check_reachable("org/name", kind)
        assert constants.is_offline_mode()


def test_a_hub_that_is_silent_is_not_waited_for(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", silent)
    monkeypatch.setattr(connection, "PATIENCE", 0.1)
    with pytest.raises(ValueError, match=rf"{silent} cannot be reached \((no answer in 0.1 s|.*timed out.*)\)"):
        check_reachable("org/name")


def test_who_wants_no_connection_is_asked_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(connection, "get_session", pytest.fail)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set: unset it, or give a path"):
        check_reachable("org/name")


@pytest.mark.parametrize(
    ("kind", "folder"), [("model", "hub/models--org--SomeName"), ("dataset", "hub/datasets--org--SomeName")]
)
def test_what_was_downloaded_is_taken_and_said_once(
    kind: str, folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    for _ in range(2):
        check_reachable("org/SomeName", kind)
    assert constants.is_offline_mode()
    assert caplog.text.count("http://127.0.0.1:9 cannot be reached") == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *[(name, "no such folder, nor a Hub id OWNER/NAME") for name in ("/missing/folder", "./model", "~/m", "a/b/c")],
        ("model.safetensors", "is a file; give its folder"),
    ],
)
def test_the_hub_is_not_asked_for_a_path(name: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.safetensors").touch()
    monkeypatch.setattr(connection, "get_session", pytest.fail)
    with pytest.raises(ValueError, match=f"^{why}$"):
        check_reachable(name)
    assert not constants.is_offline_mode()


def test_with_a_connection_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    get_session()
    with Hub() as hub:
        become(hub, monkeypatch, tmp_path)
        check_reachable("org/name")
    assert not constants.is_offline_mode()
