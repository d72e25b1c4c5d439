"""The compiled search of `onerank.refute`: partial orders of the passes of one rank, or of a few, level by level."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from ..problem import Ints
from .onerank_merge import fresh, undominated

COMPARED = 64  # pairs of states compared, which take as long as one that is tried


class Links(NamedTuple):
    """Who waits for whom, in compressed rows. before: the lanes that lane a waits for are before[before_first[a]:…]; pairs:
    rows (lane, later lane) with a lag above 0 or on two ranks, elsewhere the rank is free only when it may start; into: the
    pairs whose later lane is a. outs: the most pairs of one lane."""

    before_first: Ints
    before: Ints
    pairs: Ints
    into_first: Ints
    into: Ints
    outs: int


@numba.njit(cache=True, nogil=True)
def search(lanes, window, breadth, most, steady, behind, shift, later, incumbent, wanted):  # type: ignore[no-untyped-def]
    """1 where an order fits the window, 0 where none does, −1 or −2 where neither is known; how many states were tried
    (`COMPARED` comparisons count as one); the most passes of a lane that any of them had placed. 1 too as soon as the
    incumbent's value (one number, which another thread may lower meanwhile) is below the one `wanted` as a bound.

    Of the states with one set of positions at most `breadth` are kept: further ones are merged into the most similar of
    those, the earlier time counting everywhere, which only relaxes (a relaxed decision diagram, Andersen et al. 2007). With
    merged states an end that fits says nothing (−1). −2: more than `most` states were tried, or (steady) they came twice as
    fast as `most` allows in the mean.

    A state is a set of passes placed (positions), when each rank is free, and when passes whose forerunner has run may
    start (arrivals, a queue for every pair of lanes with a lag). Of two states with the same positions one that is nowhere
    earlier is dropped.

    shift (0: none): states are also dropped that are nowhere earlier than one with `shift` passes of every lane less was,
    plus `later` µs, for searches that are steps of an induction over microbatches (see onerank_induct); nothing is merged
    then. Only such ones count whose passes end `behind` µs (a value a pass) or more before the window does.
    """
    count, m = lanes.head.shape
    links = _links(lanes.lag, lanes.home)
    position, now = np.zeros((1, count), np.int16), np.zeros((1, len(lanes.room)), np.int32)
    last, arrivals = np.full((1, len(lanes.room)), -1, np.int8), np.zeros((1, 0), np.int32)
    tried, front = 0, np.int64(0)
    exact = True
    fine = np.ones(1, np.bool_)
    older = [(position, now, arrivals, fine)]
    for placed in range(count * m):
        if incumbent[0] < wanted:
            return 1, tried, front
        allowed = most if not steady else min(most, 2 * most * (placed + 1) // (count * m))
        n, more, new_position, new_now, new_last, new_arrivals, new_fine = _level(
            lanes, links, position, now, last, arrivals, fine, window, allowed - tried, behind, shift == 0
        )
        tried += more
        for s in range(len(position)):  # what was tried has one more
            front = max(front, np.int64(position[s].max()) + 1)
        if n <= 0:
            return n, tried, front
        left = COMPARED * (allowed - tried)
        keep, whole, compared = undominated(
            new_position[:n], new_now[:n], new_last[:n], new_arrivals[:n], links.pairs, breadth, left
        )
        tried += compared // COMPARED
        if compared > left:
            return -2, tried, front
        exact = exact and whole
        if shift > 0:
            if not exact:
                return -1, tried, front
            if placed + 1 >= shift * count:
                keep, compared = fresh(
                    new_position, new_now, new_arrivals, keep, older[placed + 1 - shift * count], links.pairs, shift, later
                )
                tried += compared // COMPARED
        position, now, last, arrivals = new_position[keep], new_now[keep], new_last[keep], new_arrivals[keep]
        fine = new_fine[keep]
        if shift > 0:
            older.append((position, now, arrivals, fine))
    return (1 if exact else -1), tried, front


@numba.njit(cache=True, nogil=True)
def _level(lanes, links, position, now, last, arrivals, fine, window, most, behind, swaps):  # type: ignore[no-untyped-def]
    """The states with one pass more: how many (−2: more than `most` were tried), how many were tried, and they.

    The rank that is free first goes on; another only where a pass of the first waits for a pass that is not placed, so
    every schedule can be built. Orders are left out where one as good remains:
    * idle time in which a pass fits that could start then: one that takes no memory, or of its rank's only lane that takes
      any, can be moved there, for all between takes none;
    * a pass after one that nobody waits for and that takes time, if it could have gone first at that time with the memory
      of then (it cannot where idle time is between them, whether that is counted as taken or not, see _lift). Only with
      `swaps`: tails that are too short would let too much be left out.
    """
    home, duration, taken, freed, room = lanes.home, lanes.duration, lanes.taken, lanes.freed, lanes.room
    count, m = lanes.head.shape
    ranks, states = len(room), len(now)
    unawaited, takers = _roles(lanes, links)
    longest = _longest(position, links.pairs) + links.outs
    new_position = np.empty((states * count, count), np.int16)
    new_now = np.empty((states * count, ranks), np.int32)
    new_last = np.empty((states * count, ranks), np.int8)
    new_arrivals = np.empty((states * count, longest), np.int32)
    new_fine = np.empty(states * count, np.bool_)
    start, used = np.empty(count, np.int64), np.empty(ranks, np.int64)
    first, end, turn = np.empty(len(links.pairs), np.int64), np.empty((count, m), np.int64), np.empty(ranks, np.bool_)
    n = tried = 0
    for s in range(states):
        used[:] = 0
        for a in range(count):
            used[home[a]] += position[s, a] * (taken[a] - freed[a])
        _starts(lanes, links, position[s], now[s], arrivals[s], start)
        _turns(lanes, links, position[s], now[s], turn)
        for a in range(count):
            r = home[a]
            if start[a] < 0 or not turn[r] or used[r] + taken[a] > room[r]:
                continue
            if start[a] + duration[a] + lanes.tail[a, position[s, a]] > window:
                continue
            skip = False
            for b in range(count):
                fits = start[b] >= 0 and start[b] < start[a] and start[b] + duration[b] <= start[a] and home[b] == r
                skip = skip or (fits and used[r] + taken[b] <= room[r] and (taken[b] == 0 or takers[r] == 1))
            w = last[s, r]
            if swaps and not skip and w >= 0 and unawaited[w] and not unawaited[a] and duration[w] > 0:
                swapped = now[s, r] + duration[a] + lanes.tail[w, position[s, w] - 1] <= window
                skip = swapped and start[a] == now[s, r] and used[r] + freed[w] + taken[a] <= room[r]
                skip = skip and _earlier(a, now[s, r] - duration[w], position[s], arrivals[s], links.pairs, lanes.head)
            if skip:
                continue
            new_now[n] = now[s]
            new_now[n, r] = start[a] + duration[a]
            tried += 1
            if tried > most:
                return -2, tried, new_position, new_now, new_last, new_arrivals, new_fine
            _place(lanes, a, position[s], arrivals[s], links.pairs, new_now[n], new_position[n], new_arrivals[n])
            if _hopeless(lanes, links, new_position[n], new_now[n], new_arrivals[n], window, first, end):
                continue
            new_last[n] = last[s]
            new_last[n, r] = a
            new_fine[n] = fine[s] and start[a] + duration[a] + behind[a, position[s, a]] <= window
            n += 1
    return n, tried, new_position, new_now, new_last, new_arrivals, new_fine


@numba.njit(cache=True, nogil=True)
def _links(lag, home):  # type: ignore[no-untyped-def]
    count = len(lag)
    before_first, before = np.zeros(count + 1, np.int64), np.empty(lag.size, np.int64)
    pairs, outs = np.empty((lag.size, 2), np.int64), np.zeros(count, np.int64)
    n = 0
    for a in range(count):
        for b in range(count):
            if lag[a, b] > 0 or (lag[a, b] == 0 and home[a] != home[b]):
                pairs[n, 0], pairs[n, 1] = a, b
                outs[a] += 1
                n += 1
    into_first, into = np.zeros(count + 1, np.int64), np.empty(n, np.int64)
    for a in range(count):
        before_first[a + 1], into_first[a + 1] = before_first[a], into_first[a]
        for b in range(count):
            if lag[b, a] >= 0:
                before[before_first[a + 1]] = b
                before_first[a + 1] += 1
        for k in range(n):
            if pairs[k, 1] == a:
                into[into_first[a + 1]] = k
                into_first[a + 1] += 1
    return Links(before_first, before[: before_first[count]], pairs[:n], into_first, into, outs.max())


@numba.njit(cache=True, nogil=True)
def _roles(lanes, links):  # type: ignore[no-untyped-def]
    """Which lanes take no memory while nobody waits for them; and how many lanes of each rank take memory."""
    unawaited, takers = lanes.taken == 0, np.zeros(len(lanes.room), np.int64)
    unawaited[links.before] = False
    for a in range(len(lanes.home)):
        takers[lanes.home[a]] += lanes.taken[a] > 0
    return unawaited, takers


@numba.njit(cache=True, nogil=True)
def _longest(position, pairs):  # type: ignore[no-untyped-def]
    """The most arrivals of a state."""
    longest = 0
    for s in range(len(position)):
        size = 0
        for k in range(len(pairs)):
            size += max(0, position[s, pairs[k, 0]] - position[s, pairs[k, 1]])
        longest = max(longest, size)
    return longest


@numba.njit(cache=True, nogil=True)
def _starts(lanes, links, position, now, arrivals, start):  # type: ignore[no-untyped-def]
    """When each lane's next pass could start, memory aside; −1 where a forerunner has not been placed, or all are."""
    count, m = lanes.head.shape
    for a in range(count):
        j = position[a]
        start[a] = -1 if j == m else max(np.int64(now[lanes.home[a]]), lanes.head[a, j])
        for x in range(links.before_first[a], links.before_first[a + 1]):
            if position[links.before[x]] <= j:
                start[a] = -1
    at = 0
    for k in range(len(links.pairs)):
        b, a = links.pairs[k]
        waiting = max(0, position[b] - position[a])
        if waiting > 0 and start[a] >= 0:
            start[a] = max(start[a], np.int64(arrivals[at]))
        at += waiting


@numba.njit(cache=True, nogil=True)
def _turns(lanes, links, position, now, turn):  # type: ignore[no-untyped-def]
    """Which ranks may go on: a rank that is free first, or where each before it has none left or a pass that waits for
    nothing but passes of other ranks that are not placed."""
    m, home = lanes.head.shape[1], lanes.home
    turn[:] = True  # here: stands in nobody's way
    for a in range(len(home)):
        if position[a] < m:
            turn[home[a]] = False
    for a in range(len(home)):
        own, other = position[a] == m, False
        for x in range(links.before_first[a], links.before_first[a + 1]):
            b = links.before[x]
            if position[b] <= position[a]:
                own = own or home[b] == home[a]
                other = other or home[b] != home[a]
        if other and not own:
            turn[home[a]] = True
    first = -1
    for q in range(len(now)):
        if not turn[q] and (first < 0 or now[q] < now[first]):
            first = q
    for r in range(len(now)):
        turn[r] = first < 0 or now[r] < now[first] or (now[r] == now[first] and r <= first)


@numba.njit(cache=True, nogil=True)
def _earlier(a, then, position, arrivals, pairs, head):  # type: ignore[no-untyped-def]
    """Whether the next pass of lane a could have started at `then`."""
    if head[a, position[a]] > then:
        return False
    at = 0
    for k in range(len(pairs)):
        waiting = max(0, position[pairs[k, 0]] - position[pairs[k, 1]])
        if pairs[k, 1] == a and waiting > 0 and arrivals[at] > then:
            return False
        at += waiting
    return True


@numba.njit(cache=True, nogil=True)
def _place(lanes, lane, position, arrivals, pairs, now, new_position, new_arrivals):  # type: ignore[no-untyped-def]
    """The state after `lane`'s next pass has run until its rank is free (`now`). An arrival before the pass could start
    anyway, after all of its lane ahead of it, counts as then."""
    home, duration = lanes.home, lanes.duration
    end = now[home[lane]]
    new_position[:] = position
    new_position[lane] += 1
    at, n = 0, 0
    for k in range(len(pairs)):
        a, b = pairs[k]
        waiting = max(0, position[a] - position[b])
        first = 1 if b == lane else 0
        for q in range(waiting - first + (1 if a == lane else 0)):
            arrival = arrivals[at + first + q] if first + q < waiting else end + lanes.lag[a, b]
            new_arrivals[n] = max(arrival, now[home[b]] + q * duration[b])
            n += 1
        at += waiting


@numba.njit(cache=True, nogil=True)
def _hopeless(lanes, links, position, now, arrivals, window, first, end):  # type: ignore[no-untyped-def]
    """Whether the state cannot end within the window: work, what is under way, or memory over the time left; where it can,
    its times are lifted (see _lift). first, end: room for where each pair's arrivals begin, and for the least ends of the
    passes of the microbatches under way and of the next passes of all lanes."""
    home, duration, room = lanes.home, lanes.duration, lanes.room
    count, m = lanes.head.shape
    front = np.int64(0)
    for a in range(count):
        front = max(front, np.int64(position[a]))
    for r in range(len(room)):
        left = window + lanes.slack[r] - now[r]
        for a in range(count):
            if home[a] == r:
                left -= (m - position[a]) * duration[a]
        if left < 0:
            return True
    at = 0
    for k in range(len(links.pairs)):
        first[k] = at
        at += max(0, position[links.pairs[k, 0]] - position[links.pairs[k, 1]])
    for a in range(count):  # each lane after the ones before it
        before, mine = np.int64(now[home[a]]), np.int64(position[a])
        for j in range(mine, front if mine < front else min(front + 1, m)):
            then = max(before, lanes.head[a, j])
            for x in range(links.before_first[a], links.before_first[a + 1]):
                b = links.before[x]
                if j >= position[b]:
                    then = max(then, end[b, j] + lanes.lag[b, a])
            for x in range(links.into_first[a], links.into_first[a + 1]):
                k = links.into[x]
                if j < position[links.pairs[k, 0]]:
                    then = max(then, np.int64(arrivals[first[k] + j - mine]))
            before = then + duration[a]
            end[a, j] = before
            if before + lanes.tail[a, j] > window:
                return True
    _lift(lanes, links.pairs, position, end, now, arrivals)
    area = np.zeros(len(room))
    for h in range(len(lanes.held)):
        a, b, size, least = lanes.held[h]
        span = (m - front) * least
        for j in range(position[b], front):
            # What is not taken yet may be taken late: then only its least lifespan is sure.
            span += end[b, j] - now[home[a]] if j < position[a] else least
        area[home[a]] += float(size) * float(span)
    for r in range(len(room)):  # noqa: SIM110
        if area[r] > _fits(window + lanes.slack[r] - now[r], lanes.fall[r]) * (1 + 1e-9):
            return True
    return False


@numba.njit(cache=True, nogil=True)
def _lift(lanes, pairs, position, end, now, arrivals):  # type: ignore[no-untyped-def]
    """Count each rank as taken until one of its passes can start: states that differ before that are the same."""
    m, home, duration = lanes.head.shape[1], lanes.home, lanes.duration
    for r in range(len(now)):
        least = np.int64(-1)
        for a in range(len(home)):
            if home[a] == r and position[a] < m:
                then = end[a, position[a]] - duration[a]
                least = then if least < 0 else min(least, then)
        now[r] = max(np.int64(now[r]), least)
    at = 0
    for k in range(len(pairs)):
        b = pairs[k, 1]
        waiting = max(0, position[pairs[k, 0]] - position[b])
        for q in range(waiting):
            arrivals[at + q] = max(np.int64(arrivals[at + q]), now[home[b]] + q * duration[b])
        at += waiting


@numba.njit(cache=True, nogil=True)
def _fits(left, ramp):  # type: ignore[no-untyped-def]
    """Byte·µs that fit into the last `left` µs of the window. Rows of `ramp`: time before the end, byte·µs that fit between
    then and the end, bytes from there on."""
    low, high = 0, len(ramp) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if ramp[middle, 0] <= left:
            low = middle
        else:
            high = middle - 1
    return ramp[low, 1] + (left - ramp[low, 0]) * ramp[low, 2]
