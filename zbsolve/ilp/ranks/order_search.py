"""The compiled search for an order of the passes of some ranks within a window: partial orders, one pass more a level.

Of two partial orders that have placed the same passes, one that is nowhere earlier is dropped (dominance). Of those that
remain at most a breadth is kept; further ones are merged into the most similar of those, the earlier time counting
everywhere, which only relaxes (a relaxed decision diagram; Andersen et al., 2007).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import kernel
from .dominance import not_dominated, reduced
from .partial_orders import (
    could_start,
    empty_order,
    most_arrivals_next,
    next_arrivals,
    next_starts,
    ranks_to_extend,
    room_for,
    selected,
)
from .pruning import hopeless
from .search_tables import tables_of

REFUTED, FITS, MERGED, TOO_MANY = 0, 1, -1, -2  # what a search says of a window; see `refutation.Answer`
COMPARED_PER_STATE = 64  # pairs of states compared take as long as trying one state


class Limits(NamedTuple):
    """How much a search may take: states kept with the same positions; states tried in all; whether (steady) they may come
    at most twice as fast at any level as that allows in the mean."""

    breadth: int
    states: int
    steady: bool


class Induction(NamedTuple):
    """For a search that is a step of an induction over microbatches (see `induction`): it also drops states that are nowhere
    earlier than one with `shift` passes of every lane less was, plus `later` µs. Only such states count for that whose
    passes end `behind` µs (shape (lanes, microbatches)) or more before the window does. shift 0: no induction."""

    behind: Ints
    shift: int
    later: int


@kernel
def search_orders(lanes, window, limits, induction, incumbent, wanted):  # type: ignore[no-untyped-def]
    """Whether an order of the passes of `lanes` fits the window, µs.

    Returns: `FITS` where one does, `REFUTED` where none does; `MERGED` where one fits but states were merged (or, in an
    induction, as soon as they are), `TOO_MANY` where the limits were reached; how many states were tried
    (`COMPARED_PER_STATE` comparisons count as one); the most passes of a lane that any of them had placed.
    `FITS` too as soon as the incumbent's value (one number, which another thread may lower meanwhile) is below the one
    that is `wanted` as a bound.
    """
    count, m = lanes.head.shape
    shift, states_allowed = induction.shift, limits.states
    tables = tables_of(lanes, induction.behind)
    states = empty_order(count, len(lanes.capacity))
    tried, front, exact = 0, np.int64(0), True
    older = [states]
    for placed in range(count * m):
        if incumbent[0] < wanted:
            return FITS, tried, front
        allowed = states_allowed
        if limits.steady:
            allowed = min(states_allowed, 2 * states_allowed * (placed + 1) // (count * m))
        n, more, new = _next_level(tables, states, window, allowed - tried, shift == 0)
        tried += more
        for s in range(len(states.position)):  # what was tried has one more
            front = max(front, np.int64(states.position[s].max()) + 1)
        if n <= 0:
            return n, tried, front
        left = COMPARED_PER_STATE * (allowed - tried)
        keep, whole, compared = reduced(new, n, tables.pairs, limits.breadth, left)
        tried += compared // COMPARED_PER_STATE
        if compared > left:
            return TOO_MANY, tried, front
        exact = exact and whole
        if shift > 0:
            if not exact:
                return MERGED, tried, front
            if placed + 1 >= shift * count:
                keep, compared = not_dominated(
                    new, keep, older[placed + 1 - shift * count], tables.pairs, shift, induction.later
                )
                tried += compared // COMPARED_PER_STATE
        states = selected(new, keep)
        if shift > 0:
            older.append(states)
    return (FITS if exact else MERGED), tried, front


@kernel
def _next_level(tables, states, window, most, swaps):  # type: ignore[no-untyped-def]
    """The states with one pass more: how many there are (`TOO_MANY`: more than `most` were tried), how many were tried, and
    they.

    The rank that is free first goes on; another one only where a pass of the first waits for a pass that is not placed, so
    every schedule can be built. Orders are left out where one as good remains:
    * An order with idle time in which a pass fits that could start then: a pass that takes no memory, or one of its
      rank's only lane that takes any, can be moved there, for all passes between take none.
    * An order with a pass behind one that nobody waits for and that takes time, where the two could have changed places
      with the memory of then. (They cannot where idle time is between them, whether that is counted as taken or not; see
      `pruning`.) Only with `swaps`: tails that are too short would let too much be left out.
    * An order with a pass of a lane while a twin's next pass could start then, and has as long a tail or a longer one (of
      equals the first lane's): see `_after_twin`. Only with `swaps`.
    """
    lanes, ranks, passes, pairs = tables.lanes, tables.ranks, tables.passes, tables.pairs
    position, free, last, arrivals, early = states
    count = len(lanes)
    new = room_for(states, most_arrivals_next(position, lanes, pairs), len(free) * count)
    new_position, new_free, new_last, new_arrivals, new_early = new
    start, used, turn = np.empty(count, np.int64), np.empty(len(ranks), np.int64), np.empty(len(ranks), np.bool_)
    n = tried = 0
    for s in range(len(free)):
        used[:] = 0
        for a in range(count):
            used[lanes[a].rank] += position[s, a] * (lanes[a].taken - lanes[a].freed)
        next_starts(tables, position[s], free[s], arrivals[s], start)
        ranks_to_extend(tables, position[s], free[s], turn)
        for a in range(count):
            one = lanes[a]
            r, end = one.rank, start[a] + one.duration
            room = ranks[r].capacity - used[r]
            if start[a] < 0 or not turn[r] or one.taken > room:
                continue
            if end + passes[a, position[s, a]].tail > window:
                continue
            skip = False
            for b in range(count):
                other = lanes[b]
                fits = start[b] >= 0 and start[b] < start[a] and start[b] + other.duration <= start[a] and other.rank == r
                skip = skip or (fits and other.taken <= room and (other.taken == 0 or ranks[r].takers == 1))
            if swaps and not skip:
                skip = _after_twin(tables, position[s], start, a)
            w = last[s, r]
            if swaps and not skip and w >= 0 and lanes[w].unawaited and not one.unawaited and lanes[w].duration > 0:
                swapped = free[s, r] + one.duration + passes[w, position[s, w] - 1].tail <= window
                skip = swapped and start[a] == free[s, r] and lanes[w].freed + one.taken <= room
                skip = skip and could_start(passes, pairs, a, free[s, r] - lanes[w].duration, position[s], arrivals[s])
            if skip:
                continue
            tried += 1
            if tried > most:
                return TOO_MANY, tried, new
            new_free[n] = free[s]
            new_free[n, r] = end
            new_position[n] = position[s]
            new_position[n, a] += 1
            next_arrivals(lanes, pairs, a, position[s], arrivals[s], new_free[n], new_arrivals[n])
            if hopeless(tables, new_position[n], new_free[n], new_arrivals[n], window):
                continue
            new_last[n] = last[s]
            new_last[n, r] = a
            new_early[n] = early[s] and end + passes[a, position[s, a]].behind <= window
            n += 1
    return n, tried, new


@kernel
def _after_twin(tables, position, start, a):  # type: ignore[no-untyped-def]
    """Whether another order is as good as those that go on with lane a: one that takes the next pass of a twin first. start:
    µs, of the next pass of each lane (−1: it waits for one that is not placed).

    Twins (see `Tables`) take nothing, no pass waits for them, and they free as much and run as long. Where x, the next pass
    of one, could run when y, that of the other, does, let x have y's place, y that of its lane's next pass, and so on, up to
    the pass of y's lane before x's place, which gets that. Nothing else moves, and memory stays as it is. Passes of y's lane
    run later, but the last of them ends where x ended, and its tail is y's at most, which is x's at most. Start times are
    what they were, so this takes back none of the other exchanges; and the first place that changes has the longer tail, or
    of equal ones the first lane, so it ends.
    """
    lanes, passes = tables.lanes, tables.passes
    own = passes[a, position[a]].tail
    for b in range(len(lanes)):
        if b != a and lanes[b].twins == lanes[a].twins and 0 <= start[b] <= start[a]:
            tail = passes[b, position[b]].tail
            if tail > own or (tail == own and b < a):
                return True
    return False
