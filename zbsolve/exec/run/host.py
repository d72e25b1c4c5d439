"""The host: its memory, and its memory allocator."""

from __future__ import annotations

import ctypes
import sys

from ...schedule import Schedule
from ...util.errors import BadInput
from ...util.machine import free_memory
from ...util.text import format_bytes

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's names for them (malloc.h)
MAX_THRESHOLD = 32 << 20  # bytes, as much as glibc takes


def keep_freed_memory() -> bool:
    """Let this process keep memory that it freed, as a training loop wants it: every step takes as much again. False where
    the C library has no mallopt; nothing changes then.

    glibc gives large pieces back to the system and takes them anew, with a page fault for each 4 KiB. The pieces of a split
    backward live longer, so it pays more of them. With memory kept, (B + W) / BW of 8 blocks of width 192 fell from 1.07 to
    1.01, and F and BW took 5 % less (`benchmarks/splits.py`).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, MAX_THRESHOLD) and mallopt(TRIM_THRESHOLD, 2**31 - 1))


def check_host_memory(schedule: Schedule) -> None:
    """Raise BadInput where a pool of host memory takes more of this machine than is free, before anything runs."""
    free, problem = free_memory(), schedule.problem
    for i, need in enumerate(schedule.timeline().pool_peaks):
        if free is not None and need > free:
            pool, has = problem.pool_name(problem.ranks + i), format_bytes(free)
            raise BadInput(f"run: the schedule keeps {format_bytes(need)} in {pool}, but this machine has {has} free")
