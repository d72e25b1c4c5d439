"""The compiled search of `onerank.refute`: partial orders of the passes of one rank, or of a few, level by level."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def search(home, duration, taken, freed, room, slack, head, tail, lag, held, fall, width, window, breadth, most):  # type: ignore[no-untyped-def]
    """1 where an order fits the window, 0 where none does, −1 where neither is known; and how many states were tried.

    Of the states with one set of positions at most `breadth` are kept: further ones are merged into the most similar of
    those, the earlier time counting everywhere, which only relaxes (a relaxed decision diagram, Andersen et al. 2007). With
    merged states, or where more than `most` states are tried, an end that fits says nothing.

    A state is a set of passes placed (positions), when each rank is free, and when passes whose forerunner has run may
    start (arrivals, a queue for every pair of lanes with a lag). Of two states with the same positions one that is nowhere
    earlier is dropped. The rank that is free first goes on; another only where a pass of the first waits for a pass that is
    not placed, so every schedule can be built. Orders are left out where one as good remains:
    * idle time in which a pass fits that could start then: one that takes no memory, or of its rank's only lane that takes
      any, can be moved there, for all between takes none;
    * a pass after one that nobody waits for, if it could have gone first at that time with the memory of then.
    """
    lanes, m = head.shape
    ranks = len(room)
    pairs = _pairs(lag, home)
    unawaited = taken == 0
    takers = np.zeros(ranks, np.int64)
    for a in range(lanes):
        takers[home[a]] += taken[a] > 0
        for b in range(lanes):
            unawaited[a] = unawaited[a] and lag[a, b] < 0
    position = np.zeros((1, lanes), np.int16)
    now = np.zeros((1, ranks), np.int32)
    last = np.full((1, ranks), -1, np.int8)
    arrivals = np.zeros((1, width), np.int32)
    start, used = np.empty(lanes, np.int64), np.empty(ranks, np.int64)
    tried = 0
    exact = True
    for _ in range(lanes * m):
        count = len(now)
        new_position = np.empty((count * lanes, lanes), np.int16)
        new_now = np.empty((count * lanes, ranks), np.int32)
        new_last = np.empty((count * lanes, ranks), np.int8)
        new_arrivals = np.empty((count * lanes, width), np.int32)
        n = 0
        for s in range(count):
            used[:] = 0
            for a in range(lanes):
                used[home[a]] += position[s, a] * (taken[a] - freed[a])
            _starts(position[s], now[s], arrivals[s], pairs, home, head, lag, start)
            for a in range(lanes):
                r = home[a]
                if start[a] < 0 or used[r] + taken[a] > room[r] or not _turn(r, position[s], now[s], home, lag, m):
                    continue
                if start[a] + duration[a] + tail[a, position[s, a]] > window:
                    continue
                skip = False
                for b in range(lanes):
                    fits = start[b] >= 0 and start[b] < start[a] and start[b] + duration[b] <= start[a] and home[b] == r
                    skip = skip or (fits and used[r] + taken[b] <= room[r] and (taken[b] == 0 or takers[r] == 1))
                w = last[s, r]
                if not skip and w >= 0 and unawaited[w] and not unawaited[a]:
                    swapped = now[s, r] + duration[a] + tail[w, position[s, w] - 1] <= window
                    skip = swapped and start[a] == now[s, r] and used[r] + freed[w] + taken[a] <= room[r]
                    skip = skip and _earlier(a, now[s, r] - duration[w], position[s], arrivals[s], pairs, head)
                if skip:
                    continue
                new_now[n] = now[s]
                new_now[n, r] = start[a] + duration[a]
                tried += 1
                wide = _place(
                    a, position[s], arrivals[s], pairs, home, lag, duration, new_now[n], new_position[n], new_arrivals[n]
                )
                if wide > width or tried > most:
                    return -1, tried
                if _hopeless(
                    *(new_position[n], new_now[n], new_arrivals[n], pairs, home),
                    *(lag, duration, head, tail, held, room, slack, fall, window),
                ):
                    continue
                new_last[n] = last[s]
                new_last[n, r] = a
                n += 1
        if n == 0:
            return 0, tried
        keep, whole = _undominated(new_position[:n], new_now[:n], new_last[:n], new_arrivals[:n], pairs, m, breadth)
        exact = exact and whole
        position, now, last, arrivals = new_position[keep], new_now[keep], new_last[keep], new_arrivals[keep]
    return (1 if exact else -1), tried


@numba.njit(cache=True, nogil=True)
def _pairs(lag, home):  # type: ignore[no-untyped-def]
    """Rows (lane, later lane) with a lag above 0 or on two ranks: elsewhere the rank is free only when it may start."""
    found = np.empty((lag.size, 2), np.int64)
    n = 0
    for a in range(len(lag)):
        for b in range(len(lag)):
            if lag[a, b] > 0 or (lag[a, b] == 0 and home[a] != home[b]):
                found[n, 0], found[n, 1] = a, b
                n += 1
    return found[:n]


@numba.njit(cache=True, nogil=True)
def _starts(position, now, arrivals, pairs, home, head, lag, start):  # type: ignore[no-untyped-def]
    """When each lane's next pass could start, memory aside; −1 where a forerunner has not been placed, or all are."""
    lanes, m = head.shape
    for a in range(lanes):
        j = position[a]
        start[a] = -1 if j == m else max(np.int64(now[home[a]]), head[a, j])
        for b in range(lanes):
            if lag[b, a] >= 0 and position[b] <= j:
                start[a] = -1
    at = 0
    for k in range(len(pairs)):
        b, a = pairs[k]
        waiting = max(0, position[b] - position[a])
        if waiting > 0 and start[a] >= 0:
            start[a] = max(start[a], np.int64(arrivals[at]))
        at += waiting


@numba.njit(cache=True, nogil=True)
def _turn(r, position, now, home, lag, m):  # type: ignore[no-untyped-def]
    """Whether rank r may go on: it is free first, or each rank before it has none left or a pass that waits for nothing but
    passes of other ranks that are not placed."""
    for q in range(len(now)):
        if now[q] < now[r] or (now[q] == now[r] and q < r):
            blocked, left = False, False
            for a in range(len(home)):
                if home[a] == q and position[a] < m:
                    left = True
                    own, other = False, False
                    for b in range(len(home)):
                        if lag[b, a] >= 0 and position[b] <= position[a]:
                            own = own or home[b] == q
                            other = other or home[b] != q
                    blocked = blocked or (other and not own)
            if left and not blocked:
                return False
    return True


@numba.njit(cache=True, nogil=True)
def _earlier(a, then, position, arrivals, pairs, head):  # type: ignore[no-untyped-def]
    """Whether the next pass of lane a could have started at `then`."""
    if head[a, position[a]] > then:
        return False
    at = 0
    for k in range(len(pairs)):
        waiting = max(0, position[pairs[k, 0]] - position[pairs[k, 1]])
        if pairs[k, 1] == a and waiting > 0 and arrivals[at] > then:
            return False
        at += waiting
    return True


@numba.njit(cache=True, nogil=True)
def _place(lane, position, arrivals, pairs, home, lag, duration, now, new_position, new_arrivals):  # type: ignore[no-untyped-def]
    """The state after `lane`'s next pass has run until its rank is free (`now`); how many arrivals it carries. An arrival
    before the pass could start anyway, after all of its lane ahead of it, counts as then."""
    end = now[home[lane]]
    new_position[:] = position
    new_position[lane] += 1
    at, n = 0, 0
    for k in range(len(pairs)):
        a, b = pairs[k]
        waiting = max(0, position[a] - position[b])
        first = 1 if b == lane else 0
        size = waiting - first + (1 if a == lane else 0)
        if n + size > len(new_arrivals):
            return n + size
        for q in range(size):
            arrival = arrivals[at + first + q] if first + q < waiting else end + lag[a, b]
            new_arrivals[n] = max(arrival, now[home[b]] + q * duration[b])
            n += 1
        at += waiting
    return n


@numba.njit(cache=True, nogil=True)
def _hopeless(position, now, arrivals, pairs, home, lag, duration, head, tail, held, room, slack, fall, window):  # type: ignore[no-untyped-def]
    """Whether the state cannot end within the window: work, what is under way, or memory over the time left."""
    lanes, m = head.shape
    work, front = np.zeros(len(room), np.int64), np.int64(0)
    for a in range(lanes):
        work[home[a]] += (m - position[a]) * duration[a]
        front = max(front, np.int64(position[a]))
    for r in range(len(room)):
        if now[r] + work[r] > window + slack[r]:
            return True
    # Least ends of passes of the microbatches under way, each lane after the ones before it.
    end = np.zeros((lanes, front + 1), np.int64)
    for a in range(lanes):
        before = np.int64(now[home[a]])
        for j in range(position[a], front):
            at = max(before, head[a, j])
            for b in range(a):
                if lag[b, a] >= 0 and j >= position[b]:
                    at = max(at, end[b, j] + lag[b, a])
            end[a, j] = at
        skip = 0
        for k in range(len(pairs)):
            waiting = max(0, position[pairs[k, 0]] - position[pairs[k, 1]])
            if pairs[k, 1] == a:
                for q in range(waiting):
                    j = position[a] + q
                    end[a, j] = max(end[a, j], np.int64(arrivals[skip + q]))
            skip += waiting
        for j in range(position[a], front):
            before = max(end[a, j], before) + duration[a]
            end[a, j] = before
            if before + tail[a, j] > window:
                return True
    area = np.zeros(len(room))
    for h in range(len(held)):
        a, b, size, least = held[h]
        area[home[a]] += float(m - front) * float(size) * float(least)
        for j in range(position[b], front):
            # What is not taken yet may be taken late: then only its least lifespan is sure.
            span = end[b, j] - now[home[a]] if j < position[a] else least
            area[home[a]] += float(size) * float(span)
    for r in range(len(room)):  # noqa: SIM110
        if area[r] > _fits(window + slack[r] - now[r], fall[r]) * (1 + 1e-9):
            return True
    return False


@numba.njit(cache=True, nogil=True)
def _fits(left, ramp):  # type: ignore[no-untyped-def]
    """Byte·µs that fit into the last `left` µs of the window. Rows of `ramp`: time before the end, byte·µs that fit between
    then and the end, bytes from there on."""
    low, high = 0, len(ramp) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if ramp[middle, 0] <= left:
            low = middle
        else:
            high = middle - 1
    return ramp[low, 1] + (left - ramp[low, 0]) * ramp[low, 2]


@numba.njit(cache=True, nogil=True)
def _undominated(position, now, last, arrivals, pairs, m, breadth):  # type: ignore[no-untyped-def]
    """The states to keep, by positions and in order of time, and whether none were merged (in place)."""
    n, lanes = position.shape
    key = np.zeros(n, np.int64)
    for a in range(lanes):
        key = key * 1_000_003 + position[:, a]  # may wrap around: positions are compared too
    total = np.zeros(n, np.int64)
    for r in range(now.shape[1]):
        total += now[:, r]
    by_time = np.argsort(total, kind="mergesort")
    order = by_time[np.argsort(key[by_time], kind="mergesort")]
    keep = np.empty(n, np.int64)
    kept, group, exact = 0, 0, True
    for x in range(n):
        s = order[x]
        if x == 0 or not _equal(position[s], position[order[x - 1]]):
            group = kept
        size = 0
        for k in range(len(pairs)):
            size += max(0, position[s, pairs[k, 0]] - position[s, pairs[k, 1]])
        dominated = False
        nearest, least = np.int64(-1), np.int64(0)
        for y in range(group, kept):
            if _no_later(now[keep[y]], now[s], now.shape[1]) and _no_later(arrivals[keep[y]], arrivals[s], size):
                dominated = True
                break
            if kept - group >= breadth:
                away = _apart(now[keep[y]], now[s], now.shape[1]) + _apart(arrivals[keep[y]], arrivals[s], size)
                if nearest < 0 or away < least:
                    nearest, least = keep[y], away
        if dominated:
            continue
        if nearest < 0:
            keep[kept] = s
            kept += 1
            continue
        now[nearest] = np.minimum(now[nearest], now[s])
        arrivals[nearest] = np.minimum(arrivals[nearest], arrivals[s])
        last[nearest] = -1  # what ran last says nothing of two pasts
        exact = False
    return keep[:kept], exact


@numba.njit(cache=True, nogil=True)
def _equal(one, other):  # type: ignore[no-untyped-def]
    """Whether the positions are the same."""
    for a in range(len(one)):  # noqa: SIM110 (a generator is slow here)
        if one[a] != other[a]:
            return False
    return True


@numba.njit(cache=True, nogil=True)
def _apart(one, other, size):  # type: ignore[no-untyped-def]
    """How far the first `size` times are apart, µs in all."""
    away = np.int64(0)
    for q in range(size):
        away += abs(np.int64(one[q]) - np.int64(other[q]))
    return away


@numba.njit(cache=True, nogil=True)
def _no_later(one, other, size):  # type: ignore[no-untyped-def]
    """Whether the first `size` times of `one` are nowhere later than the other's."""
    for q in range(size):  # noqa: SIM110 (a generator is slow here)
        if one[q] > other[q]:
            return False
    return True
