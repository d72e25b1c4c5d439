"""Tables of records about the ranks that a search orders. They are made once for each search, and compiled code reads them.

A compiled function counts references to each array that it gets. So inner functions get one table of records in place of a
dozen arrays, which is faster.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...greedy.arrays.accounts import Records, record
from ...problem import Ints
from ...schedule.timeline import Floats
from ...util.kernels import kernel, subkernel
from .lanes import Lanes, Windows

LANE = record("rank duration taken freed unawaited twins wait_first wait_last into_first into_last")
RANK = record("capacity slack takers go_first go_size")
PASS = record("head tail behind end")
WAIT = record("before lag")
PAIR = record("before after lag queue")


class ToGo(NamedTuple):
    """Least times to go (see `times_to_go`): rows of (key of positions, µs). Rank r has the rows first[r]:first[r + 1], none
    if its times are unknown."""

    first: Ints
    rows: Ints


NOTHING_KNOWN = ToGo(np.zeros(1, np.int64), np.zeros((0, 2), np.int64))


@kernel
def place_of_key(rows: Ints, first: int, size: int, key: int) -> int:
    """The row of this key among `size` rows (a power of two) from `first` on; if it is absent, an empty row (key −1)."""
    at = (key * 0x1E3779B97F4A7C15 >> 20) & (size - 1)
    while rows[first + at, 0] != key and rows[first + at, 0] >= 0:
        at = (at + 1) & (size - 1)
    return first + at


class Tables(NamedTuple):
    """The lanes of some ranks, as `Lanes` has them. Times in µs, memory in bytes.

    lanes: records of rank, duration, taken, freed; unawaited, 1 where the lane takes nothing and no lane waits for it;
      twins, the first lane that is interchangeable with it (see `_twins`); wait_first:wait_last, its rows of `waits`;
      into_first:into_last, its places in `into`.
    ranks: records of capacity and slack; takers, how many lanes of the rank take memory; go_first and go_size, its rows of
      `to_go`.
    passes: shape (lanes, microbatches), records of head and tail; behind, see `order_search.Induction`; end, the least end
      of the pass in the state that `pruning` looks at.
    waits: records of (before, lag): pass j of a lane waits for pass j of lane `before`.
    pairs: records of (before, after, lag) for waits with a lag above 0 or between two ranks. Other waits need none: when the
      rank is free, the earlier pass has ended. queue: where the pair's arrivals begin in the state that `pruning` looks at.
    into: rows of `pairs`, by the lane that is `after`. held, end_energy: see `Lanes`; to_go: see `ToGo`.
    """

    lanes: NDArray[Any]
    ranks: NDArray[Any]
    passes: NDArray[Any]
    waits: NDArray[Any]
    pairs: NDArray[Any]
    into: Ints
    held: Ints
    end_energy: Floats
    to_go: Ints


class TableWindows(NamedTuple):
    """Further windows, as `Windows` has them: `Tables.ranks`, `.passes` and `.end_energy` of each, one row a window."""

    ranks: NDArray[Any]
    passes: NDArray[Any]
    end_energy: Floats


@subkernel
def in_window(tables: Tables, windows: TableWindows, k: int) -> Tables:
    """The tables as they are within further window k."""
    lanes, _, _, waits, pairs, into, held, _, to_go = tables
    return Tables(lanes, windows.ranks[k], windows.passes[k], waits, pairs, into, held, windows.end_energy[k], to_go)


@subkernel
def windows_of(tables: Tables, windows: Windows) -> TableWindows:
    """The `TableWindows` of `Windows`."""
    count, lanes, m = windows.head.shape
    ranks, passes = np.empty((count, len(tables.ranks)), RANK), np.empty((count, lanes, m), PASS)
    for k in range(count):
        for r in range(len(tables.ranks)):
            row = tables.ranks[r]
            ranks[k, r].capacity, ranks[k, r].slack, ranks[k, r].takers = row.capacity, windows.slack[k, r], row.takers
            ranks[k, r].go_first = ranks[k, r].go_size = 0  # times to go are those of the first window
        for a in range(lanes):
            for j in range(m):
                passes[k, a, j].head, passes[k, a, j].tail = windows.head[k, a, j], windows.tail[k, a, j]
    return TableWindows(ranks, passes, windows.end_energy)


@subkernel
def tables_of(lanes: Lanes, behind: Ints, to_go: ToGo) -> Tables:
    """The `Tables` of `Lanes`. behind: µs, shape (lanes, microbatches)."""
    count, m = lanes.head.shape
    table, ranks, passes = np.empty(count, LANE), np.empty(len(lanes.capacity), RANK), np.empty((count, m), PASS)
    for r in range(len(ranks)):
        ranks[r].capacity, ranks[r].slack, ranks[r].takers = lanes.capacity[r], lanes.slack[r], 0
        ranks[r].go_first = ranks[r].go_size = 0
        if len(to_go.first) > 1:
            ranks[r].go_first, ranks[r].go_size = to_go.first[r], to_go.first[r + 1] - to_go.first[r]
    for a in range(count):
        lane = table[a]
        lane.rank, lane.duration, lane.taken, lane.freed = lanes.rank[a], lanes.duration[a], lanes.taken[a], lanes.freed[a]
        lane.unawaited = 1 if lane.taken == 0 else 0
        ranks[lane.rank].takers += lane.taken > 0
        for j in range(m):
            passes[a, j].head, passes[a, j].tail, passes[a, j].behind = lanes.head[a, j], lanes.tail[a, j], behind[a, j]
    waits, pairs, into = _waits(table, lanes.lag)
    _twins(table, lanes.tail, lanes.windows.tail)
    return Tables(table, ranks, passes, waits, pairs, into, lanes.held, lanes.end_energy, to_go.rows)


@subkernel
def _waits(table: Records, lag: Ints) -> tuple[Records, Records, Ints]:
    """The waits, pairs and `into` of lags, µs, shape (lanes, lanes), −1: none. Lanes of `table` get their rows of these."""
    count = len(lag)
    waits, pairs = np.empty(lag.size, WAIT), np.empty(lag.size, PAIR)
    n = 0
    for a in range(count):
        for b in range(count):
            if lag[a, b] > 0 or (lag[a, b] == 0 and table[a].rank != table[b].rank):
                pairs[n].before, pairs[n].after, pairs[n].lag = a, b, lag[a, b]
                n += 1
    into = np.empty(n, np.int64)
    w = k = 0
    for a in range(count):
        table[a].wait_first, table[a].into_first = w, k
        for b in range(count):
            if lag[b, a] >= 0:
                waits[w].before, waits[w].lag = b, lag[b, a]
                table[b].unawaited = 0
                w += 1
        for p in range(n):
            if pairs[p].after == a:
                into[k] = p
                k += 1
        table[a].wait_last, table[a].into_last = w, k
    return waits[:w], pairs[:n], into


@subkernel
def _twins(table: Records, tail: Ints, further: Ints) -> None:
    """Fill in `twins`: for each lane the first one that is interchangeable with it, or itself. Both are unawaited, on one
    rank, of equal duration, and free equal bytes. Their tails, µs, shape (lanes, microbatches), must not rise from pass to
    pass, nor those of further windows, shape (windows, lanes, microbatches); tails of passes that run in sequence do not."""
    for a in range(len(table)):
        lane = table[a]
        lane.twins = a
        falls = _falls(tail, further, a)
        for b in range(a if falls and lane.unawaited == 1 else 0):
            other = table[b]
            like = other.unawaited == 1 and other.rank == lane.rank and other.duration == lane.duration
            if like and other.freed == lane.freed and other.twins == b and _falls(tail, further, b):
                lane.twins = b
                break


@subkernel
def _falls(tail: Ints, further: Ints, a: int) -> bool:
    """Whether the tails of lane a never rise, in any window."""
    falls = bool((tail[a, 1:] <= tail[a, :-1]).all())
    for k in range(len(further)):
        falls = falls and bool((further[k, a, 1:] <= further[k, a, :-1]).all())
    return falls
