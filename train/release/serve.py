"""A served model gets another head: the folder behind a link, a restart, and the old one back where it accepted more.

The server loads its head from a symbolic link, as in `vllm serve TARGET --speculative-config '{"model": LINK, …}'`.
"""

import hashlib
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data.answers.client import Client, EndpointConfig, EndpointError
from data.text.files import content_hash
from eval.config import base_url
from eval.endpoint.counters import Counters, between, decoded_between, read_counters, restarted
from heads.common.files import claim, flush, read_checked, replacing, write_checked
from inference.service import ALPHA, LOOKS, Accepted, is_less
from train.release.config import ServeConfig

POLL_S = 0.5  # between two looks at a server
# Polled: one that a later command kills, and waits for, must not stay as a zombie of this process.
STARTED: list[subprocess.Popen[bytes]] = []
Blocks = deque[tuple[int, int]]  # passes that verified a draft, and the tokens that they accepted


class Replaced(NamedTuple):
    """The folder that is served now, whether it is the new head's, and a line that says why."""

    head: Path
    stays: bool
    line: str


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

    def blocks(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield passes and accepted tokens of its traffic in up to `count` blocks, until the minutes are over.

        Raises:
            ServerError: it went away, or it answers and drafts nothing.
        """
        first = last = self.counters()
        deadline, yielded = time.monotonic() + 60 * self.config.minutes, 0
        while time.monotonic() < deadline and yielded < count:
            now = self.counters()
            if first is None or last is None or now is None or restarted(last, now):
                raise ServerError(f"{self.client.url} went away while it was watched, see {self.log}")
            counts = None if now.drafts is None else between(last, now, decoded_between(last, now))
            if counts is not None and counts.steps >= max(self.config.passes, 1):
                yield round(counts.steps), round(counts.accepted)
                last, yielded = now, yielded + 1
            elif not now.drafts and (now.finished or 0) - (first.finished or 0) >= LOOKS[0]:
                raise ServerError(f"{self.client.url} drafts nothing")
            else:
                time.sleep(POLL_S)


def replace_head(head: Path, config: ServeConfig, say: Callable[[str], object] = print) -> Replaced:
    """Serve the head of a folder in place of the one behind the link, and put that back where it accepted more.

    A call that was interrupted is taken up by the next one with the same head; one with another head goes back, if it
    must, to the one that was served before both. What was served before is in the file `.NAME.json` beside the link
    NAME.

    Raises:
        ValueError: the link is none, or another call replaces its head; or the server comes up with neither head, and
            the link is as it was.
    """
    link = Path(str(config.link)).expanduser().absolute()
    check_link(link)
    with claim(link.with_name(f".{link.name}.lock"), wait=False) as free:
        if not free:
            raise ValueError(f"serve.link={link}: its head is being replaced by another call; wait for that")
        return _replaced(head, link, Server(config), say)


def _replaced(head: Path, link: Path, server: Server, say: Callable[[str], object]) -> Replaced:
    config = server.config
    new, state = _copied(head, link), link.with_name(f".{link.name}.json")
    saved = read_checked(state) if state.is_file() else {}
    if saved.get("new") == str(new) and saved.get("back"):  # a roll-back was interrupted
        return _rolled_back(new, Path(saved["old"]), link, state, saved, server)
    same = saved.get("new") == str(new) and link.resolve() == new.resolve()
    if same and saved["done"]:
        return Replaced(new, True, f"{new} is served already")
    unproven = _unproven(saved)
    interrupted = bool(unproven) and str(link.resolve()) in (saved["old"], *unproven)
    old, before = None, Blocks()
    if interrupted and saved["old"] and Path(saved["old"]).is_dir():
        old, before = Path(saved["old"]), Blocks(map(tuple, saved["blocks"]))
    else:
        unproven, old = [], (link.resolve() if link.exists() and not same else None)
        if old is not None and server.counters() is not None:
            say(f"{old}: counted for up to {config.minutes:g} min before it is replaced")
            before = _counted(server)
    saved = {"old": old and str(old), "new": str(new), "blocks": list(before), "done": False}
    saved["unproven"] = [*unproven, str(new)]
    write_checked(state, saved)
    _point(link, new)
    try:
        server.restart()
        say(f"{new} is served, and counted for up to {config.minutes:g} min")
        why, stays = _compared(server, before)
    except ServerError as error:
        why, stays = str(error), False
    if stays:
        write_checked(state, {**saved, "done": True})
        return Replaced(new, True, f"{new} stays: {why}")
    if old is None:
        link.unlink()
        raise ValueError(f"{new} is not served: {why}; there was no other, so that {link} is removed")
    saved["back"] = why
    write_checked(state, saved)
    return _rolled_back(new, old, link, state, saved, server)


def _unproven(saved: dict[str, Any]) -> list[str]:
    """Return the heads that calls which were interrupted have put in service since the last proven one."""
    over = not saved or saved["done"] or saved.get("back", "") is None
    return [] if over else [*saved.get("unproven", [saved["new"]])]


def _rolled_back(new: Path, old: Path, link: Path, state: Path, saved: dict[str, Any], server: Server) -> Replaced:
    """Serve the old head again; `saved["back"]` says why, until it is served."""
    why = saved["back"]
    _point(link, old)
    try:
        server.restart()
    except ServerError as error:
        raise ValueError(f"{new} is not served: {why}; {old} is behind {link} again, but: {error}") from error
    write_checked(state, {**saved, "back": None})
    return Replaced(old, False, f"{old} is put back: {why}")


def _counted(server: Server) -> Blocks:
    """Return what the head in service accepts; nothing where it is broken, so that any other may take its place."""
    try:
        return Blocks(server.blocks(LOOKS[0]))
    except ServerError:
        return Blocks()


def _compared(server: Server, before: Blocks) -> tuple[str, bool]:
    """Look at the new head's blocks as `Service` does at requests; return what they show, and whether it stays."""
    after, compares, why = Blocks(), len(before) >= LOOKS[0], "too little was served to compare it with another"
    for block in server.blocks(LOOKS[-1] if compares else 1):
        after.append(block)
        if compares and len(after) in LOOKS:
            new, old = Accepted.of(after), Accepted.of(before)
            why = f"{new.mean:.2f} tokens accepted a pass, the one before {old.mean:.2f}"
            if is_less(new, old, ALPHA / len(LOOKS)):
                return why, False
    return why, True


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
