"""Folders for temporary files that are removed even after a process is killed: by the next one that makes such a folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "zbsolve-"
OWNED = ".owned"  # a file in the folder locked by its owner; the lock ends with the process, however that ends


@contextmanager
def temporary_folder(what: str) -> Iterator[Path]:
    """A new folder `zbsolve-<what>-…`, removed at the end; before, those of dead processes are removed."""
    remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{what}-"))
    lock = os.open(folder / f"{OWNED}.new", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # While the owner lives, the file never exists unlocked under its name.
        os.rename(folder / f"{OWNED}.new", folder / OWNED)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers() -> tuple[Path, ...]:
    """Remove this user's folders whose owners are gone; returns them."""
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
