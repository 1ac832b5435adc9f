"""A served model's head is replaced by a restart, and put back where it served better."""

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.endpoint.counters import SGLANG, Counters
from heads.common.files import claim, read_checked
from train import publish
from train.release import serve
from train.release.config import ServeConfig
from train.release.serve import Replaced, Server, check_link, replace_head

STUB = Path(__file__).with_name("stub_engine.py")


class Engine:
    """A stub that serves the head behind a link, and the configuration that restarts it."""

    def __init__(self, root: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.root, self.link, self.pid = root, root / "head", root / "pid"
        stub = shlex.join([sys.executable, str(STUB), str(port), str(self.link)])
        kill = f"kill $(cat {self.pid}) 2>/dev/null; "
        gone = f"while kill -0 $(cat {self.pid}) 2>/dev/null; do sleep 0.02; done; "
        self.foreground = f"{kill}{gone}echo $$ > {self.pid}; exec {stub}"
        self.daemon = f"{kill}{stub} & echo $! > {self.pid}"
        self.values: dict[str, Any] = {
            "link": str(self.link), "command": self.foreground, "url": f"http://127.0.0.1:{port}", "start_s": 60.0,
            "passes": 20, "minutes": 1.0,
        }  # fmt: skip

    def config(self, **values: Any) -> ServeConfig:
        return ServeConfig(**{**self.values, **values})

    def head(self, name: str, **config: float) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    def serve(self, head: Path) -> None:
        self.link.symlink_to(head)
        Server(self.config()).restart()

    @property
    def served(self) -> Any:
        return json.loads((self.link / "config.json").read_text(encoding="utf-8"))

    def stop(self) -> None:
        if self.pid.exists():
            subprocess.run(["kill", self.pid.read_text(encoding="utf-8").strip()], capture_output=True, check=False)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(serve, "POLL_S", 0.02)
    engine = Engine(tmp_path)
    yield engine
    engine.stop()


def test_a_better_head_stays_and_lies_beside_the_old_one(engine: Engine) -> None:
    old, new = engine.head("old", rate=1.0), engine.head("trained/new", rate=2.0)
    engine.serve(old)
    replaced = replace_head(new, engine.config(), lambda _: None)
    assert replaced.stays
    assert "tokens accepted a pass, the one before 1." in replaced.line
    assert engine.served == {"rate": 2.0}
    assert replaced.head == engine.link.resolve() != new
    assert replaced.head.parent == engine.root
    assert old.is_dir()
    pid = engine.pid.read_text(encoding="utf-8")
    again = replace_head(new, engine.config())
    assert again == Replaced(replaced.head, True, f"{replaced.head} is served already")
    assert engine.pid.read_text(encoding="utf-8") == pid


def test_a_worse_head_is_put_back(engine: Engine) -> None:
    old = engine.head("old", rate=2.0)
    engine.serve(old)
    lines: list[object] = []
    replaced = replace_head(engine.head("new", rate=1.0), engine.config(command=engine.daemon), lines.append)
    assert not replaced.stays
    assert replaced.line.startswith(f"{old} is put back: 1.")
    assert (engine.served, engine.link.resolve()) == ({"rate": 2.0}, old)
    assert Server(engine.config()).counters() is not None
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"rate": 2.0, "broken": 1}, "serve.command ended with status 1, see "),
        ({"rate": -1.0}, " drafts nothing"),
        ({"rate": 2.0, "dies": 9}, " went away while it was watched"),
    ],
)
def test_a_head_that_does_not_serve_is_put_back(engine: Engine, config: dict[str, float], why: str) -> None:
    engine.serve(engine.head("old", rate=1.0))
    replaced = replace_head(engine.head("new", **config), engine.config(), lambda _: None)
    assert not replaced.stays
    assert why in replaced.line
    assert engine.served == {"rate": 1.0}
    assert Server(engine.config()).counters() is not None


def test_an_interrupted_roll_back_is_finished(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = engine.head("old", rate=2.0), engine.head("new", rate=1.0)
    engine.serve(old)
    whole, restarts = Server.restart, []

    def restart(server: Server) -> None:
        restarts.append(server)
        if len(restarts) == 2:
            raise KeyboardInterrupt
        whole(server)

    monkeypatch.setattr(Server, "restart", restart)
    with pytest.raises(KeyboardInterrupt):
        replace_head(new, engine.config(), lambda _: None)
    replaced = replace_head(new, engine.config(), lambda _: None)
    assert (replaced.stays, engine.served, len(restarts)) == (False, {"rate": 2.0}, 3)
    assert replaced.line.startswith(f"{old} is put back: 1.")


def test_a_command_that_returns_before_the_old_server_is_gone_is_waited_for(engine: Engine) -> None:
    engine.serve(engine.head("old", rate=1.0))
    command = f"sh -c {shlex.quote(f'sleep 0.5; {engine.foreground}')} &"
    replaced = replace_head(engine.head("new", rate=2.0), engine.config(command=command), lambda _: None)
    assert (replaced.stays, engine.served) == (True, {"rate": 2.0}), replaced.line


def test_what_sglang_accepts_follows_from_its_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([
        Counters(SGLANG, 10.0, None, None, (), 4.0, 0.0, 1.0, 0.0),
        Counters(SGLANG, 50.0, None, None, (), 4.0, 2.0, 1.0, 122.0),
    ])  # fmt: skip
    monkeypatch.setattr(Server, "counters", lambda _: next(readings))
    assert list(Server(engine.config()).blocks(1)) == [(40, 80)]


def test_one_call_at_a_time(engine: Engine) -> None:
    engine.link.symlink_to(engine.head("old", rate=1.0))
    with claim(engine.root / ".head.lock", wait=False), pytest.raises(ValueError, match="replaced by another call"):
        replace_head(engine.head("new", rate=1.0), engine.config())


def test_the_first_head_has_nothing_to_be_compared_with(engine: Engine) -> None:
    replaced = replace_head(engine.head("new", rate=1.0), engine.config(), lambda _: None)
    assert replaced.stays
    assert "too little was served to compare" in replaced.line
    engine.stop()
    broken = engine.head("broken", rate=1.0, broken=1)
    engine.link.unlink()
    with pytest.raises(ValueError, match=r"there was no other, so that .*head is removed"):
        replace_head(broken, engine.config(), lambda _: None)
    assert not engine.link.exists()


def test_an_interrupted_call_compares_with_what_was_served_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = engine.head("old", rate=2.0), engine.head("new", rate=1.0)
    engine.serve(old)
    monkeypatch.setattr(Server, "restart", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_head(new, engine.config(), lambda _: None)
    monkeypatch.undo()
    monkeypatch.setattr(serve, "POLL_S", 0.02)
    assert engine.served == {"rate": 1.0}
    assert read_checked(engine.root / ".head.json")["old"] == str(old)
    assert replace_head(new, engine.config(), lambda _: None).line.startswith(f"{old} is put back: 1.")


@pytest.mark.parametrize("where", [(Server, "restart"), (serve, "_point")])
def test_the_way_back_stays_the_last_proven_head(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    """Two calls are cut off, the second as its server starts or before its link is there; a third head fails."""
    old, first = engine.head("old", rate=2.0), engine.head("first", rate=1.9)
    engine.serve(old)
    for head, at in ((first, (Server, "restart")), (engine.head("second", rate=1.8), where)):
        with monkeypatch.context() as cut:
            cut.setattr(*at, interrupt)
            with pytest.raises(KeyboardInterrupt):
                replace_head(head, engine.config(), lambda _: None)
    saved = read_checked(engine.root / ".head.json")
    assert (saved["old"], len(saved["unproven"]), len(saved["blocks"])) == (str(old), 2, 8)
    replaced = replace_head(engine.head("third", rate=1.0), engine.config(), lambda _: None)
    assert replaced.line.startswith(f"{old} is put back: 1.")
    assert (replaced.stays, engine.served, engine.link.resolve()) == (False, {"rate": 2.0}, old)
    replaced = replace_head(engine.head("fourth", rate=3.0), engine.config(), lambda _: None)
    assert replaced.stays
    assert read_checked(engine.root / ".head.json")["unproven"] == [str(replaced.head)]


def test_a_first_head_that_nobody_proved_is_the_way_back_where_there_is_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as cut:
        cut.setattr(Server, "blocks", interrupt)
        with pytest.raises(KeyboardInterrupt):
            replace_head(engine.head("first", rate=2.0), engine.config(), lambda _: None)
    replaced = replace_head(engine.head("broken", rate=1.0, broken=1), engine.config(), lambda _: None)
    assert (replaced.stays, engine.served) == (False, {"rate": 2.0})


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_link_in_the_users_home_is_that(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(engine.root))
    replaced = replace_head(engine.head("new", rate=1.0), engine.config(link="~/head"), lambda _: None)
    assert replaced.head == engine.link.resolve()
    assert (engine.root / "head.log").is_file()


@pytest.mark.parametrize("form", ["", "format=checkpoint dry_run=true out=copy"])
def test_a_link_is_of_a_head_that_engines_read(engine: Engine, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    words = ["run=none", "repo=me/x", f"serve.link={engine.link}", "serve.command=false", *form.split()]
    monkeypatch.setattr(sys, "argv", ["publish.py", *words])
    monkeypatch.setenv("HEADSTART_DEBUG", "1")
    with pytest.raises(ValueError, match=r"serve\.link is of a head's folder: give format=vllm"):
        publish.main()


def test_what_cannot_be_meant_is_refused(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"serve\.link=.*that is no link; move it aside"):
        check_link(engine.head("head", rate=1.0))
    with pytest.raises(ValueError, match=r"serve\.link and serve\.command go together"):
        engine.config(command=None)
    with pytest.raises(ValueError, match=r"serve\.url=localhost: give a URL"):
        engine.config(url="localhost")
