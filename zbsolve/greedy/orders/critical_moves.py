"""Moves of one pass along its stream: which are possible, and how long a step they would make. Compiled.

A move takes the pass at place a right behind the one at place b > a, or that at place b right before the one at a. It keeps
the order of lanes and what fits the memory, and makes no circle (Balas and Vazacopoulos, 1998, propositions 2.2 and 2.3).
What it would make of the step is judged by the passes that move alone, with the times of all others as they are.
"""

from __future__ import annotations

import numpy as np

from ...util.kernels import kernel

NO_TIME = np.int64(-1) << 60


@kernel
def possible(t, a, b, forward):  # type: ignore[no-untyped-def]
    """Whether a move holds. (A pass of no length may still close a circle: `order_times` finds it.)"""
    return _behind(t, a, b) if forward else _before(t, a, b)


@kernel
def _behind(t, a, b):  # type: ignore[no-untyped-def]
    """Whether a pass may go behind others: no path leads from what waits for it to the last of them."""
    passes, links, order = t.passes, t.links, t.order
    one, last = passes[order[a]], passes[order[b]]
    room = t.streams[one.stream].capacity
    used = t.held[a]
    for k in range(a + 1, b + 1):
        other = passes[order[k]]
        if other.lane == one.lane or used + other.taken > room:
            return False
        used += other.taken - other.freed
    if used + one.taken > room:
        return False
    for x in range(one.out_first, one.out_last):
        after = passes[links[x].other]
        if links[x].other == order[b] or last.duration + last.tail < after.duration + after.tail:
            return False
    return True


@kernel
def _before(t, a, b):  # type: ignore[no-untyped-def]
    """Whether a pass may go before others: no path leads from the first of them to what it waits for."""
    passes, links, order = t.passes, t.links, t.order
    one, first = passes[order[b]], passes[order[a]]
    room = t.streams[one.stream].capacity
    used = t.held[a] + one.taken
    if used > room:
        return False
    used -= one.freed
    for k in range(a, b):
        other = passes[order[k]]
        if other.lane == one.lane or used + other.taken > room:
            return False
        used += other.taken - other.freed
    for x in range(one.in_first, one.in_last):
        before = passes[links[x].other]
        if links[x].other == order[a] or first.head + first.duration < before.head + before.duration:
            return False
    return True


@kernel
def estimate(t, a, b, forward, limit, ends):  # type: ignore[no-untyped-def]
    """The longest path through the passes that move, µs, about; less of it where that is over the limit already. ends:
    scratch, shape (places,)."""
    order, shift = t.order, 1 if forward else 0
    stream = t.streams[t.passes[order[a]].stream]
    one = order[a] if forward else order[b]
    end = NO_TIME
    if a > stream.first:
        before = t.passes[order[a - 1]]
        end = before.head + before.duration
    if not forward:
        end = ends[b - a] = _end(t, one, end)
    for k in range(b - a):
        end = ends[k] = _end(t, order[a + shift + k], end)
    if forward:
        end = ends[b - a] = _end(t, one, end)
    behind = NO_TIME
    if b + 1 < stream.last:
        after = t.passes[order[b + 1]]
        behind = after.duration + after.tail
    longest = NO_TIME
    if forward:
        tail = _tail(t, one, behind)
        longest, behind = ends[b - a] + tail, t.passes[one].duration + tail
    for k in range(b - a - 1, -1, -1):
        i = order[a + shift + k]
        tail = _tail(t, i, behind)
        longest, behind = max(longest, ends[k] + tail), t.passes[i].duration + tail
        if longest > limit:
            return longest
    return longest if forward else max(longest, ends[b - a] + _tail(t, one, behind))


@kernel
def _end(t, i, free):  # type: ignore[no-untyped-def]
    """When pass i ends where its stream is free from a time on, µs."""
    one, start = t.passes[i], max(np.int64(0), free)
    for x in range(one.in_first, one.in_last):
        before = t.passes[t.links[x].other]
        start = max(start, before.head + before.duration + t.links[x].lag)
    return start + one.duration


@kernel
def _tail(t, i, behind):  # type: ignore[no-untyped-def]
    """The tail of pass i, µs, where what follows on its stream takes so long."""
    one = t.passes[i]
    tail = max(behind, -t.streams[one.stream].origin)
    for x in range(one.out_first, one.out_last):
        after = t.passes[t.links[x].other]
        tail = max(tail, t.links[x].lag + after.duration + after.tail)
    return tail


@kernel
def move(t, a, b, forward):  # type: ignore[no-untyped-def]
    """Make the move, in `order`. Moving the other way takes it back."""
    order, passes = t.order, t.passes
    if forward:
        one = order[a]
        for k in range(a, b):
            order[k] = order[k + 1]
            passes[order[k]].place = k
        order[b], passes[one].place = one, b
    else:
        one = order[b]
        for k in range(b, a, -1):
            order[k] = order[k - 1]
            passes[order[k]].place = k
        order[a], passes[one].place = one, a
