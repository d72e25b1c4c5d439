"""Partial orders of the passes of some ranks, as arrays, and how one more pass changes them. Compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...greedy.arrays.accounts import Records
from ...problem.tables import Bools, Ints
from ...util.kernels import subkernel
from .search_tables import Tables

Positions = NDArray[np.int16]  # how many passes of a lane are placed
Times = NDArray[np.int32]  # µs


class States(NamedTuple):
    """Partial orders, one a row. Times in µs, on the clock of the first window, then on that of each further one.

    position: int16, shape (n, lanes): how many passes of each lane are placed.
    free: int32, shape (n, windows × ranks): when each rank is free.
    last: int8, shape (n, ranks): the lane that ran last on each rank; −1 where that is unknown, or none ran.
    arrivals: int32, shape (n, longest): when passes whose forerunner has run may start. Each record of `Tables.pairs` has a
      queue of these. The queues of one window follow one another, then those of the next window. Entries behind the last
      queue have no meaning.
    early: bool, shape (n,): whether all passes placed end as early as an induction needs it (see `order_search.Induction`).
    """

    position: Positions
    free: Times
    last: NDArray[np.int8]
    arrivals: Times
    early: Bools


@subkernel
def empty_order(lanes: int, ranks: int, windows: int) -> States:
    """The state in which no pass is placed. windows: how many further windows there are."""
    position, free = np.zeros((1, lanes), np.int16), np.zeros((1, ranks * (1 + windows)), np.int32)
    return States(position, free, np.full((1, ranks), -1, np.int8), np.zeros((1, 0), np.int32), np.ones(1, np.bool_))


@subkernel
def windows_in(states: States) -> int:
    """How many windows the states have times for."""
    return int(states.free.shape[1] // states.last.shape[1])


@subkernel
def selected(states: States, rows: Ints) -> States:
    """The states of these rows."""
    return States(states.position[rows], states.free[rows], states.last[rows], states.arrivals[rows], states.early[rows])


@subkernel
def room_for(states: States, longest: int, count: int) -> States:
    """Uninitialised states: `count` of them, with arrivals of length `longest` a window."""
    return States(
        np.empty((count, states.position.shape[1]), np.int16),
        np.empty((count, states.free.shape[1]), np.int32),
        np.empty((count, states.last.shape[1]), np.int8),
        np.empty((count, windows_in(states) * longest), np.int32),
        np.empty(count, np.bool_),
    )


@subkernel
def arrivals_of(position: Positions, pairs: Records) -> int:
    """How many arrivals a state with these positions, shape (lanes,), has in each window."""
    size = 0
    for k in range(len(pairs)):
        size += max(0, position[pairs[k].before] - position[pairs[k].after])
    return size


@subkernel
def most_arrivals_next(position: Positions, lanes: Records, pairs: Records) -> int:
    """The most arrivals that a state may have in a window once one more pass is placed. position: shape (n, lanes)."""
    longest = 0
    for s in range(len(position)):
        longest = max(longest, arrivals_of(position[s], pairs))
    outs = np.zeros(len(lanes), np.int64)
    for k in range(len(pairs)):
        outs[pairs[k].before] += 1
    return int(longest + outs.max())


@subkernel
def next_starts(tables: Tables, position: Positions, free: Times, arrivals: Times, start: Ints) -> None:
    """Fill `start`, µs, shape (lanes,), for one state: when each lane's next pass could start, if memory had room; −1 where
    a forerunner is not placed, or no pass of the lane is left."""
    lanes, passes, waits, pairs = tables.lanes, tables.passes, tables.waits, tables.pairs
    m = passes.shape[1]
    for a in range(len(lanes)):
        j = position[a]
        start[a] = -1 if j == m else max(np.int64(free[lanes[a].rank]), passes[a, j].head)
        for x in range(lanes[a].wait_first, lanes[a].wait_last):
            if position[waits[x].before] <= j:
                start[a] = -1
    at = 0
    for k in range(len(pairs)):
        b, a = pairs[k].before, pairs[k].after
        waiting = max(0, position[b] - position[a])
        if waiting > 0 and start[a] >= 0:
            start[a] = max(start[a], np.int64(arrivals[at]))
        at += waiting


@subkernel
def ranks_to_extend(tables: Tables, position: Positions, free: Times, turn: Bools) -> None:
    """Fill `turn`, bool, shape (ranks,), for one state: whether the search places a next pass on the rank.

    It does on the rank that is free first. It does on another rank only if each rank that is free earlier has no pass left,
    or has a lane whose next pass waits for passes of other ranks that are not placed, and for none of its own rank.
    """
    lanes, waits, m = tables.lanes, tables.waits, tables.passes.shape[1]
    turn[:] = True  # for now: whether ranks that are free later need not wait for this one
    for a in range(len(lanes)):
        if position[a] < m:
            turn[lanes[a].rank] = False
    for a in range(len(lanes)):
        on_own, on_other = position[a] == m, False
        for x in range(lanes[a].wait_first, lanes[a].wait_last):
            b = waits[x].before
            if position[b] <= position[a]:
                on_own = on_own or lanes[b].rank == lanes[a].rank
                on_other = on_other or lanes[b].rank != lanes[a].rank
        if on_other and not on_own:
            turn[lanes[a].rank] = True
    first = -1
    for q in range(len(free)):
        if not turn[q] and (first < 0 or free[q] < free[first]):
            first = q
    for r in range(len(free)):
        turn[r] = first < 0 or free[r] < free[first] or (free[r] == free[first] and r <= first)


@subkernel
def could_start(passes: Records, pairs: Records, a: int, then: int, position: Positions, arrivals: Times) -> bool:
    """Whether the next pass of lane a could have started at `then`, µs, in one state."""
    if passes[a, position[a]].head > then:
        return False
    at = 0
    for k in range(len(pairs)):
        waiting = max(0, position[pairs[k].before] - position[pairs[k].after])
        if pairs[k].after == a and waiting > 0 and arrivals[at] > then:
            return False
        at += waiting
    return True


@subkernel
def next_arrivals(
    lanes: Records, pairs: Records, lane: int, position: Positions, arrivals: Times, free: Times, new_arrivals: Times
) -> None:
    """Fill `new_arrivals` for a state after `lane`'s next pass. position, arrivals: before that; free: when ranks are free
    after it. An arrival counts as no earlier than its pass could start anyway, after all passes of its lane ahead of it."""
    end = free[lanes[lane].rank]
    at, n = 0, 0
    for k in range(len(pairs)):
        a, b = pairs[k].before, pairs[k].after
        waiting = max(0, position[a] - position[b])
        first = 1 if b == lane else 0
        idle, each = free[lanes[b].rank], lanes[b].duration
        for q in range(waiting - first + (1 if a == lane else 0)):
            arrival = arrivals[at + first + q] if first + q < waiting else end + pairs[k].lag
            new_arrivals[n] = max(arrival, idle + q * each)
            n += 1
        at += waiting
