"""Atomic folder replacement: readers see the old folder until the new one is complete."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def last_good(folder: Path) -> Path:
    """Return the path of the last complete `folder`: the one set aside, if saving was cut off amid the swap."""
    aside = _aside(folder)
    return aside if aside.is_dir() and not folder.exists() else folder


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def check_writable(folder: Path, key: str) -> None:
    """Check that a folder can be written, or created; nothing is left there.

    Raises:
        ValueError: it cannot; `key` is the setting that names it.
    """
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ValueError(f"{key}={folder}: cannot be written ({parent}: {error.strerror}); give another") from None


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which replaces `folder` whole when the block is done; an error deletes it.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
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
    """Move `new` to `folder`, setting the old one aside; between the two moves `last_good` finds the old one."""
    aside = _aside(folder)
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    try:
        os.replace(new, folder)
    except OSError:
        if aside.exists():
            os.replace(aside, folder)
        raise
    flush(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def flush(path: Path) -> None:
    """Push a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
