"""A served model gets another head: the folder behind a link, and a restart; the former one where it does not start.

The server loads its head from a symbolic link, as in `vllm serve TARGET --speculative-config '{"model": LINK, …}'`.
"""

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

from data.answers.client import Client, EndpointConfig, EndpointError, base_url
from data.text.files import content_hash
from eval.measures.counters import Counters, read_counters, restarted
from heads.common.files import claim, flush, replacing
from train.release.config import ServeConfig

POLL_S = 0.5  # between two looks at a server
# Polled: one that a later command kills, and waits for, must not stay as a zombie of this process.
STARTED: list[subprocess.Popen[bytes]] = []


class ServerError(Exception):
    """A server that did not come up, or went away."""


class Server:
    """A server that is restarted by a command, and what it counts."""

    def __init__(self, config: ServeConfig) -> None:
        self.config, self.log = config, Path(f"{config.link}.log").expanduser()
        once = EndpointConfig(None, 1, config.start_s, 0, 0.0, 0.0, 1, "", {})
        self.client = Client(base_url(config.url), once, None, "serve.url", "serve")

    def counters(self) -> Counters | None:
        """Return what it counts; None where it is down, or not yet up."""
        try:
            (health, _), (status, page) = self.client.page("/health"), self.client.page("/metrics")
        except EndpointError:
            return None
        return read_counters(page) if health == status == 200 else None

    def restart(self) -> None:
        """Run the command, and wait until the server that it starts answers.

        Raises:
            ServerError: the command failed, or nobody answers in time.
        """
        before = self.counters()
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                str(self.config.command), shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        STARTED.append(process)
        deadline = time.monotonic() + self.config.start_s
        while time.monotonic() < deadline:
            for earlier in STARTED:
                earlier.poll()
            if status := process.returncode:
                raise ServerError(f"serve.command ended with status {status}, see {self.log}")
            now = self.counters()
            # A command that serves does not end; the server from before may answer for a while yet, after it too.
            if now is not None and (
                before is None or restarted(before, now) or (status == 0 and before.started is None)
            ):
                return
            time.sleep(POLL_S)
        raise ServerError(f"{self.client.url} does not answer within {self.config.start_s:g} s, see {self.log}")


def replace_head(head: Path, config: ServeConfig) -> Path:
    """Serve the head of a folder instead of the one behind the link; return the folder that is served.

    While it is replaced, the link `.NAME.former` next to the link NAME leads to the head that was served before, so
    that a call after an interrupted one still has it to go back to.

    Raises:
        ValueError: the link is a file or folder, or another call replaces its head; or the server does not come up with
            this head, and has the former one again.
    """
    link = Path(str(config.link)).expanduser().absolute()
    check_link(link)
    former, server = link.with_name(f".{link.name}.former"), Server(config)
    with claim(link.with_name(f".{link.name}.lock"), wait=False) as free:
        if not free:
            raise ValueError(f"serve.link={link}: its head is being replaced by another call; wait for that")
        new = _copied(head, link)
        if not former.is_symlink() and link.exists():
            if link.resolve() == new.resolve():
                return new
            _point(former, link.resolve())
        _point(link, new)
        try:
            server.restart()
        except ServerError as error:
            raise ValueError(f"{new} is not served: {error}; {_restored(link, former, server)}") from error
        former.unlink(missing_ok=True)
        return new


def _restored(link: Path, former: Path, server: Server) -> str:
    """Serve the former head again; return what is served now."""
    if not former.is_symlink():
        link.unlink()
        return f"there was no other, so that {link} is removed"
    old = former.resolve()
    _point(link, old)
    try:
        server.restart()
    except ServerError as error:
        return f"{old} is behind {link} again, but: {error}"
    former.unlink()
    return f"{old} is served again"


def check_link(link: Path) -> None:
    """Refuse a file or a folder in the link's place."""
    if link.exists() and not link.is_symlink():
        raise ValueError(
            f"serve.link={link}: that is no link; move it aside, make a link of that name to it, and let the server "
            "load its head from there"
        )


def _copied(head: Path, link: Path) -> Path:
    """Return a copy of a head's folder beside the link, named after its content."""
    files = sorted(path for path in head.rglob("*") if path.is_file())
    content = "".join(f"{path.relative_to(head)} {content_hash(path)}\n" for path in files)
    folder = link.with_name(f"{link.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}")
    if not folder.is_dir():
        with replacing(folder) as new:
            shutil.copytree(head, new, dirs_exist_ok=True)
    return folder


def _point(link: Path, folder: Path) -> None:
    """Let the link point to a folder: whoever follows it finds the old one or this one."""
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(folder)
    os.replace(new, link)
    flush(link.parent)
