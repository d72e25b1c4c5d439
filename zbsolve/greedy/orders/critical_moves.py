"""Moves of one pass along its stream: which are possible, and an estimate of the step after them. Compiled.

A move puts the pass at place a right behind the one at place b > a (forward), or the pass at b right before the one at a. It
must keep the order of lanes and the memory limit, and close no cycle (Balas and Vazacopoulos, 1998, propositions 2.2 and
2.3). The estimate computes new times for the moved passes only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...problem import UNLIMITED, Ints, Problem
from ...schedule import Schedule
from ...util.kernels import inner_kernel, kernel
from ..arrays.accounts import Row, compressed_rows, record
from ..arrays.problem_arrays import arrays_of
from ..syncs import pools_with_syncs

# --- The tables that a search over orders works on ---


# A pass: numbers of its stream and lane; taken and freed, bytes; in_first:in_last and out_first:out_last, its rows of
#   `links`; place, its index in `order`; level, its index in `sorted`; head, its earliest start, µs; tail, the longest path
#   from its end to the end of the step, µs (for the span: of its rank's window); inside, whether it may move and its times
#   change; waiting, scratch.
PASS = record("duration stream lane taken freed in_first in_last out_first out_last place level head tail inside waiting")
LINK = record("other lag")
# A stream: its rank; first:last, its places in `order`; capacity, bytes; origin, µs: 0, or for the span its rank's first
# start.
STREAM = record("rank first last capacity origin")


class OrderTables(NamedTuple):
    """An order of all passes and its times.

    passes, links, streams: records. order: passes in order, stream after stream. held: bytes held by the stream before the
    pass at each place starts. sorted: passes in topological order. span: whether the objective is the span. marks (of places
    in `sorted`) and scratch, shape (passes,): for updates of times. part, shape (1 + passes,): how many passes may move and
    change their times, and these; 0: all.
    """

    passes: NDArray[Any]
    links: NDArray[Any]
    streams: NDArray[Any]
    order: Ints
    held: Ints
    sorted: Ints
    span: bool
    marks: NDArray[np.uint8]
    scratch: Ints
    part: Ints


def decided_by_orders(problem: Problem) -> bool:
    """Whether the order of each stream alone decides its memory, and streams share nothing else: as `on_streams`, with no
    further pools and no syncs for memory."""
    return on_streams(problem) and not problem.pools and not pools_with_syncs(problem)


def on_streams(problem: Problem) -> bool:
    """Whether each pass is on one stream, each stream on one rank, and each collective one pass."""
    p = problem.passes
    single = all(len(streams) == 1 for streams in p.stream_sets)
    own = len(np.unique(p.streams * problem.ranks + p.rank)) == len(np.unique(p.streams))
    alone = bool((np.bincount(problem.collective[problem.collective >= 0]) <= 1).all())
    return single and own and alone


def tables_of(schedule: Schedule) -> OrderTables:
    """The tables of a schedule's order, without times."""
    problem = schedule.problem
    a, n = arrays_of(problem), len(problem.passes)
    before = np.repeat(np.arange(n), np.diff(a.out_first))
    in_first, in_pass, in_lag = compressed_rows(a.out_pass, n, before, a.out_lag)
    links = np.empty(2 * len(before), LINK)
    links["other"], links["lag"] = np.concatenate([in_pass, a.out_pass]), np.concatenate([in_lag, a.out_lag])
    sequences = [rows for rows in schedule.sequences.values() if len(rows)]
    passes, streams = np.zeros(n, PASS), np.zeros(len(sequences), STREAM)
    for name, column in (("duration", a.duration), ("lane", a.lane), ("taken", a.taken), ("freed", a.freed)):
        passes[name] = column
    passes["in_first"], passes["in_last"] = in_first[:-1], in_first[1:]
    passes["out_first"], passes["out_last"] = len(before) + a.out_first[:-1], len(before) + a.out_first[1:]
    order = np.concatenate(sequences).astype(np.int64)
    passes["place"][order], passes["inside"] = np.arange(n), 1
    passes["stream"][order] = np.repeat(np.arange(len(sequences)), [len(rows) for rows in sequences])
    ends = np.cumsum([len(rows) for rows in sequences])
    streams["first"], streams["last"] = ends - [len(rows) for rows in sequences], ends
    streams["rank"] = [a.rank[rows[0]] for rows in sequences]
    streams["capacity"] = a.capacity[streams["rank"]] if problem.capacity is not None else UNLIMITED
    held, line, span = np.zeros(n, np.int64), np.arange(n), problem.objective == "span"
    scratch = np.zeros(n, np.uint8), np.empty(n, np.int64), np.zeros(n + 1, np.int64)
    return OrderTables(passes, links, streams, order, held, line, span, *scratch)


def schedule_of(problem: Problem, tables: OrderTables, order: Ints) -> Schedule:
    """The schedule of an order. order: as `OrderTables.order`."""
    parts = [order[stream["first"] : stream["last"]] for stream in tables.streams]
    return Schedule.of(problem, {problem.passes.stream_sets[problem.passes.streams[rows[0]]][0]: rows for rows in parts})


# --- Moves ---


NO_TIME = -1 << 60


@kernel
def possible(t: OrderTables, a: int, b: int, forward: bool) -> bool:
    """Whether a move is possible. (With passes of duration 0 it may still close a cycle, which `order_times` finds.)"""
    return _behind(t, a, b) if forward else _before(t, a, b)


@inner_kernel
def _behind(t: OrderTables, a: int, b: int) -> bool:
    """Whether the pass at a may go behind that at b: the memory fits, and no path leads from what waits for it to b."""
    passes, links, order = t.passes, t.links, t.order
    moved, last = passes[order[a]], passes[order[b]]
    used = _held_after(t, moved, a + 1, b + 1, t.held[a])
    if used < 0 or used + moved.taken > t.streams[moved.stream].capacity:
        return False
    for x in range(moved.out_first, moved.out_last):
        after = passes[links[x].other]
        if links[x].other == order[b] or last.duration + last.tail < after.duration + after.tail:
            return False
    return True


@inner_kernel
def _before(t: OrderTables, a: int, b: int) -> bool:
    """Whether the pass at b may go before that at a: the memory fits, and no path leads from a to what it waits for."""
    passes, links, order = t.passes, t.links, t.order
    moved, first = passes[order[b]], passes[order[a]]
    used = t.held[a] + moved.taken
    if used > t.streams[moved.stream].capacity or _held_after(t, moved, a, b, used - moved.freed) < 0:
        return False
    for x in range(moved.in_first, moved.in_last):
        before = passes[links[x].other]
        if links[x].other == order[a] or first.head + first.duration < before.head + before.duration:
            return False
    return True


@inner_kernel
def _held_after(t: OrderTables, row: Row, first: int, last: int, used: int) -> int:
    """Bytes held after passes first:last of `order`, with `used` before them; −1 if they do not fit, or one of them is of
    the lane of `row`, the pass that moves."""
    room = t.streams[row.stream].capacity
    for k in range(first, last):
        other = t.passes[t.order[k]]
        if other.lane == row.lane or used + other.taken > room:
            return -1
        used += other.taken - other.freed
    return used


@kernel
def estimate(t: OrderTables, a: int, b: int, forward: bool, limit: int, ends: Ints) -> int:
    """The estimated longest path through the moved passes, µs. It stops early once it is above the limit. ends: scratch,
    shape (places,)."""
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
    """When pass i ends if its stream is free from time `free` on, µs."""
    row, start = t.passes[i], max(0, free)
    for x in range(row.in_first, row.in_last):
        before = t.passes[t.links[x].other]
        start = max(start, before.head + before.duration + t.links[x].lag)
    return int(start + row.duration)


@inner_kernel
def _tail(t: OrderTables, i: int, behind: int) -> int:
    """The tail of pass i, µs. behind: the tail by the next pass on its stream."""
    row = t.passes[i]
    tail = max(behind, -t.streams[row.stream].origin)
    for x in range(row.out_first, row.out_last):
        after = t.passes[t.links[x].other]
        tail = max(tail, t.links[x].lag + after.duration + after.tail)
    return int(tail)


@kernel
def move(t: OrderTables, a: int, b: int, forward: bool) -> None:
    """Make the move in `order`. The same move in the other direction undoes it."""
    first, last, step = (a, b, 1) if forward else (b, a, -1)
    moved = t.order[first]
    for k in range(first, last, step):
        t.order[k] = t.order[k + step]
        t.passes[t.order[k]].place = k
    t.order[last], t.passes[moved].place = moved, last
