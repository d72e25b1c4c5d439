"""Folders for temporary files that no killed process leaves for ever: the next one that makes such a folder removes them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "zbsolve-"
OWNED = ".owned"  # a file in the folder that its owner holds locked; the lock ends with the process, however that ends


@contextmanager
def temporary_folder(what: str) -> Iterator[Path]:
    """A new folder `zbsolve-<what>-…`, which is removed at the end, and before it those of processes that are gone."""
    remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{what}-"))
    lock = os.open(folder / f"{OWNED}.new", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under its name there is never a file that nobody holds while the owner lives.
        os.rename(folder / f"{OWNED}.new", folder / OWNED)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers() -> tuple[Path, ...]:
    """Remove this user's folders whose owners are gone; which ones those were."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or another process removes it now
            if folder.stat().st_uid == os.getuid() and not folder.is_symlink() and _abandoned(folder / OWNED):
                shutil.rmtree(folder)
                removed.append(folder)
    return tuple(removed)


def _abandoned(lock: Path) -> bool:
    """Whether nobody holds this file. Raises OSError where there is none."""
    handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True
