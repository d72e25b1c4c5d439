"""Folders for temporary files. If a process is killed, the next process that makes such a folder removes what it left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "zbsolve-"
OWNED = ".owned"  # a file in the folder that its owner has locked; the lock ends with the process


@contextmanager
def temporary_folder(what: str) -> Iterator[Path]:
    """A context with a new folder `zbsolve-<what>-…`, removed at the end. Folders of processes that are gone are removed
    too."""
    remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{what}-"))
    lock = os.open(folder / f"{OWNED}.new", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Renamed after locking: while the owner lives, a file with the name OWNED is always locked.
        os.rename(folder / f"{OWNED}.new", folder / OWNED)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers() -> tuple[Path, ...]:
    """Remove this user's folders whose owners are gone, and return them."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or another process removes it now
            if folder.stat().st_uid == os.getuid() and not folder.is_symlink() and _abandoned(folder / OWNED):
                shutil.rmtree(folder)
                removed.append(folder)
    return tuple(removed)


def _abandoned(lock: Path) -> bool:
    """Whether no process has locked this file. Raises OSError if it does not exist."""
    handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True
