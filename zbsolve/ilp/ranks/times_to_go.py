"""Times to go: the least time that a rank still needs once some of its passes have run, in tables for searches over ranks.

A rank runs its passes one after the other, so a partial order divides them into those that are placed and the rest. Let P
be the positions: how many passes of each lane of the rank are placed. The time to go h(P) is the least time from the start
of the first pass of the rest to the end of the window. It is the least over all orders of the rest that keep the order of
lanes, the lags between passes of one microbatch, the capacity, and the tails of passes.

A search drops a partial order if t + h(P) is behind the end of the window, where the rank goes on at t or later. *Proof.*
Whatever completes the partial order runs the rest on this rank at t or later. The order of the rest, taken alone, keeps
lanes, lags and tails. When it begins, memory holds what the placed passes have left there, which P determines. So it is
one of the orders that h(P) is the least of. ∎ If no order of the rest fits the memory, nothing completes P.

**Search.** With time reversed, the rest of P is a partial order that begins at the end of the window. The search builds all
of these, one pass at a time. It has no rules that exchange passes (see `order_search`), since the orders that such rules
drop forwards and backwards in time need not be the same. Of two partial orders with the same passes, one that is nowhere
earlier is dropped. If more than `BREADTH` are left, the others are merged into these, with the earlier time everywhere.
Both steps keep the least time or lower it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import kernel, subkernel
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
# A table may try this part of a search's partial orders, and one of them takes this part of the time of one of the search.
STATES_PART, TIME_PART = 2, 4
NO_LIMIT = 1 << 62  # keys are below, too
NO_TABLE = np.zeros((0, 2), np.int64)


class _Made(NamedTuple):
    """A table; within: the largest window that it holds for, µs; allowed: the partial orders that its search could try."""

    table: Ints
    within: int
    allowed: int


class TimesToGo:
    """The tables made so far. Groups of ranks share the table of a rank that they have in common."""

    def __init__(self) -> None:
        self.made: dict[bytes, _Made] = {}

    def of(self, lanes: Lanes, window: int, within: int, states: int) -> tuple[ToGo, int]:
        """The tables of the ranks whose window these lanes are about, and the cost of new ones in partial orders.

        window: the tables must hold for it, µs. within: new ones are made for all windows up to this, µs. states: partial
        orders that the search may try. The table of a rank is empty where it would need too many of them. A rank that is
        searched alone has none, since a table takes as long as that search.
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
        """The table of one rank's lanes, made if it is not known, and how many partial orders that took."""
        key = b"".join(column.tobytes() for column in turned[:-1])
        made = self.made.get(key)
        if made is not None and window <= made.within and (len(made.table) or states <= made.allowed):
            return made.table, 0
        within = max(window, within)  # a table made for a shorter window proves nothing here
        keys, least, tried = _times(turned, NOTHING_KNOWN, within, BREADTH, states)
        self.made[key] = _Made(_hashed(keys, least), within, states)
        return self.made[key].table, int(tried)


def turned_round(lanes: Lanes, rank: int, own: Ints) -> Lanes:
    """The lanes `own` of one rank with time reversed; other lanes become lags. Heads become tails, and tails heads."""
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
    """The table of lanes with time reversed: keys of positions, the least time to go of each, µs; and how many partial
    orders were tried. Positions are left out where the passes before them cannot fit the window. There is no key if more
    than `most` were tried. nothing: a `ToGo` without a rank."""
    count, m = lanes.head.shape
    tables = tables_of(lanes, lanes.tail, nothing)
    states = empty_order(count, 1, 0)
    keys, least, n, tried = np.empty(1024, np.int64), np.empty(1024, np.int64), 0, 0
    for placed in range(count * m + 1):
        for s in range(len(states.free)):
            key = 0
            for a in range(count):
                key = key * (m + 1) + m - states.position[s, count - 1 - a]
            if n > 0 and keys[n - 1] == key:  # equal positions are adjacent, unless hashes collide
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


@subkernel
def _with_one_more(tables: Tables, states: States, window: int) -> tuple[States, int, int]:
    """The partial orders of one rank with one more pass, how many they are, and how many were tried. Those that leave too
    little of the window, µs, for all other passes are tried, but not returned."""
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
    """A hash table: rows of (key, least time to go), where `place_of_key` looks for them. Their number is a power of two,
    or 0 if there are no keys. Empty rows have the key −1. If a key comes twice, its least time counts."""
    size = 0 if len(keys) == 0 else 2
    while size < 2 * len(keys):
        size *= 2
    table = np.full((size, 2), -1, np.int64)
    for k in range(len(keys)):
        at = place_of_key(table, 0, size, keys[k])
        table[at, 1] = least[k] if table[at, 0] < 0 else min(table[at, 1], least[k])
        table[at, 0] = keys[k]
    return table
