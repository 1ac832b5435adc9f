"""Atomic writes of files and folders, with checksums and locks.

Readers see the old file or folder until the new one is complete and flushed to the disk.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from heads.common.typed import Json
from heads.common.untrusted import parse_json, regular

CHECKSUM = "sha256"


def last_good(folder: Path) -> Path:
    """Return the path of the last complete `folder`: the old one set aside if a swap was interrupted.

    For a link, the old folder is next to the link's target.
    """
    aside = _aside(folder.resolve() if folder.is_symlink() or not folder.name else folder)  # "." has no name
    return aside if aside.is_dir() and not folder.exists() else folder


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _discard(aside: Path) -> None:
    """Delete the old folder or link that was set aside; for a link only the link."""
    if aside.is_symlink():
        aside.unlink()
    shutil.rmtree(aside, ignore_errors=True)


def check_writable(folder: Path, key: str) -> None:
    """Refuse a folder that cannot be written or created, and leave no trace; `key` is its setting."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ValueError(f"{key}={folder}: cannot be written ({parent}: {error.strerror}); give another") from None


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which replaces `folder` whole when the block is done; an error deletes it."""
    new = folder.with_name(f".{folder.name}.new")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        yield new
        for path in (*new.rglob("*"), new):
            flush(path)
        swap(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def swap(new: Path, folder: Path) -> None:
    """Move `new` to `folder`, setting the old one aside; between the two moves `last_good` returns the old one."""
    aside = _aside(folder)
    if folder.exists():
        _discard(aside)
        os.replace(folder, aside)
    try:
        os.replace(new, folder)
    except OSError:
        if aside.exists():
            os.replace(aside, folder)
        raise
    flush(folder.parent)
    _discard(aside)


def flush(path: Path) -> None:
    """Push a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write(path: Path, content: bytes | Iterator[bytes | memoryview]) -> None:
    """Write a file, or its pieces in turn, under a temporary name, flush it to the disk, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    try:
        partial.unlink(missing_ok=True)  # a file left by a killed process, or a link in a foreign folder
        with partial.open("xb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write a value as JSON, atomically."""
    atomic_write(path, (json.dumps(content, indent=2) + "\n").encode())


def write_checked(path: Path, content: Json) -> None:
    """Write a JSON object with a checksum of itself, atomically."""
    atomic_write(path, (json.dumps({**content, CHECKSUM: checksum(content)}, indent=1) + "\n").encode())


def read_checked(path: Path) -> Json:
    """Return the content of a file of `write_checked`; refuse one whose checksum is missing or differs."""
    regular(path)
    try:
        content: Json = parse_json(path.read_bytes())
        right = content.pop(CHECKSUM) == checksum(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged, it is no JSON object with a checksum") from error
    if not right:
        raise ValueError(f"{path}: damaged, its checksum is not that of its content")
    return content


def checksum(content: object) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def claim(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a file's lock for a block, and yield whether it was acquired; with `wait` it always is. Links are refused.

    The kernel releases it when the process ends. The empty file stays: after a removal two processes could hold it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
