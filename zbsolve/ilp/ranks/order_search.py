"""The compiled search for an order of the passes of some ranks within a window. Its states are partial orders. Each level
of the search places one more pass.

Of two states that have placed the same passes, one that is nowhere earlier is dropped (dominance). At most `breadth` of the
others are kept. Each further one is merged into the most similar kept one, with the earlier of both times everywhere, which
only relaxes the problem (a relaxed decision diagram; Andersen et al., 2007).

For the span, the windows of several ranks count at once. The time between the begins of two windows is unknown. So each
window has its own clock: on it, the times of an order are longest paths from the begin of this window. An order is dropped
only where another one is as good on every clock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import kernel, subkernel
from .lanes import WINDOW_BEGIN, Lanes
from .partial_orders import (
    Positions,
    States,
    Times,
    arrivals_of,
    could_start,
    empty_order,
    most_arrivals_next,
    next_arrivals,
    next_starts,
    ranks_to_extend,
    room_for,
    selected,
)
from .pruning import hopeless, not_dominated, reduced
from .search_tables import Tables, TableWindows, ToGo, in_window, tables_of, windows_of

REFUTED, FITS, MERGED, TOO_MANY = 0, 1, -1, -2  # answers of a search for a window; see `end_losses.Answer`
COMPARED_PER_STATE = 64  # comparing so many pairs of states takes as long as trying one state


class Limits(NamedTuple):
    """Limits of a search. breadth: how many states with the same positions are kept; states: how many are tried in all;
    steady: whether the states tried up to each level are limited to twice their even share of `states`."""

    breadth: int
    states: int
    steady: bool


class Induction(NamedTuple):
    """For a search that is a step of an induction over microbatches (see `induction`). It also drops states that are nowhere
    earlier than an older state with `shift` fewer passes of every lane, plus `later` µs. Only older states count whose
    passes end at least `behind` µs (shape (lanes, microbatches)) before the window. shift 0: no induction."""

    behind: Ints
    shift: int
    later: int


class Clocks(NamedTuple):
    """Further windows. tables: those of the first window; further: data of the others; window: the length of each, µs;
    starts: µs, shape (windows, lanes), when each lane's next pass could start in each of them, for the current state."""

    tables: Tables
    further: TableWindows
    window: int
    starts: Ints


@kernel
def search_orders(
    lanes: Lanes, window: int, limits: Limits, induction: Induction, incumbent: Ints, wanted: int, to_go: ToGo
) -> tuple[int, int, int]:
    """Search for an order of the passes of `lanes` that fits the window, µs, and further windows of that length
    (`Lanes.windows`). Returns three numbers:
    * The answer. `REFUTED`: none fits. `MERGED`: one fits, but states were merged (an induction ends as soon as they are).
      `TOO_MANY`: the limits were reached. `FITS`: one fits; or the incumbent's value (one number, which another thread may
      lower meanwhile) is below the bound that is `wanted`, and the search ends.
    * The states tried, once for each window; `COMPARED_PER_STATE` comparisons count as one.
    * The most passes of a lane that any state had placed.
    """
    count, m = lanes.head.shape
    shift, states_allowed = induction.shift, limits.states
    tables = tables_of(lanes, induction.behind, to_go)
    further = windows_of(tables, lanes.windows)
    states = empty_order(count, len(lanes.capacity), len(further.ranks))
    tried, front, exact = 0, 0, True
    older = [states]
    for placed in range(count * m):
        if incumbent[0] < wanted:
            return FITS, tried, front
        allowed = states_allowed
        if limits.steady:
            allowed = min(states_allowed, 2 * states_allowed * (placed + 1) // (count * m))
        n, more, new = _next_level(tables, further, states, window, allowed - tried, shift == 0)
        tried += more
        for s in range(len(states.position)):  # states that were tried have one pass more
            front = max(front, int(states.position[s].max()) + 1)
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
                before = older[placed + 1 - shift * count]
                keep, compared = not_dominated(new, keep, before, tables.pairs, shift, induction.later)
                tried += compared // COMPARED_PER_STATE
        states = selected(new, keep)
        if shift > 0:
            older.append(states)
    return (FITS if exact else MERGED), tried, front


@subkernel
def _next_level(
    tables: Tables, further: TableWindows, states: States, window: int, most: int, swaps: bool
) -> tuple[int, int, States]:
    """The states with one more pass: how many there are (`TOO_MANY`: more than `most` were tried), how many were tried, and
    the states.

    The next pass goes on the rank that is free first, or on one that `ranks_to_extend` adds. So every schedule can be built.
    An order is left out by these rules, since one that is as good remains:
    * A rank is idle before the pass, and another pass of its next ones would fit into that idle time. It can be moved there
      if it takes no memory. It also can if its lane is the only one of the rank that takes any: passes in between take none.
    * The pass could change places with the one right before it on its rank, which takes time and which no pass waits for.
      (There is no idle time between them, also none that `pruning` counts as taken.) Only with `swaps`: the tails of an
      induction may be too short, and then the rule would leave out too much.
    * A twin's next pass could start as early, and its tail is longer, or as long and its lane an earlier one. See
      `_after_twin`. Only with `swaps`.
    Each rule must hold in every window. Where no path leads from a window's begin to a pass, its time there is unknown. It
    limits nothing in that window, before and after an exchange.
    """
    lanes, ranks, passes, pairs = tables.lanes, tables.ranks, tables.passes, tables.pairs
    position, free, last, arrivals, early = states
    count = len(lanes)
    new = room_for(states, most_arrivals_next(position, lanes, pairs), len(free) * count)
    new_position, new_free, new_last, new_arrivals, new_early = new
    start, used, turn = np.empty(count, np.int64), np.empty(len(ranks), np.int64), np.empty(len(ranks), np.bool_)
    n_ranks, starts = len(ranks), np.empty((len(further.ranks), count), np.int64)
    clocks = Clocks(tables, further, window, starts)
    n = tried = 0
    for s in range(len(free)):
        used[:] = 0
        for a in range(count):
            used[lanes[a].rank] += position[s, a] * (lanes[a].taken - lanes[a].freed)
        size = arrivals_of(position[s], pairs)
        next_starts(tables, position[s], free[s, :n_ranks], arrivals[s, :size], start)
        for k in range(len(further.ranks)):
            here = in_window(tables, further, k)
            next_starts(here, position[s], *_times_in(k, n_ranks, free[s], size, arrivals[s]), starts[k])
        ranks_to_extend(tables, position[s], free[s, :n_ranks], turn)
        for a in range(count):
            lane = lanes[a]
            r, end = lane.rank, start[a] + lane.duration
            room = ranks[r].capacity - used[r]
            if start[a] < 0 or not turn[r] or lane.taken > room:
                continue
            if end + passes[a, position[s, a]].tail > window:
                continue
            skip = False
            for b in range(count):
                other = lanes[b]
                fits = start[b] >= 0 and start[b] < start[a] and start[b] + other.duration <= start[a] and other.rank == r
                fits = fits and other.taken <= room and (other.taken == 0 or ranks[r].takers == 1)
                skip = skip or (fits and _fits_before(starts, a, b, other.duration))
            if swaps and not skip:
                skip = _after_twin(tables, further, position[s], start, starts, a)
            w = last[s, r]
            if swaps and not skip and w >= 0 and lanes[w].unawaited and not lane.unawaited and lanes[w].duration > 0:
                swapped = free[s, r] + lane.duration + passes[w, position[s, w] - 1].tail <= window
                skip = swapped and start[a] == free[s, r] and lanes[w].freed + lane.taken <= room
                then = free[s, r] - lanes[w].duration
                skip = skip and could_start(passes, pairs, a, then, position[s], arrivals[s, :size])
                skip = skip and _swap_everywhere(clocks, states, s, a, w)
            if skip:
                continue
            tried += 1
            if tried > most:
                return TOO_MANY, tried, new
            new_free[n] = free[s]
            new_free[n, r] = end
            new_position[n] = position[s]
            new_position[n, a] += 1
            new_size = arrivals_of(new_position[n], pairs)
            first_free, first_arrivals = new_free[n, :n_ranks], new_arrivals[n, :new_size]
            next_arrivals(lanes, pairs, a, position[s], arrivals[s, :size], first_free, first_arrivals)
            if hopeless(tables, new_position[n], first_free, first_arrivals, window):
                continue
            looked, late = _placed_everywhere(clocks, states, s, a, new, n)
            tried += looked
            if late:
                continue
            new_last[n] = last[s]
            new_last[n, r] = a
            new_early[n] = early[s] and end + passes[a, position[s, a]].behind <= window
            n += 1
    return n, tried, new


@subkernel
def _times_in(k: int, n_ranks: int, free: Times, size: int, arrivals: Times) -> tuple[Times, Times]:
    """The times (free, arrivals) of one state on the clock of further window k. size: how many arrivals a window has."""
    return free[n_ranks * (k + 1) : n_ranks * (k + 2)], arrivals[size * (k + 1) : size * (k + 2)]


@subkernel
def _fits_before(starts: Ints, a: int, b: int, duration: int) -> bool:
    """Whether the next pass of lane b, µs long, fits before that of lane a in every further window. starts: µs, shape
    (windows, lanes)."""
    for k in range(len(starts)):  # noqa: SIM110 (a generator is slow here)
        if starts[k, b] >= WINDOW_BEGIN and starts[k, b] + duration > starts[k, a]:
            return False
    return True


@subkernel
def _swap_everywhere(clocks: Clocks, states: States, s: int, a: int, w: int) -> bool:
    """Whether the next pass of lane a and the last pass of lane w, right before it on the rank, could change places in every
    further window. No pass waits for that of w, so only its own tail must then still fit. A window where the start of a is
    unknown limits w neither, as w ran before a."""
    tables, further, window, starts = clocks
    lanes, pairs, n_ranks = tables.lanes, tables.pairs, len(tables.ranks)
    position, r = states.position[s], lanes[a].rank
    size = arrivals_of(position, pairs)
    for k in range(len(starts)):
        if starts[k, a] < WINDOW_BEGIN:
            continue
        free, arrivals = _times_in(k, n_ranks, states.free[s], size, states.arrivals[s])
        passes = further.passes[k]
        if starts[k, a] != free[r] or free[r] + lanes[a].duration + passes[w, position[w] - 1].tail > window:
            return False
        if not could_start(passes, pairs, a, free[r] - lanes[w].duration, position, arrivals):
            return False
    return True


@subkernel
def _placed_everywhere(clocks: Clocks, states: States, s: int, a: int, new: States, n: int) -> tuple[int, bool]:
    """Fill in the times of new state n, which is state s with lane a's next pass, in further windows. Returns how many
    windows were looked at, and whether the last of these is too short."""
    tables, further, window, starts = clocks
    lanes, pairs, n_ranks = tables.lanes, tables.pairs, len(tables.ranks)
    position, lane = states.position[s], lanes[a]
    size, new_size = arrivals_of(position, pairs), arrivals_of(new.position[n], pairs)
    for k in range(len(starts)):
        _, arrivals = _times_in(k, n_ranks, states.free[s], size, states.arrivals[s])
        new_free, new_arrivals = _times_in(k, n_ranks, new.free[n], new_size, new.arrivals[n])
        new_free[lane.rank] = starts[k, a] + lane.duration if starts[k, a] >= WINDOW_BEGIN else 0
        if new_free[lane.rank] + further.passes[k, a, position[a]].tail > window:
            return k + 1, True
        next_arrivals(lanes, pairs, a, position, arrivals, new_free, new_arrivals)
        if hopeless(in_window(tables, further, k), new.position[n], new_free, new_arrivals, window):
            return k + 1, True
    return len(starts), False


@subkernel
def _after_twin(tables: Tables, further: TableWindows, position: Positions, start: Ints, starts: Ints, a: int) -> bool:
    """Whether an order that takes the next pass of a twin of lane a first is as good as those that go on with lane a.

    start: µs, of the next pass of each lane (−1: it waits for a pass that is not placed), shape (lanes,).
    starts: the same in further windows, shape (windows, lanes).

    Twins (see `Tables`) take no memory, free equal bytes and run equally long, and no pass waits for them. Let y be lane a's
    next pass, and x a twin's next pass, which could run in y's place. *Exchange.* x takes y's place, y takes the place of
    the next pass of its lane, and so on. The last pass of y's lane before x's old place takes that place. No other pass
    moves, and memory stays as it is. The passes of y's lane then end no later than x did. Their tails are no longer than
    y's, which is no longer than x's. So they fit the window. The set of start times stays, so this undoes no other exchange.
    The first place that changes gets a longer tail, or of equal tails an earlier lane, so exchanges come to an end.
    """
    lanes, passes = tables.lanes, tables.passes
    own = passes[a, position[a]].tail
    for b in range(len(lanes)):
        if b != a and lanes[b].twins == lanes[a].twins and 0 <= start[b] <= start[a]:
            tail = passes[b, position[b]].tail
            if (tail > own or (tail == own and b < a)) and _twin_everywhere(further, position, starts, a, b):
                return True
    return False


@subkernel
def _twin_everywhere(further: TableWindows, position: Positions, starts: Ints, a: int, b: int) -> bool:
    """Whether lane b's next pass could run in the place of its twin a's, with a tail as long or longer, in every further
    window."""
    for k in range(len(starts)):
        passes = further.passes[k]
        if starts[k, b] > starts[k, a] or passes[b, position[b]].tail < passes[a, position[a]].tail:
            return False
    return True
