"""Moves of one pass along its stream: which are possible, and how long a step they would make. Compiled.

A move takes the pass at place a right behind the one at place b > a, or that at place b right before the one at a. It keeps
the order of lanes and what fits the memory, and makes no circle (Balas and Vazacopoulos, 1998, propositions 2.2 and 2.3).
What it would make of the step is judged by the passes that move alone, with the times of all others as they are.
"""

from __future__ import annotations

from ...tables import Ints
from ...util.kernels import inner_kernel, kernel
from ..arrays.records import Row
from .order_tables import OrderTables

NO_TIME = -1 << 60


@kernel
def possible(t: OrderTables, a: int, b: int, forward: bool) -> bool:
    """Whether a move holds. (A pass of no length may still close a circle: `order_times` finds it.)"""
    return _behind(t, a, b) if forward else _before(t, a, b)


@inner_kernel
def _behind(t: OrderTables, a: int, b: int) -> bool:
    """Whether a pass may go behind others: no path leads from what waits for it to the last of them."""
    passes, links, order = t.passes, t.links, t.order
    one, last = passes[order[a]], passes[order[b]]
    used = _held_after(t, one, a + 1, b + 1, t.held[a])
    if used < 0 or used + one.taken > t.streams[one.stream].capacity:
        return False
    for x in range(one.out_first, one.out_last):
        after = passes[links[x].other]
        if links[x].other == order[b] or last.duration + last.tail < after.duration + after.tail:
            return False
    return True


@inner_kernel
def _before(t: OrderTables, a: int, b: int) -> bool:
    """Whether a pass may go before others: no path leads from the first of them to what it waits for."""
    passes, links, order = t.passes, t.links, t.order
    one, first = passes[order[b]], passes[order[a]]
    used = t.held[a] + one.taken
    if used > t.streams[one.stream].capacity or _held_after(t, one, a, b, used - one.freed) < 0:
        return False
    for x in range(one.in_first, one.in_last):
        before = passes[links[x].other]
        if links[x].other == order[a] or first.head + first.duration < before.head + before.duration:
            return False
    return True


@inner_kernel
def _held_after(t: OrderTables, one: Row, first: int, last: int, used: int) -> int:
    """Bytes held when passes first:last of `order` have run, with `used` before them; −1 where they do not fit, or one is of
    the lane of pass `one`."""
    room = t.streams[one.stream].capacity
    for k in range(first, last):
        other = t.passes[t.order[k]]
        if other.lane == one.lane or used + other.taken > room:
            return -1
        used += other.taken - other.freed
    return used


@kernel
def estimate(t: OrderTables, a: int, b: int, forward: bool, limit: int, ends: Ints) -> int:
    """The longest path through the passes that move, µs, about; less of it where that is over the limit already. ends:
    scratch, shape (places,)."""
    stream = t.streams[t.passes[t.order[a]].stream]
    end = behind = longest = NO_TIME
    if a > stream.first:
        before = t.passes[t.order[a - 1]]
        end = before.head + before.duration
    for k in range(a, b + 1):
        end = ends[k - a] = _end(t, _moved_to(t, a, b, forward, k), end)
    if b + 1 < stream.last:
        after = t.passes[t.order[b + 1]]
        behind = after.duration + after.tail
    for k in range(b, a - 1, -1):
        i = _moved_to(t, a, b, forward, k)
        tail = _tail(t, i, behind)
        longest, behind = max(longest, ends[k - a] + tail), t.passes[i].duration + tail
        if longest > limit:
            break
    return int(longest)


@inner_kernel
def _moved_to(t: OrderTables, a: int, b: int, forward: bool, k: int) -> int:
    """The pass that a move brings to place k."""
    if forward:
        return int(t.order[k + 1 if k < b else a])
    return int(t.order[k - 1 if k > a else b])


@inner_kernel
def _end(t: OrderTables, i: int, free: int) -> int:
    """When pass i ends where its stream is free from a time on, µs."""
    one, start = t.passes[i], max(0, free)
    for x in range(one.in_first, one.in_last):
        before = t.passes[t.links[x].other]
        start = max(start, before.head + before.duration + t.links[x].lag)
    return int(start + one.duration)


@inner_kernel
def _tail(t: OrderTables, i: int, behind: int) -> int:
    """The tail of pass i, µs, where what follows on its stream takes so long."""
    one = t.passes[i]
    tail = max(behind, -t.streams[one.stream].origin)
    for x in range(one.out_first, one.out_last):
        after = t.passes[t.links[x].other]
        tail = max(tail, t.links[x].lag + after.duration + after.tail)
    return int(tail)


@kernel
def move(t: OrderTables, a: int, b: int, forward: bool) -> None:
    """Make the move, in `order`. Moving the other way takes it back."""
    first, last, step = (a, b, 1) if forward else (b, a, -1)
    one = t.order[first]
    for k in range(first, last, step):
        t.order[k] = t.order[k + step]
        t.passes[t.order[k]].place = k
    t.order[last], t.passes[one].place = one, last
