"""A served model gets another head: the folder behind a link, and a restart; the former one where it does not start.

    python ops/replace.py folder=outputs/NAME/publish link=/srv/head command="systemctl restart vllm"

The server loads its head from a symbolic link, as in `vllm serve TARGET --speculative-config '{"model": LINK, …}'`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root instead of ops/, so that its files shadow no module
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hashlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass

from omegaconf import DictConfig

from data.answers.client import check_url
from data.text.files import content_hash
from eval.measures.counters import restarted
from heads.common.command import command
from heads.common.files import claim, flush, replacing
from heads.common.ranges import Positive
from heads.common.typed import typed
from heads.common.untrusted import visible
from heads.formats.published import is_published
from heads.formats.store import CONFIG
from ops.served import Metrics

POLL_S = 0.5  # between two looks at a server
# Polled: one that a later command kills, and waits for, must not stay as a zombie of this process.
STARTED: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class ReplaceConfig:
    """The head, and the running server that gets it; conf/ops/replace.yaml explains each key."""

    folder: str
    link: str
    command: str
    url: str
    start_s: Positive

    def __post_init__(self) -> None:
        check_url("url", self.url)


class ServerError(Exception):
    """A server that did not come up, or went away."""


def restart(config: ReplaceConfig) -> None:
    """Run the command, and wait until the server that it starts answers.

    Raises:
        ServerError: the command failed, or nobody answers in time.
    """
    server, log = Metrics(config.url, ""), Path(f"{config.link}.log").expanduser()
    before = server.reading()
    with log.open("ab") as output:
        process = subprocess.Popen(
            config.command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    STARTED.append(process)
    deadline = time.monotonic() + config.start_s
    while time.monotonic() < deadline:
        for earlier in STARTED:
            earlier.poll()
        if status := process.returncode:
            raise ServerError(f"command ended with status {status}, see {log}")
        now = server.reading()
        # A command that serves does not end; the server from before may answer for a while yet, after it too.
        if now is not None and (before is None or restarted(before, now) or (status == 0 and before.started is None)):
            return
        time.sleep(POLL_S)
    raise ServerError(f"{server.url} does not answer within {config.start_s:g} s, see {log}")


def replace_head(config: ReplaceConfig) -> Path:
    """Serve the configured head instead of the one behind the link; return the folder that is served.

    Until the server runs with it, the link `.NAME.former` next to the link NAME leads to the head that was served
    before, also after an interrupted call.

    Raises:
        ValueError: engines do not read the head, the link is a file or folder, or another call replaces its head; or
            the server does not come up with this head, and has the former one again.
    """
    link, head = Path(config.link).expanduser().absolute(), Path(config.folder).expanduser()
    if not (head / CONFIG).is_file() or not is_published(head):
        raise ValueError(
            f"folder={head}: no head in a format that engines read; write one: python train/publish.py format=vllm "
            "dry_run=true"
        )
    if link.exists() and not link.is_symlink():
        raise ValueError(f"link={link}: that is no link; move it aside, and make a link of that name to it")
    former = link.with_name(f".{link.name}.former")
    with claim(link.with_name(f".{link.name}.lock"), wait=False) as free:
        if not free:
            raise ValueError(f"link={link}: its head is being replaced by another call; wait for that")
        files = sorted(path for path in head.rglob("*") if path.is_file())
        content = "".join(f"{path.relative_to(head)} {content_hash(path)}\n" for path in files)
        new = link.with_name(f"{link.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}")
        if not new.is_dir():
            with replacing(new) as folder:
                shutil.copytree(head, folder, dirs_exist_ok=True)
        if not former.is_symlink() and link.exists():
            if link.resolve() == new.resolve():
                return new
            _point(former, link.resolve())
        _point(link, new)
        try:
            restart(config)
        except ServerError as error:
            if not former.is_symlink():
                link.unlink()
                raise ValueError(f"{new} is not served: {error}; there was no other, so {link} is removed") from error
            old = former.resolve()
            _point(link, old)
            try:
                restart(config)
            except ServerError as again:
                raise ValueError(f"{new} is not served: {error}; {old} is behind {link} again, but: {again}") from again
            former.unlink()
            raise ValueError(f"{new} is not served: {error}; {old} is served again") from error
        former.unlink(missing_ok=True)
        return new


def _point(link: Path, folder: Path) -> None:
    """Let the link point to a folder: whoever follows it finds the old one or this one."""
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(folder)
    os.replace(new, link)
    flush(link.parent)


@command("ops/replace")
def main(cfg: DictConfig) -> None:
    """Run the command."""
    print(visible(f"{replace_head(typed(ReplaceConfig, cfg))} is served"))


if __name__ == "__main__":
    main()
