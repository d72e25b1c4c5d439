"""The host's memory allocator."""

from __future__ import annotations

import ctypes
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's names for them (malloc.h)
MAX_THRESHOLD = 32 << 20  # bytes, as much as glibc takes


def keep_freed_memory() -> bool:
    """Let this process keep memory that it freed, as a training loop wants it: every step takes as much again. False where
    the C library has no mallopt; nothing changes then.

    glibc gives large pieces back to the system and takes them anew, with a page fault for each 4 KiB. The pieces of a split
    backward live longer, so it pays more of them. With memory kept, (B + W) / BW of 8 blocks of width 192 fell from 1.07 to
    1.01, and F and BW took 5 % less (`benchmarks/split.py`).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, MAX_THRESHOLD) and mallopt(TRIM_THRESHOLD, 2**31 - 1))
