"""Idle time between passes: while a rank's memory is full of what one pass's descendants free, nothing else runs there.

Take a pass x of a rank, and the bytes that x and what comes before it have taken, and that what comes behind x frees.
Suppose another pass of the rank, neither before x nor behind, has part in holding bytes that do not fit beside those: it
takes them, frees them, or comes between. Then it does not run from x's end until something behind x has run on the rank,
which a longest path keeps away for a while. Of one microbatch in slices, whose last backward comes first, all slices are
there then: where a rank has memory for one microbatch, it waits in each until the last slice has gone to the last rank and
come back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import UNLIMITED, Problem
from ...tables import Bools, Ints

MAX_PASSES = 5_000  # of a problem: beyond, paths take too long
MAX_ON_RANK = 800
MAX_WAITS = 16  # of a rank that are looked for, where memory is fullest


class Wait(NamedTuple):
    """Behind pass `x` (of the rank, by its place there) the rank waits `time` µs at least, but for what `free` says: which
    of its passes may run meanwhile. `apart`: which cannot, and are neither before x nor behind."""

    x: int
    time: int
    free: Bools
    apart: Bools


class Reach:
    """Which passes come behind which, whatever the order."""

    def __init__(self, problem: Problem) -> None:
        count, edges = len(problem.passes), problem.edges
        self.duration, self.outputs = problem.passes.duration.tolist(), [list[tuple[int, int]]() for _ in range(count)]
        inputs = np.zeros(count, np.int64)
        for a, b, lag in zip(edges.before.tolist(), edges.after.tolist(), edges.lag.tolist(), strict=True):
            self.outputs[a].append((b, lag))
            inputs[b] += 1
        self.order = np.flatnonzero(inputs == 0).tolist()
        for row in self.order:
            for b, _ in self.outputs[row]:
                inputs[b] -= 1
                if inputs[b] == 0:
                    self.order.append(b)
        self.behind = [0] * count  # bit b of behind[a]: b comes behind a
        for row in reversed(self.order):
            for b, _ in self.outputs[row]:
                self.behind[row] |= self.behind[b] | 1 << b

    def table(self, rows: Ints) -> Bools:
        """Whether rows[j] comes behind rows[i], shape (n, n)."""
        size = (len(self.duration) + 7) // 8
        data = np.frombuffer(b"".join(self.behind[i].to_bytes(size, "little") for i in rows.tolist()), np.uint8)
        return np.unpackbits(data.reshape(len(rows), size), axis=1, bitorder="little")[:, rows].astype(bool)

    def soonest(self, row: int, others: set[int]) -> int:
        """µs from the end of a pass to the start of whichever of others, all behind it, can be first."""
        after = dict[int, int]()
        ready = {row: 0}
        for one in self.order:
            if one not in ready:
                continue
            end = ready[one] + (self.duration[one] if one != row else 0)
            for b, lag in self.outputs[one]:
                ready[b] = max(ready.get(b, 0), end + lag)
            if one in others:
                after[one] = ready[one]
        return min(after.values())


def waits_of(problem: Problem, reach: Reach, rows: Ints, room: int) -> list[Wait]:
    """Waits of a rank whose passes are `rows`, no two of which are at a time. room: bytes that it has."""
    behind, at = reach.table(rows), {row: i for i, row in enumerate(rows.tolist())}
    edges = problem.edges
    kept = np.flatnonzero((edges.pool == 0) & (edges.bytes > 0) & np.isin(edges.before, rows) & np.isin(edges.after, rows))
    takes, frees = (np.array([at[one] for one in column[kept].tolist()], int) for column in (edges.before, edges.after))
    size, here = edges.bytes[kept], np.eye(len(rows), dtype=bool)
    until = behind | here  # [i, j]: j is i or comes behind it
    held = until[takes].T & behind[:, frees]  # [x, edge]: it holds its bytes from x's start until something behind x ended
    full = room - held @ size
    inside = until[takes] & until[:, frees].T  # [edge, q]: q takes, frees, or comes between
    found = []
    for x in np.flatnonzero((held & (takes == np.arange(len(rows))[:, None])).any(axis=1)).tolist():
        other = ~(until[x] | behind[:, x])
        apart = other & inside[(size > full[x]) & ~held[x]].any(axis=0)
        if apart.any():
            found.append((x, other & ~apart, apart))
    found = sorted(found, key=lambda one: int(full[one[0]]))[:MAX_WAITS]
    waits = [Wait(x, reach.soonest(int(rows[x]), set(rows[behind[x]].tolist())), free, apart) for x, free, apart in found]
    return _disjoint([one for one in waits if one.time > 0], until)


def _disjoint(waits: list[Wait], until: Bools) -> list[Wait]:
    """Of these the longest that cannot be at the same time: neither pass may run while the other's wait lasts."""
    kept: list[Wait] = []
    for one in sorted(waits, key=lambda wait: -wait.time):
        if all(other.apart[one.x] and one.apart[other.x] for other in kept):
            kept.append(one)
    return kept


def idle_between(problem: Problem, reach: Reach, rows: Ints, room: int) -> int:
    """µs that a rank is idle between its first pass and its last at least, as its memory has room for `room` bytes."""
    waits = waits_of(problem, reach, rows, room)
    if not waits:
        return 0
    free = np.any([one.free for one in waits], axis=0)
    return max(0, sum(one.time for one in waits) - int(problem.passes.duration[rows][free].sum()))


def reach_of(problem: Problem) -> Reach | None:
    """None where waits are not looked for: in large problems, with side streams or further pools, without limits."""
    if problem.capacity is None or problem.pools or len(problem.side_stream) or len(problem.passes) > MAX_PASSES:
        return None
    on_rank = np.bincount(problem.passes.rank, minlength=problem.ranks)
    return None if on_rank.max() > MAX_ON_RANK or min(problem.capacity) >= UNLIMITED else Reach(problem)
