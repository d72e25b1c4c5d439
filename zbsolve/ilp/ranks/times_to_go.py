"""What is left of a step on one rank at least, once some of its passes have run: a table that searches over ranks read.

A rank runs its passes one after the other, so a partial order splits them in two: those placed, and the rest. Let P say how
many passes of each of its lanes are placed. h(P) is the least time from the start of the first one of the rest to the end
of the window, over all orders of the rest that keep the order of lanes, lags between passes of one microbatch, the
capacity, and the tails behind passes.

A partial order whose rank is free at t, and goes on at t or later, ends no earlier than t + h(P). So it is dropped where
that is behind the window. *Proof.* What completes it runs the rest on this rank at t or later. The order of the rest, alone
and without what was placed, keeps lanes, lags and tails. Memory holds what passes placed have left, which P says. So the
rest is among the orders that h(P) is the least of. ∎ Where no order of the rest fits the memory, nothing completes it.

**Search.** With time turned round, the rest of P is a partial order that begins at the window's end. All such partial orders
are looked at, pass by pass. No exchange of passes leaves any out: those that the search forwards does without, and those
that this one would, need not be the same. Of partial orders with the same passes one that is nowhere earlier is dropped.
Beyond a breadth of these they are merged, the earlier time counting everywhere. Both keep the least time, or lower it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import kernel
from .lanes import Lanes, no_windows
from .partial_orders import (
    States,
    arrivals_of,
    empty_order,
    most_arrivals_next,
    next_arrivals,
    next_starts,
    room_for,
    selected,
)
from .pruning import reduced
from .search_tables import NOTHING_KNOWN, Tables, ToGo, place_of_key, tables_of

BREADTH = 1  # partial orders with the same passes that are kept apart
# Of the partial orders of a search a table may take such a part, and each takes such a part of the time.
STATES_PART, TIME_PART = 2, 4
NO_LIMIT = 1 << 62  # keys are below, too
NO_TABLE = np.zeros((0, 2), np.int64)


class _Made(NamedTuple):
    """A table, the largest window, µs, that it holds for, and how many partial orders it was allowed."""

    table: Ints
    within: int
    allowed: int


class TimesToGo:
    """The tables made so far. Groups that have a rank in common have its table in common."""

    def __init__(self) -> None:
        self.made: dict[bytes, _Made] = {}

    def of(self, lanes: Lanes, window: int, within: int, states: int) -> tuple[ToGo, int]:
        """The tables of the ranks that these lanes' window is about, and how many partial orders were tried for them now.

        They hold for the window, µs; new ones are made for all windows of up to `within` µs, for a search that may try
        `states` partial orders. A rank that needs too many has an empty one, and so has one alone: a table takes as long as
        its search.
        """
        if len(lanes.capacity) == 1:
            return NOTHING_KNOWN, 0
        tables, tried = [], 0
        for rank, slack in enumerate(lanes.slack.tolist()):
            own = np.flatnonzero(lanes.rank == rank)
            table = NO_TABLE
            if slack == 0 and (lanes.head.shape[1] + 1) ** len(own) < NO_LIMIT:
                table, more = self._table(turned_round(lanes, rank, own), window, within, states // STATES_PART)
                tried += more
            tables.append(table)
        first = np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int64)
        return ToGo(first, np.concatenate(tables)), tried // TIME_PART

    def _table(self, turned: Lanes, window: int, within: int, states: int) -> tuple[Ints, int]:
        """The table of one rank's lanes, made where there is none; and how many partial orders that took."""
        key = b"".join(column.tobytes() for column in turned[:-1])
        made = self.made.get(key)
        if made is not None and window <= made.within and (len(made.table) or states <= made.allowed):
            return made.table, 0
        within = max(window, within)  # what is cut shorter than the window is no proof there
        keys, least, tried = _times(turned, NOTHING_KNOWN, within, BREADTH, states)
        self.made[key] = _Made(_hashed(keys, least), within, states)
        return self.made[key].table, int(tried)


def turned_round(lanes: Lanes, rank: int, own: Ints) -> Lanes:
    """The lanes `own` of a rank alone with time turned round, other lanes as lags; tails are heads, and heads tails."""
    far, back = lanes.lag.copy(), own[::-1]
    for k, duration in enumerate(lanes.duration.tolist()):
        into, out = far[:, k, None], far[k]
        np.maximum(far, np.where((into >= 0) & (out >= 0), into + duration + out, -1), out=far)
    head, tail = (np.ascontiguousarray(times[back, ::-1]) for times in (lanes.head, lanes.tail))
    return Lanes(
        np.zeros(len(own), np.int64),
        lanes.duration[back],
        lanes.freed[back],
        lanes.taken[back],
        lanes.capacity[rank : rank + 1].copy(),
        np.zeros(1, np.int64),
        np.maximum(tail, 0),
        head,
        np.ascontiguousarray(far[np.ix_(back, back)].T),
        np.zeros((0, 4), np.int64),
        np.zeros((1, 1, 3)),
        no_windows(tail.shape, 1),
    )


@kernel
def _times(lanes: Lanes, nothing: ToGo, window: int, breadth: int, most: int) -> tuple[Ints, Ints, int]:
    """Of lanes turned round: keys of positions, and the least time to go, µs, of each from which on what is before may fit
    the window; and how many partial orders were tried. No key where these were more than `most`. nothing: a `ToGo` without
    a rank."""
    count, m = lanes.head.shape
    tables = tables_of(lanes, lanes.tail, nothing)
    states = empty_order(count, 1, 0)
    keys, least, n, tried = np.empty(1024, np.int64), np.empty(1024, np.int64), 0, 0
    for placed in range(count * m + 1):
        for s in range(len(states.free)):
            key = 0
            for a in range(count):
                key = key * (m + 1) + m - states.position[s, count - 1 - a]
            if n > 0 and keys[n - 1] == key:  # those with the same positions are side by side, but where `_keys` agree
                least[n - 1] = min(least[n - 1], states.free[s, 0])
                continue
            if n == len(keys):
                keys, least = np.concatenate((keys, keys)), np.concatenate((least, least))
            keys[n], least[n] = key, states.free[s, 0]
            n += 1
        if placed == count * m or len(states.free) == 0:
            break
        new, more, looked = _with_one_more(tables, states, window)
        tried += looked
        if tried > most:
            return keys[:0], least[:0], tried
        keep, _, _ = reduced(new, more, tables.pairs, breadth, NO_LIMIT)
        states = selected(new, keep)
    return keys[:n], least[:n], tried


@kernel
def _with_one_more(tables: Tables, states: States, window: int) -> tuple[States, int, int]:
    """The partial orders of one rank with one pass more, how many there are, and how many were tried: the others leave too
    little of the window, µs, for all other passes."""
    lanes, pairs, passes, capacity = tables.lanes, tables.pairs, tables.passes, tables.ranks[0].capacity
    count, m = passes.shape
    n = tried = 0
    new = room_for(states, most_arrivals_next(states.position, lanes, pairs), len(states.free) * count)
    start = np.empty(count, np.int64)
    for s in range(len(states.free)):
        position, size = states.position[s], arrivals_of(states.position[s], pairs)
        used, left = 0, window
        for a in range(count):
            used += position[a] * (lanes[a].taken - lanes[a].freed)
            left -= (m - position[a]) * lanes[a].duration
        next_starts(tables, position, states.free[s], states.arrivals[s, :size], start)
        for a in range(count):
            if start[a] < 0 or used + lanes[a].taken > capacity:
                continue
            tried += 1
            if start[a] > left or start[a] + lanes[a].duration + passes[a, position[a]].tail > window:
                continue
            new.free[n, 0], new.last[n, 0], new.early[n] = start[a] + lanes[a].duration, a, True
            new.position[n] = position
            new.position[n, a] += 1
            later = new.arrivals[n, : arrivals_of(new.position[n], pairs)]
            next_arrivals(lanes, pairs, a, position, states.arrivals[s, :size], new.free[n], later)
            n += 1
    return new, n, tried


@kernel
def _hashed(keys: Ints, least: Ints) -> Ints:
    """Rows of (key, least time to go), at the places where `place_of_key` looks for them; a power of two of them, the empty
    ones with key −1. None where there is no key. Of a key that comes twice the least time counts."""
    size = 0 if len(keys) == 0 else 2
    while size < 2 * len(keys):
        size *= 2
    table = np.full((size, 2), -1, np.int64)
    for k in range(len(keys)):
        at = place_of_key(table, 0, size, keys[k])
        table[at, 1] = least[k] if table[at, 0] < 0 else min(table[at, 1], least[k])
        table[at, 0] = keys[k]
    return table
