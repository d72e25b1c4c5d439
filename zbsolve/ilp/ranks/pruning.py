"""Which partial orders cannot end within a window: critical paths and energetic reasoning, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...greedy.arrays.records import Records
from ...util.kernels import kernel
from .search_tables import Tables

TOLERANCE = 1e-9  # relative: sums of energy are floats


@kernel
def hopeless(
    tables: Tables, position: NDArray[np.int16], free: NDArray[np.int32], arrivals: NDArray[np.int32], window: int
) -> bool:
    """Whether the state of these positions, free times and arrivals cannot end within the window, µs.

    Reasons are the work left, the critical path of what is under way, or the energy over the time left. Where it can end,
    its times are lifted in place (see `_lift`).
    """
    lanes, ranks, passes, waits, pairs, into = (
        tables.lanes,
        tables.ranks,
        tables.passes,
        tables.waits,
        tables.pairs,
        tables.into,
    )
    m = passes.shape[1]
    front = 0
    for a in range(len(lanes)):
        front = max(front, int(position[a]))
    for r in range(len(ranks)):
        left = window + ranks[r].slack - free[r]
        for a in range(len(lanes)):
            if lanes[a].rank == r:
                left -= (m - position[a]) * lanes[a].duration
        if left < 0:
            return True
    at = 0
    for k in range(len(pairs)):
        pairs[k].queue = at
        at += max(0, position[pairs[k].before] - position[pairs[k].after])
    for a in range(len(lanes)):  # each lane after the ones before it
        before, mine = np.int64(free[lanes[a].rank]), np.int64(position[a])
        for j in range(mine, front if mine < front else min(front + 1, m)):
            then = max(before, passes[a, j].head)
            for x in range(lanes[a].wait_first, lanes[a].wait_last):
                b = waits[x].before
                if j >= position[b]:
                    then = max(then, passes[b, j].end + waits[x].lag)
            for x in range(lanes[a].into_first, lanes[a].into_last):
                k = into[x]
                if j < position[pairs[k].before]:
                    then = max(then, np.int64(arrivals[pairs[k].queue + j - mine]))
            before = then + lanes[a].duration
            passes[a, j].end = before
            if before + passes[a, j].tail > window:
                return True
    _lift(lanes, passes, pairs, position, free, arrivals)
    return _too_much_energy(tables, position, free, front, window)


@kernel
def _lift(
    lanes: Records,
    passes: Records,
    pairs: Records,
    position: NDArray[np.int16],
    free: NDArray[np.int32],
    arrivals: NDArray[np.int32],
) -> None:
    """Count each rank as taken until one of its passes can start, and arrivals likewise, in place: states that differ only
    before that are the same."""
    m = passes.shape[1]
    for r in range(len(free)):
        least = -1
        for a in range(len(lanes)):
            if lanes[a].rank == r and position[a] < m:
                then = passes[a, position[a]].end - lanes[a].duration
                least = then if least < 0 else min(least, then)
        free[r] = max(int(free[r]), least)
    for k in range(len(pairs)):
        b, at = pairs[k].after, pairs[k].queue
        idle, each = np.int64(free[lanes[b].rank]), lanes[b].duration
        for q in range(max(0, position[pairs[k].before] - position[b])):
            arrivals[at + q] = max(np.int64(arrivals[at + q]), idle + q * each)


@kernel
def _too_much_energy(tables: Tables, position: NDArray[np.int16], free: NDArray[np.int32], front: int, window: int) -> bool:
    """Whether a rank has yet to hold more byte·µs than fit into what is left of the window. front: the most passes of a lane
    that are placed."""
    lanes, ranks, passes, held = tables.lanes, tables.ranks, tables.passes, tables.held
    m = passes.shape[1]
    energy = np.zeros(len(ranks))
    for h in range(len(held)):
        a, b, size, least = held[h]
        span, begin = (m - front) * least, free[lanes[a].rank]
        for j in range(position[b], front):
            # What is not taken yet may be taken late: then only its least lifespan is sure.
            span += passes[b, j].end - begin if j < position[a] else least
        energy[lanes[a].rank] += float(size) * float(span)
    for r in range(len(ranks)):
        if energy[r] > _energy_left(window + ranks[r].slack - free[r], tables.end_energy[r]) * (1 + TOLERANCE):
            return True
    return False


@kernel
def _energy_left(left: int, rows: NDArray[np.float64]) -> float:
    """Byte·µs that fit into the last `left` µs of the window; rows: one rank's `Lanes.end_energy`."""
    low, high = 0, len(rows) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if rows[middle, 0] <= left:
            low = middle
        else:
            high = middle - 1
    return float(rows[low, 1] + (left - rows[low, 0]) * rows[low, 2])
