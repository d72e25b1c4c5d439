"""Which states (partial orders) a search keeps. Compiled.

A state is dropped where another one dominates it, or where it cannot end within the window by critical paths or energetic
reasoning. Beyond the breadth it is merged into another one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...greedy.arrays.accounts import Records
from ...problem.tables import Ints
from ...util.kernels import subkernel
from .partial_orders import Positions, States, Times, arrivals_of, windows_in
from .search_tables import Tables, place_of_key

# --- Dominance and merging ---


@subkernel
def not_dominated(states: States, keep: Ints, older: States, pairs: Records, shift: int, later: int) -> tuple[Ints, int]:
    """The states of rows `keep` that no older state dominates, and how many pairs were compared.

    An older state with `shift` fewer passes of every lane dominates a state that is nowhere earlier than it plus `later` µs.
    Only older states marked `early` count.
    """
    key = _keys(older.position, 0)
    order = np.argsort(key, kind="mergesort")
    sorted_key = key[order]
    wanted = _keys(states.position, shift)
    result = np.empty(len(keep), np.int64)
    kept = compared = 0
    for s in keep:
        size = arrivals_of(states.position[s], pairs) * windows_in(states)
        dominated = False
        at = np.searchsorted(sorted_key, wanted[s])
        while at < len(order) and sorted_key[at] == wanted[s] and not dominated:
            o = order[at]
            dominated = (
                older.early[o]
                and _equal(older.position[o] + shift, states.position[s])
                and _no_later(older.free[o] + later, states.free[s], states.free.shape[1])
                and _no_later(older.arrivals[o] + later, states.arrivals[s], size)
            )
            at += 1
            compared += 1
        if not dominated:
            result[kept] = s
            kept += 1
    return result[:kept], compared


@subkernel
def _keys(position: Positions, less: int) -> Ints:
    """A hash of each row of positions, lowered by `less`. It may overflow, and two rows may have the same."""
    key = np.zeros(len(position), np.int64)
    for a in range(position.shape[1]):
        key = key * 1_000_003 + (position[:, a].astype(np.int64) - less)
    return key


@subkernel
def _by_position_and_time(states: States, n: int) -> Ints:
    """The first n states in order: grouped by positions, and in each group the earliest first."""
    key = _keys(states.position[:n], 0)
    total = np.zeros(n, np.int64)
    for r in range(states.free.shape[1]):
        total += states.free[:n, r]
    by_time = np.argsort(total, kind="mergesort")
    return by_time[np.argsort(key[by_time], kind="mergesort")]


@subkernel
def reduced(states: States, n: int, pairs: Records, breadth: int, most: int) -> tuple[Ints, bool, int]:
    """The first n states that are kept, by positions and then by time; whether none were merged; how many pairs were
    compared.

    Of two states with the same positions one that is nowhere earlier is dropped. Beyond `breadth` states with the same
    positions, each further one is merged in place into the nearest kept one, with the earlier of both times everywhere.
    After `most` compared pairs it stops, and the kept states are incomplete.
    """
    position, free, last, arrivals = states.position, states.free, states.last, states.arrivals
    ranks = free.shape[1]
    order = _by_position_and_time(states, n)
    keep = np.empty(n, np.int64)
    kept, group, exact, compared = 0, 0, True, 0
    for x in range(n):
        s = order[x]
        if x == 0 or not _equal(position[s], position[order[x - 1]]):
            group = kept
        size = arrivals_of(position[s], pairs) * windows_in(states)
        dominated = False
        nearest, least = -1, 0
        for y in range(group, kept):
            compared += 1
            if _no_later(free[keep[y]], free[s], ranks) and _no_later(arrivals[keep[y]], arrivals[s], size):
                dominated = True
                break
            if kept - group >= breadth:
                away = _distance(free[keep[y]], free[s], ranks) + _distance(arrivals[keep[y]], arrivals[s], size)
                if nearest < 0 or away < least:
                    nearest, least = keep[y], away
        if compared > most:
            break
        if dominated:
            continue
        if nearest < 0:
            keep[kept] = s
            kept += 1
            continue
        free[nearest] = np.minimum(free[nearest], free[s])
        arrivals[nearest] = np.minimum(arrivals[nearest], arrivals[s])
        last[nearest] = -1  # the lane that ran last is not known after a merge
        exact = False
    return keep[:kept], exact, compared


@subkernel
def _equal(row: Any, other: Positions) -> bool:
    """Whether two rows of positions are the same."""
    for a in range(len(row)):  # noqa: SIM110 (a generator is slow here)
        if row[a] != other[a]:
            return False
    return True


@subkernel
def _distance(times: Times, other: Times, size: int) -> int:
    """The summed differences, µs, of the first `size` times."""
    away = 0
    for q in range(size):
        away += abs(int(times[q]) - int(other[q]))
    return away


@subkernel
def _no_later(times: Any, other: Times, size: int) -> bool:
    """Whether the first `size` times of `times` are nowhere later than the other's."""
    for q in range(size):  # noqa: SIM110 (a generator is slow here)
        if times[q] > other[q]:
            return False
    return True


# --- Orders that cannot end within a window ---


TOLERANCE = 1e-9  # relative: sums of energy are floats


@subkernel
def hopeless(tables: Tables, position: Positions, free: Times, arrivals: Times, window: int) -> bool:
    """Whether the state of these positions, free times and arrivals cannot end within the window, µs.

    Reasons are the work left, the critical path of what is under way, or the energy over the time left. Where it can end,
    its times are lifted in place (see `_lift`).
    """
    lanes, ranks, passes, waits, pairs, into, _, _, _ = tables
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
        before, reached = np.int64(free[lanes[a].rank]), np.int64(position[a])
        for j in range(reached, front if reached < front else min(front + 1, m)):
            then = max(before, passes[a, j].head)
            for x in range(lanes[a].wait_first, lanes[a].wait_last):
                b = waits[x].before
                if j >= position[b]:
                    then = max(then, passes[b, j].end + waits[x].lag)
            for x in range(lanes[a].into_first, lanes[a].into_last):
                k = into[x]
                if j < position[pairs[k].before]:
                    then = max(then, np.int64(arrivals[pairs[k].queue + j - reached]))
            before = then + lanes[a].duration
            passes[a, j].end = before
            if before + passes[a, j].tail > window:
                return True
    _lift(lanes, passes, pairs, position, free, arrivals)
    if _too_long_to_go(tables, position, free, window):
        return True
    return _too_much_energy(tables, position, free, front, window)


@subkernel
def _lift(lanes: Records, passes: Records, pairs: Records, position: Positions, free: Times, arrivals: Times) -> None:
    """Raise each rank's free time to the least start of its next passes, and arrivals likewise, in place: then states that
    differ only before that become equal."""
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


@subkernel
def _too_long_to_go(tables: Tables, position: Positions, free: Times, window: int) -> bool:
    """Whether a rank's remaining passes take longer than the window, µs, or fit its memory in no order."""
    lanes, ranks, rows, m = tables.lanes, tables.ranks, tables.to_go, tables.passes.shape[1]
    for r in range(len(ranks)):
        if ranks[r].go_size > 0:
            key = 0
            for a in range(len(lanes)):
                if lanes[a].rank == r:
                    key = key * (m + 1) + int(position[a])
            at = place_of_key(rows, ranks[r].go_first, ranks[r].go_size, key)
            if rows[at, 0] < 0 or free[r] + rows[at, 1] > window:
                return True
    return False


@subkernel
def _too_much_energy(tables: Tables, position: Positions, free: Times, front: int, window: int) -> bool:
    """Whether a rank must still hold more byte·µs than fit into the rest of the window. front: the most passes of a lane
    that are placed."""
    lanes, ranks, passes, held = tables.lanes, tables.ranks, tables.passes, tables.held
    m = passes.shape[1]
    energy = np.zeros(len(ranks))
    for h in range(len(held)):
        a, b, size, least = held[h]
        span, begin = (m - front) * least, free[lanes[a].rank]
        for j in range(position[b], front):
            # Bytes not taken yet may be taken late, so only their least lifespan is sure.
            span += passes[b, j].end - begin if j < position[a] else least
        energy[lanes[a].rank] += float(size) * float(span)
    for r in range(len(ranks)):
        if energy[r] > _energy_left(window + ranks[r].slack - free[r], tables.end_energy[r]) * (1 + TOLERANCE):
            return True
    return False


@subkernel
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
