"""Which ends of passes surely come before a pass starts, and for which more it must wait so that it fits: compiled.

Vector clocks (Mattern, 1989): a pass knows of each stream how many of the passes that free memory have ended when it starts.
It learns that from all that it waits for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import inner_kernel, kernel


class SyncTable(NamedTuple):
    """One pool of memory. Passes are numbered in order of their starts in the row (see `syncs`); streams are those with
    passes that free bytes of the pool.

    One value a pass: start, its place in the row; taken, bytes. One row a pass: inputs, what it waits for; stream and level,
      the streams that it occupies, and how many of each one's passes that free have ended when it has.
    One row a stream: free_pass, its passes that free bytes, in order; free_end, their ends in the row; free_sum, the bytes
      that they and those before them free. room: bytes of the pool, shape (1,).
    """

    start: Ints
    taken: Ints
    input_first: Ints
    inputs: Ints
    level_first: Ints
    stream: Ints
    level: Ints
    free_first: Ints
    free_pass: Ints
    free_end: Ints
    free_sum: Ints
    room: Ints


@kernel
def needed_syncs(t: SyncTable) -> Ints:
    """Pairs of passes, shape (pairs, 2): one that frees, and one that takes and waits for it."""
    count, streams = len(t.start), len(t.free_first) - 1
    clock = np.zeros((count, streams), np.int64)
    waits = np.full(streams, -1, np.int64)
    pairs = np.empty((64, 2), np.int64)
    size, held = 0, 0
    for i in range(count):
        _learn(t, clock, i)
        if t.taken[i] == 0:
            continue
        held += t.taken[i]
        _choose(t, clock, i, held - t.room[0], waits)
        if size + streams > len(pairs):
            wider = np.empty((2 * size + streams, 2), np.int64)
            wider[:size] = pairs[:size]
            pairs = wider
        size = _write(t, clock, i, waits, pairs, size)
    return pairs[:size].copy()


@inner_kernel
def _learn(t: SyncTable, clock: Ints, i: int) -> None:
    """What pass i knows from its inputs."""
    for k in range(t.input_first[i], t.input_first[i + 1]):
        _learn_from(t, clock, i, t.inputs[k])


@inner_kernel
def _learn_from(t: SyncTable, clock: Ints, i: int, before: int) -> None:
    """What pass i knows from the end of pass `before`: all that this one knew at its start, and its own end."""
    for s in range(clock.shape[1]):
        clock[i, s] = max(clock[i, s], clock[before, s])
    for k in range(t.level_first[before], t.level_first[before + 1]):
        s = t.stream[k]
        clock[i, s] = max(clock[i, s], t.level[k])


@inner_kernel
def _freed(t: SyncTable, clock: Ints, i: int) -> int:
    """Bytes that have surely been freed when pass i starts."""
    total = 0
    for s in range(clock.shape[1]):
        if clock[i, s] > 0:
            total += t.free_sum[t.free_first[s] + clock[i, s] - 1]
    return total


@inner_kernel
def _choose(t: SyncTable, clock: Ints, i: int, over: int, waits: Ints) -> None:
    """Let pass i wait for the ends that come first in the row, until no more than the room is held. waits: the last one of
    each stream that it waits for, −1 for none."""
    while _freed(t, clock, i) < over:
        best, first = -1, t.start[i]
        for s in range(clock.shape[1]):
            k = t.free_first[s] + clock[i, s]
            if k < t.free_first[s + 1] and t.free_end[k] < first:
                best, first = s, t.free_end[k]
        if best < 0:
            return
        before = t.free_pass[t.free_first[best] + clock[i, best]]
        waits[best] = before
        _learn_from(t, clock, i, before)


@inner_kernel
def _write(t: SyncTable, clock: Ints, i: int, waits: Ints, pairs: Ints, size: int) -> int:
    """Write down what pass i waits for, less what follows from the rest, and forget it. Returns the number of pairs."""
    for s in range(clock.shape[1]):
        if waits[s] >= 0:
            implied = False
            for other in range(clock.shape[1]):
                if other != s and waits[other] >= 0:
                    # `level` of a pass that frees on s is the clock of every pass that knows its end.
                    for k in range(t.level_first[waits[s]], t.level_first[waits[s] + 1]):
                        implied = implied or (t.stream[k] == s and clock[waits[other], s] >= t.level[k])
            if not implied:
                pairs[size, 0], pairs[size, 1] = waits[s], i
                size += 1
    for s in range(clock.shape[1]):
        waits[s] = -1
    return size
