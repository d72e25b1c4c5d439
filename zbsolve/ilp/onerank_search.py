"""The compiled search of `onerank.refute`: partial orders of one rank's passes, level by level."""

from __future__ import annotations

import numba
import numpy as np

COMPARED = 48  # states of one set of positions that a new one is compared with


@numba.njit(cache=True)
def search(duration, taken, freed, room, head, tail, lag, held, fall_time, fall_bytes, width, window, most):  # type: ignore[no-untyped-def]
    """1 where an order fits the window, 0 where none does, −1 where more than `most` states were tried.

    A state is a set of passes done (positions), the time, and when passes whose forerunner has run may start (arrivals, a
    queue for every pair of lanes with a lag). Of two states with the same positions one that is nowhere earlier is dropped.
    Orders are left out where one as good remains:
    * idle time in which a pass fits that could start then: one that takes no memory, or of the only lane that takes any,
      can be moved there, for all between takes none;
    * a pass after one that nobody waits for, if it could have gone first at that time with the memory of then.
    """
    lanes, m = head.shape
    pairs = _pairs(lag)
    free_lane = np.ones(lanes, np.bool_)
    for k in range(len(pairs)):
        free_lane[pairs[k, 0]] = False
    for a in range(lanes):
        for b in range(lanes):
            if lag[a, b] >= 0:
                free_lane[a] = False
        free_lane[a] = free_lane[a] and taken[a] == 0
    takers = (taken > 0).sum()
    ramp = _ramp(fall_time, fall_bytes, room)
    position = np.zeros((1, lanes), np.int16)
    now = np.zeros(1, np.int64)
    last = np.full(1, -1, np.int8)
    arrivals = np.zeros((1, width), np.int32)
    tried = 0
    for _ in range(lanes * m):
        count = len(now)
        new_position = np.empty((count * lanes, lanes), np.int16)
        new_now = np.empty(count * lanes, np.int64)
        new_last = np.empty(count * lanes, np.int8)
        new_arrivals = np.empty((count * lanes, width), np.int32)
        n = 0
        start = np.empty(lanes, np.int64)
        for s in range(count):
            used = np.int64(0)
            for a in range(lanes):
                used += position[s, a] * (taken[a] - freed[a])
            _starts(position[s], now[s], arrivals[s], pairs, head, lag, start)
            for a in range(lanes):
                if start[a] < 0 or used + taken[a] > room:
                    continue
                if start[a] + duration[a] + tail[a, position[s, a]] > window:
                    continue
                skip = False
                for b in range(lanes):
                    if (
                        start[b] >= 0
                        and start[b] < start[a]
                        and start[b] + duration[b] <= start[a]
                        and used + taken[b] <= room
                    ):
                        skip = skip or taken[b] == 0 or takers == 1
                w = last[s]
                if not skip and w >= 0 and free_lane[w] and not free_lane[a]:
                    swapped = now[s] + duration[a] + tail[w, position[s, w] - 1] <= window
                    skip = swapped and start[a] == now[s] and used + freed[w] + taken[a] <= room
                    skip = skip and _earlier(a, now[s] - duration[w], position[s], arrivals[s], pairs, head)
                if skip:
                    continue
                wide = _place(a, start[a], position[s], arrivals[s], pairs, lag, duration, new_position[n], new_arrivals[n])
                tried += 1
                if wide > width or tried > most:
                    return -1
                new_now[n] = start[a] + duration[a]
                if _hopeless(
                    new_position[n], new_now[n], new_arrivals[n], pairs, lag, duration, head, tail, held, room, ramp, window
                ):
                    continue
                new_last[n] = a
                n += 1
        if n == 0:
            return 0
        keep = _undominated(new_position[:n], new_now[:n], new_last[:n], new_arrivals[:n], pairs, m)
        position, now, last, arrivals = new_position[keep], new_now[keep], new_last[keep], new_arrivals[keep]
    return 1


@numba.njit(cache=True)
def _pairs(lag):  # type: ignore[no-untyped-def]
    """Rows (lane, later lane) with a lag above 0."""
    found = np.empty((lag.size, 2), np.int64)
    n = 0
    for a in range(len(lag)):
        for b in range(len(lag)):
            if lag[a, b] > 0:
                found[n, 0], found[n, 1] = a, b
                n += 1
    return found[:n]


@numba.njit(cache=True)
def _starts(position, now, arrivals, pairs, head, lag, start):  # type: ignore[no-untyped-def]
    """When each lane's next pass could start, memory aside; −1 where it is done or a forerunner has not run."""
    lanes, m = head.shape
    for a in range(lanes):
        j = position[a]
        start[a] = -1 if j == m else max(now, head[a, j])
        for b in range(lanes):
            if lag[b, a] >= 0 and position[b] <= j:
                start[a] = -1
    at = 0
    for k in range(len(pairs)):
        b, a = pairs[k]
        waiting = position[b] - position[a]
        if waiting > 0 and start[a] >= 0:
            start[a] = max(start[a], arrivals[at])
        at += waiting


@numba.njit(cache=True)
def _earlier(a, then, position, arrivals, pairs, head):  # type: ignore[no-untyped-def]
    """Whether the next pass of lane a could have started at `then`."""
    if head[a, position[a]] > then:
        return False
    at = 0
    for k in range(len(pairs)):
        waiting = position[pairs[k, 0]] - position[pairs[k, 1]]
        if pairs[k, 1] == a and waiting > 0 and arrivals[at] > then:
            return False
        at += waiting
    return True


@numba.njit(cache=True)
def _place(lane, start, position, arrivals, pairs, lag, duration, new_position, new_arrivals):  # type: ignore[no-untyped-def]
    """The state after `lane`'s next pass has run from `start`; how many arrivals it carries. An arrival before the pass
    could start anyway, after all of its lane ahead of it, counts as then."""
    end = start + duration[lane]
    new_position[:] = position
    new_position[lane] += 1
    at, n = 0, 0
    for k in range(len(pairs)):
        a, b = pairs[k]
        waiting = position[a] - position[b]
        first = 1 if b == lane else 0
        size = waiting - first + (1 if a == lane else 0)
        if n + size > len(new_arrivals):
            return n + size
        for q in range(size):
            arrival = arrivals[at + first + q] if first + q < waiting else end + lag[a, b]
            new_arrivals[n] = max(arrival, end + q * duration[b])
            n += 1
        at += waiting
    return n


@numba.njit(cache=True)
def _ramp(fall_time, fall_bytes, room):  # type: ignore[no-untyped-def]
    """Rows (time before the end, byte·µs that fit between then and the end, bytes from there on)."""
    rows = np.zeros((len(fall_time) + 1, 3))
    total, before, level = 0.0, 0.0, 0.0
    for i in range(len(fall_time)):
        total += (fall_time[i] - before) * level
        before = float(fall_time[i])
        level = float(min(room, fall_bytes[i]))
        rows[i + 1, 0], rows[i + 1, 1], rows[i + 1, 2] = before, total, level
    return rows


@numba.njit(cache=True)
def _hopeless(position, now, arrivals, pairs, lag, duration, head, tail, held, room, ramp, window):  # type: ignore[no-untyped-def]
    """Whether the state cannot end within the window: work, what is under way, or memory over the time left."""
    lanes, m = head.shape
    work, front = np.int64(0), np.int64(0)
    for a in range(lanes):
        work += (m - position[a]) * duration[a]
        front = max(front, np.int64(position[a]))
    if now + work > window:
        return True
    # Least ends of passes of the microbatches under way, each lane after the ones before it.
    end = np.zeros((lanes, front + 1), np.int64)
    for a in range(lanes):
        before = now
        for j in range(position[a], front):
            at = max(before, head[a, j])
            for b in range(a):
                if lag[b, a] >= 0 and j >= position[b]:
                    at = max(at, end[b, j] + lag[b, a])
            end[a, j] = at
            before = at + duration[a]
        skip = 0
        for k in range(len(pairs)):
            waiting = position[pairs[k, 0]] - position[pairs[k, 1]]
            if pairs[k, 1] == a:
                for q in range(waiting):
                    j = position[a] + q
                    end[a, j] = max(end[a, j], arrivals[skip + q])
            skip += waiting
        before = now
        for j in range(position[a], front):
            end[a, j] = max(end[a, j], before) + duration[a]
            before = end[a, j]
            if before + tail[a, j] > window:
                return True
    area = 0.0
    for h in range(len(held)):
        a, b, size, least = held[h]
        area += float(m - front) * float(size) * float(least)
        for j in range(position[b], front):
            begin = now if j < position[a] else end[a, j] - duration[a]
            area += float(size) * float(end[b, j] - begin)
    return area > _fits(window - now, ramp) * (1 + 1e-9)


@numba.njit(cache=True)
def _fits(left, ramp):  # type: ignore[no-untyped-def]
    """Byte·µs that fit into the last `left` µs of the window."""
    low, high = 0, len(ramp) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if ramp[middle, 0] <= left:
            low = middle
        else:
            high = middle - 1
    return ramp[low, 1] + (left - ramp[low, 0]) * ramp[low, 2]


@numba.njit(cache=True)
def _undominated(position, now, last, arrivals, pairs, m):  # type: ignore[no-untyped-def]
    """The states to keep: by positions, in order of time, each compared with some kept before it."""
    n, lanes = position.shape
    key = np.zeros(n, np.int64)
    for a in range(lanes):
        key = key * (m + 1) + position[:, a]
    by_time = np.argsort(now, kind="mergesort")
    order = by_time[np.argsort(key[by_time], kind="mergesort")]
    keep = np.empty(n, np.int64)
    kept, group = 0, 0
    for x in range(n):
        s = order[x]
        if x == 0 or key[s] != key[order[x - 1]]:
            group = kept
        size = 0
        for k in range(len(pairs)):
            size += position[s, pairs[k, 0]] - position[s, pairs[k, 1]]
        dominated = False
        for y in range(group, min(kept, group + COMPARED)):
            t = keep[y]
            worse = True
            for q in range(size):
                if arrivals[t, q] > arrivals[s, q]:
                    worse = False
                    break
            if worse:
                dominated = True
                break
        if not dominated:
            keep[kept] = s
            kept += 1
    return keep[:kept]
