"""Folders replaced whole: a finished one takes the place of the old one, which until then is found."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def last_good(folder: Path) -> Path:
    """Return where the head of `folder` lies: set aside, if saving was cut off amid the swap."""
    aside = _aside(folder)
    return aside if aside.is_dir() and not folder.exists() else folder


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def check_writable(folder: Path, key: str) -> None:
    """Check that a folder can be written, or made, and leave nothing behind.

    Raises:
        ValueError: it cannot; `key` is where the user has named it.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"{key}={folder}: cannot be written ({there}: {error.strerror}); give another") from None


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give an empty folder to fill, which takes the place of `folder` whole when the block ends; an error drops it.

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
    """Put `new` in the place of `folder`, the old one aside until then; between the two moves `last_good` finds it."""
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
