"""The times of an order: longest paths from its begin and to its end, mended after a move. Compiled."""

from __future__ import annotations

import numpy as np

from ...util.kernels import kernel

CIRCLE = -1  # in place of a value: passes wait for each other in a circle


@kernel
def time_all(t):  # type: ignore[no-untyped-def]
    """Times of all passes, bytes held at all places, and the value, µs; `CIRCLE` where there is none."""
    for i in range(len(t.order)):
        t.sorted[i] = i
        t.passes[i].level = i
    for s in range(len(t.streams)):
        hold(t, s)
    return retime(t, 0, -1)


@kernel
def hold(t, s):  # type: ignore[no-untyped-def]
    """The bytes held before each pass of stream s."""
    used = np.int64(0)
    for k in range(t.streams[s].first, t.streams[s].last):
        t.held[k] = used
        used += t.passes[t.order[k]].taken - t.passes[t.order[k]].freed


@kernel
def retime(t, first, last):  # type: ignore[no-untyped-def]
    """Times after passes first:last of `order` changed places, and the value, µs; `CIRCLE` where there is none. last −1: all
    times are made anew.

    Heads change only behind the first of them in `sorted`, tails only before the last of them as it is sorted anew.
    """
    passes, n = t.passes, len(t.order)
    low = n if last >= 0 else 0
    for k in range(first, last):
        low = min(low, passes[t.order[k]].level)
    if not _heads(t, low):
        return np.int64(CIRCLE)
    value, moved = _value(t)
    high = 0 if last >= 0 and not moved else n - 1
    for k in range(first, last):
        high = max(high, passes[t.order[k]].level)
    _tails(t, high)
    return value


@kernel
def _heads(t, low):  # type: ignore[no-untyped-def]
    """Sort the passes from place `low` of `sorted` on anew and give them heads (Kahn, 1962). False where some are left."""
    passes, links, streams, order, line = t.passes, t.links, t.streams, t.order, t.sorted
    n, ready = len(order), low
    for at in range(low, n):
        i = line[at]
        one = passes[i]
        one.head, one.waiting = 0, 0
        for x in range(one.in_first, one.in_last):
            other = passes[links[x].other]
            if other.level >= low:
                one.waiting += 1
            else:
                one.head = max(one.head, other.head + other.duration + links[x].lag)
        if one.place > streams[one.stream].first:
            other = passes[order[one.place - 1]]
            if other.level >= low:
                one.waiting += 1
            else:
                one.head = max(one.head, other.head + other.duration)
        if one.waiting == 0:
            line[ready] = i
            ready += 1
    at = low
    while at < ready:
        one = passes[line[at]]
        one.level = at
        at += 1
        end = one.head + one.duration
        for x in range(one.out_first, one.out_last):
            other = passes[links[x].other]
            other.head = max(other.head, end + links[x].lag)
            other.waiting -= 1
            if other.waiting == 0:
                line[ready] = links[x].other
                ready += 1
        if one.place + 1 < streams[one.stream].last:
            other = passes[order[one.place + 1]]
            other.head = max(other.head, end)
            other.waiting -= 1
            if other.waiting == 0:
                line[ready] = order[one.place + 1]
                ready += 1
    return ready == n


@kernel
def _value(t):  # type: ignore[no-untyped-def]
    """The value, µs, and whether a rank begins at another time than before: for the span its ends are counted from there."""
    passes, streams, order = t.passes, t.streams, t.order
    value, moved = -(np.int64(1) << 60), False
    for s in range(len(streams)):
        origin = np.int64(0)
        if t.span:
            origin = np.int64(1) << 60
            for other in range(len(streams)):
                if streams[other].rank == streams[s].rank:
                    origin = min(origin, passes[order[streams[other].first]].head)
        moved = moved or origin != streams[s].origin
        streams[s].origin = origin
        last = passes[order[streams[s].last - 1]]
        value = max(value, last.head + last.duration - origin)
    return value, moved


@kernel
def _tails(t, high):  # type: ignore[no-untyped-def]
    """Tails of the passes up to place `high` of `sorted`."""
    passes, links, streams, order, line = t.passes, t.links, t.streams, t.order, t.sorted
    for at in range(high, -1, -1):
        one = passes[line[at]]
        tail = -streams[one.stream].origin
        for x in range(one.out_first, one.out_last):
            other = passes[links[x].other]
            tail = max(tail, links[x].lag + other.duration + other.tail)
        if one.place + 1 < streams[one.stream].last:
            other = passes[order[one.place + 1]]
            tail = max(tail, other.duration + other.tail)
        one.tail = tail
