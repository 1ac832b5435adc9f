"""A served model's head is replaced by a restart, and put back where the server does not start with the new one."""

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heads.common.command import quoted
from heads.common.files import claim
from ops import replace
from ops.replace import ReplaceConfig, replace_head, restart
from ops.served import Metrics

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
        }  # fmt: skip

    def config(self, head: Path | str = "", **values: Any) -> ReplaceConfig:
        return ReplaceConfig(str(head), **{**self.values, **values})

    def head(self, name: str, **config: float) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "model.safetensors").touch()
        return folder

    def serve(self, head: Path) -> None:
        self.link.symlink_to(head)
        restart(self.config())

    @property
    def served(self) -> Any:
        return json.loads((self.link / "config.json").read_text(encoding="utf-8"))

    def stop(self) -> None:
        if self.pid.exists():
            subprocess.run(["kill", self.pid.read_text(encoding="utf-8").strip()], capture_output=True, check=False)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(replace, "POLL_S", 0.02)
    engine = Engine(tmp_path)
    yield engine
    engine.stop()


def test_another_head_is_served_and_the_former_folder_stays(engine: Engine) -> None:
    old, new = engine.head("old", rate=1.0), engine.head("trained/new", rate=2.0)
    engine.serve(old)
    served = replace_head(engine.config(new))
    assert engine.served == {"rate": 2.0}
    assert served == engine.link.resolve() != new
    assert served.parent == engine.root
    assert old.is_dir()
    pid = engine.pid.read_text(encoding="utf-8")
    assert replace_head(engine.config(new)) == served
    assert engine.pid.read_text(encoding="utf-8") == pid, "it was served already, and yet the server was restarted"


def test_a_head_that_does_not_serve_is_put_back(engine: Engine) -> None:
    old = engine.head("old", rate=1.0)
    engine.serve(old)
    with pytest.raises(ValueError, match=rf"command ended with status 1, see .*; {old} is served again"):
        replace_head(engine.config(engine.head("new", broken=1)))
    assert (engine.served, engine.link.resolve()) == ({"rate": 1.0}, old)
    assert Metrics(engine.values["url"], "").reading() is not None
    replace_head(engine.config(engine.head("next", rate=2.0), command=engine.daemon))
    assert engine.served == {"rate": 2.0}


def test_a_command_that_returns_before_the_old_server_is_gone_is_waited_for(engine: Engine) -> None:
    engine.serve(engine.head("old", rate=1.0))
    command = f"sh -c {shlex.quote(f'sleep 0.5; {engine.foreground}')} &"
    replace_head(engine.config(engine.head("new", rate=2.0), command=command))
    assert engine.served == {"rate": 2.0}


def test_one_call_at_a_time(engine: Engine) -> None:
    engine.link.symlink_to(engine.head("old", rate=1.0))
    with claim(engine.root / ".head.lock", wait=False), pytest.raises(ValueError, match="replaced by another call"):
        replace_head(engine.config(engine.head("new", rate=1.0)))


def test_a_first_head_that_does_not_serve_leaves_no_link(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"there was no other, so .*head is removed"):
        replace_head(engine.config(engine.head("broken", broken=1)))
    assert not engine.link.is_symlink()
    replace_head(engine.config(engine.head("new", rate=1.0)))
    assert engine.served == {"rate": 1.0}


@pytest.mark.parametrize("where", [(replace, "restart"), (replace, "_point")])
def test_after_interrupted_calls_the_way_back_is_the_head_that_was_served_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    """Two calls are cut off, the second as its server starts or before its link is there; a third head fails."""
    old, first = engine.head("old", rate=2.0), engine.head("first", rate=1.9)
    engine.serve(old)
    for head, at in ((first, (replace, "restart")), (engine.head("second", rate=1.8), where)):
        with monkeypatch.context() as cut:
            cut.setattr(*at, interrupt)
            with pytest.raises(KeyboardInterrupt):
                replace_head(engine.config(head))
    with pytest.raises(ValueError, match=f"{old} is served again"):
        replace_head(engine.config(engine.head("third", broken=1)))
    assert (engine.served, engine.link.resolve()) == ({"rate": 2.0}, old)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_what_cannot_be_meant_is_refused(engine: Engine, tmp_path: Path) -> None:
    head = engine.head("head", rate=1.0)
    with pytest.raises(ValueError, match=r"link=.*that is no link; move it aside"):
        replace_head(engine.config(engine.head("new", rate=1.0)))
    own = engine.head("own", format=1)
    for folder in (own, tmp_path / "none"):
        with pytest.raises(ValueError, match=rf"folder={folder}: no head in a format that engines read"):
            replace_head(engine.config(folder))
    with pytest.raises(ValueError, match=r"url=localhost: give a URL"):
        engine.config(head, url="localhost")


def test_the_command_serves_a_head(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.serve(engine.head("old", rate=1.0))
    values = {**engine.values, "folder": engine.head("new", rate=2.0)}
    monkeypatch.setattr(sys, "argv", ["replace.py", *(f"{key}={quoted(value)}" for key, value in values.items())])
    replace.main()
    assert engine.served == {"rate": 2.0}
    assert capsys.readouterr().out == f"{engine.link.resolve()} is served\n"
