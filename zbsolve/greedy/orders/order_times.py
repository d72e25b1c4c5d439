"""The times of an order: longest paths from its begin (heads) and to its end (tails), updated after a move. Compiled.

`sorted` is a topological order. A move changes it only between the old and the new place of its pass (Pearce and Kelly,
2006). Times are computed again only where a time on which they depend has changed.
"""

from __future__ import annotations

from ...util.kernels import inner_kernel, kernel, subkernel
from .critical_moves import OrderTables

CIRCLE = -1  # in place of a value: the order has a cycle


@kernel
def time_all(t: OrderTables) -> int:
    """Compute the times of all passes and the bytes held at all places. Returns the value, µs, or `CIRCLE`."""
    if not _sort(t):
        return CIRCLE
    for s in range(len(t.streams)):
        hold(t, t.streams[s].first, t.streams[s].last)
    t.marks[:] = 1
    _heads(t, 0, len(t.order))
    value, _ = _value(t)
    t.marks[:] = 1
    _tails(t, len(t.order) - 1, len(t.order))
    return value


@kernel
def hold(t: OrderTables, first: int, last: int) -> None:
    """Compute the bytes held before each of the passes first:last of `order`, which are on one stream."""
    used = 0
    if first > t.streams[t.passes[t.order[first]].stream].first:
        before = t.passes[t.order[first - 1]]
        used = t.held[first - 1] + before.taken - before.freed
    for k in range(first, last):
        t.held[k] = used
        used += t.passes[t.order[k]].taken - t.passes[t.order[k]].freed


@kernel
def retime(t: OrderTables, a: int, b: int, count: int) -> int:
    """Update all times after a move that put the first `count` passes of places a … b of `order` last. Returns the value,
    µs; or `CIRCLE` with times unchanged, if the order now has a cycle."""
    passes, order, n = t.passes, t.order, len(t.order)
    if not _sort_behind(t, b, count):
        return CIRCLE
    streams, stream = t.streams, t.streams[passes[order[a]].stream]
    low, high, last, earlier, later = n, 0, min(b + 1, stream.last - 1), 0, 0
    for k in range(a, last + 1):
        later += _mark(t, order[k])
        low = min(low, passes[order[k]].level)
    _heads(t, low, later)
    value, moved = _value(t) if t.part[0] == 0 else (0, False)
    for k in range(max(a - 1, stream.first), b + 1):
        earlier += _mark(t, order[k])
        high = max(high, passes[order[k]].level)
    for s in range(len(streams) if moved else 0):
        end = order[streams[s].last - 1]
        earlier += _mark(t, end)
        high = max(high, passes[end].level)
    _tails(t, high, earlier)
    return value if t.part[0] == 0 else longest_inside(t)


@subkernel
def longest_inside(t: OrderTables) -> int:
    """The longest path through the passes of a part, µs."""
    longest = 0
    for k in range(1, 1 + t.part[0]):
        row = t.passes[t.part[k]]
        longest = max(longest, row.head + row.duration + row.tail)
    return longest


@subkernel
def _sort(t: OrderTables) -> bool:
    """Sort all passes topologically (Kahn, 1962). Returns False if there is a cycle."""
    passes, links, streams, order, line = t.passes, t.links, t.streams, t.order, t.sorted
    n, ready, at = len(order), 0, 0
    for i in range(n):
        row = passes[i]
        row.waiting = row.in_last - row.in_first + (row.place > streams[row.stream].first)
        if row.waiting == 0:
            line[ready] = i
            ready += 1
    while at < ready:
        row = passes[line[at]]
        row.level = at
        at += 1
        for x in range(row.out_first, row.out_last + 1):
            if x < row.out_last:
                i = links[x].other
            elif row.place + 1 < streams[row.stream].last:
                i = order[row.place + 1]
            else:
                break
            passes[i].waiting -= 1
            if passes[i].waiting == 0:
                line[ready] = i
                ready += 1
    return ready == n


@subkernel
def _sort_behind(t: OrderTables, b: int, count: int) -> bool:
    """Update `sorted` after the last `count` passes up to place b moved back: they, and passes that wait for them, go behind
    the others. Returns False, with nothing changed, if one of the others waits for them (a cycle)."""
    passes, links, order, line, marks = t.passes, t.links, t.order, t.sorted, t.marks
    low, high = passes[order[b - count + 1]].level, passes[order[b - count]].level
    for k in range(b - count + 1, b + 1):
        marks[passes[order[k]].level] = 1
    for at in range(low, high + 1):
        row = passes[line[at]]
        for x in range(row.in_first, row.in_last):
            marks[at] |= marks[passes[links[x].other].level]
        if row.place > t.streams[row.stream].first:
            marks[at] |= marks[passes[order[row.place - 1]].level]
    holds = marks[high] == 0
    if holds:
        _part(t, low, high)
    marks[low : high + 1] = 0
    return bool(holds)


@inner_kernel
def _part(t: OrderTables, low: int, high: int) -> None:
    """Reorder places low … high of `sorted`: marked passes go behind the others; both keep their order."""
    line, later, at = t.sorted, 0, low
    for k in range(low, high + 1):
        i = line[k]
        if t.marks[k]:
            t.scratch[later] = i
            later += 1
        else:
            line[at] = i
            t.passes[i].level = at
            at += 1
    for k in range(later):
        line[at + k] = t.scratch[k]
        t.passes[t.scratch[k]].level = at + k


@inner_kernel
def _mark(t: OrderTables, i: int) -> int:
    """Mark a pass whose time may have changed. Returns 1 if that is new, 0 where it was marked or is outside the part."""
    row = t.passes[i]
    new = row.inside * (1 - t.marks[row.level])
    t.marks[row.level] |= new
    return int(new)


@subkernel
def _heads(t: OrderTables, low: int, count: int) -> None:
    """Compute anew the heads of the `count` passes marked in `sorted`, none before place `low`, and of passes that depend on
    them. Clears all marks."""
    passes, links, streams, order, marks = t.passes, t.links, t.streams, t.order, t.marks
    at = low - 1
    while count > 0:
        at += 1
        if marks[at] == 0:
            continue
        marks[at] = 0
        count -= 1
        row, head = passes[t.sorted[at]], 0
        for x in range(row.in_first, row.in_last):
            other = passes[links[x].other]
            head = max(head, other.head + other.duration + links[x].lag)
        if row.place > streams[row.stream].first:
            other = passes[order[row.place - 1]]
            head = max(head, other.head + other.duration)
        if head == row.head:
            continue
        row.head = head
        for x in range(row.out_first, row.out_last):
            count += _mark(t, links[x].other)
        if row.place + 1 < streams[row.stream].last:
            count += _mark(t, order[row.place + 1])


@subkernel
def _value(t: OrderTables) -> tuple[int, bool]:
    """The value, µs, and whether `origin` of some stream changed (for the span: its rank's first start)."""
    passes, streams, order = t.passes, t.streams, t.order
    value, moved = -(1 << 60), False
    for s in range(len(streams)):
        origin = 0
        if t.span:
            origin = 1 << 60
            for other in range(len(streams)):
                if streams[other].rank == streams[s].rank:
                    origin = min(origin, passes[order[streams[other].first]].head)
        moved = moved or origin != streams[s].origin
        streams[s].origin = origin
        last = passes[order[streams[s].last - 1]]
        value = max(value, last.head + last.duration - origin)
    return value, moved


@subkernel
def _tails(t: OrderTables, high: int, count: int) -> None:
    """Compute anew the tails of the `count` passes marked in `sorted`, none behind place `high`, and of passes on which they
    depend. Clears all marks."""
    passes, links, streams, order, marks = t.passes, t.links, t.streams, t.order, t.marks
    at = high + 1
    while count > 0:
        at -= 1
        if marks[at] == 0:
            continue
        marks[at] = 0
        count -= 1
        row = passes[t.sorted[at]]
        tail = -streams[row.stream].origin
        for x in range(row.out_first, row.out_last):
            other = passes[links[x].other]
            tail = max(tail, links[x].lag + other.duration + other.tail)
        if row.place + 1 < streams[row.stream].last:
            other = passes[order[row.place + 1]]
            tail = max(tail, other.duration + other.tail)
        if tail == row.tail:
            continue
        row.tail = tail
        for x in range(row.in_first, row.in_last):
            count += _mark(t, links[x].other)
        if row.place > streams[row.stream].first:
            count += _mark(t, order[row.place - 1])
