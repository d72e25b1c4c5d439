"""From wished times to a schedule: repeat a block, squeeze it, and fill the gaps of its ramps.

`decode` takes a time for every pass and makes an order of them that holds the memory, then walks time: each rank runs
that order, but while the next pass waits for another rank it may start a later one, wherever the rest of the order
still fits the memory afterwards. On a rank with one stream the order alone decides the memory, so a schedule that began
legal stays legal, and none of this can deadlock. Squeezing and re-ordering the ramps are the steps of arXiv
2405.15362, section 3.3; here the same walk does both.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from ..problem import Ints, Problem
from ..schedule import Schedule
from .template import Template

WINDOW = 512  # how far ahead of the next pass a rank looks for a filler
NEVER = np.int64(1) << 60


class Habit(NamedTuple):
    """How ranks deviate from the wished order. early: 0 leave it to the order, 1 a pass that others wait for goes before
    weight gradients once the rank has nothing more to take, 2 always. slack: a filler may delay the next pass by this
    share of the filler's length, in 1/16. fillers: 1 only weight gradients fill gaps, 2 whatever fits."""

    early: int = 1
    slack: int = 0
    fillers: int = 2


def repeat(t: Template, offset: Ints, period: int) -> Ints:
    """Wished times of a block repeated every `period` µs, shape (lanes, microbatches). With several rows of offsets,
    shape (k, lanes), microbatches take them in turn."""
    rows = np.ascontiguousarray(np.atleast_2d(offset), np.int64)
    times = np.empty((rows.shape[1], t.microbatches), np.int64)
    repeat_fast(rows, period, times)
    return times


@numba.njit(cache=True, nogil=True)
def repeat_fast(rows, period, times):  # type: ignore[no-untyped-def]
    for j in range(times.shape[1]):
        times[:, j] = rows[j % len(rows)] + j * period


PLAIN = Habit()


def decode(t: Template, wish: Ints, habit: Habit = PLAIN) -> tuple[int, Ints, Ints]:
    """Value (µs; −1 where the wished order breaks the memory), start times, shape (lanes, microbatches), and each rank's
    passes in order as lane · m + microbatch, rank after rank."""
    return decode_fast(t, wish, habit.early, habit.slack, habit.fillers)  # type: ignore[no-any-return]


def to_schedule(problem: Problem, t: Template, order: Ints) -> Schedule:
    """The schedule of an order from `decode`."""
    rows = t.rows.ravel()[order]
    homes = np.split(rows, np.cumsum(np.diff(t.home_first) * t.microbatches)[:-1])
    return Schedule.of(problem, {problem.passes.stream_sets[problem.passes.streams[own[0]]][0]: own for own in homes})


@numba.njit(cache=True, nogil=True)
def _ordered(t, wish, order):  # type: ignore[no-untyped-def]
    """Each rank's passes by wished time, a pass that does not fit the memory after the ones that free it. False where
    none fits."""
    lanes, m = wish.shape
    position = np.zeros(lanes, np.int64)
    at = 0
    for rank in range(len(t.room)):
        a, z = t.home_first[rank], t.home_first[rank + 1]
        used = 0
        for _ in range((z - a) * m):
            best = -1
            for h in range(a, z):
                lane = t.home_lanes[h]
                j = position[lane]
                if j == m or used + t.taken[lane] > t.room[rank]:
                    continue
                if best >= 0 and wish[lane, j] >= wish[best, position[best]]:
                    continue
                local = True
                for e in range(t.in_first[lane], t.in_first[lane + 1]):
                    source = t.in_lane[e]
                    local = local and (t.rank[source] != rank or position[source] > j)
                if local:
                    best = lane
            if best < 0:
                return False
            used += t.taken[best] - t.freed[best]
            order[at] = best * m + position[best]
            position[best] += 1
            at += 1
    return True


@numba.njit(cache=True, inline="always")
def _fits(taken, freed, room, m, head, i, used, following):  # type: ignore[no-untyped-def]
    """Does the rank's order hold its memory with pass i moved before all others?"""
    change = taken[i // m] - freed[i // m]
    if change <= 0:
        return True
    limit, held, at = room - change, used, head
    for _ in range(WINDOW):
        if at == i:
            return True
        lane = at // m
        if held + taken[lane] > limit:
            return False
        held += taken[lane] - freed[lane]
        at = following[at]
    return False


@numba.njit(cache=True, inline="always")
def _choose(  # type: ignore[no-untyped-def]
    taken,
    freed,
    room,
    duration,
    leaf,
    quiet,
    mine,
    a,
    z,
    m,
    now,
    head,
    following,
    place,
    ready,
    waiting,
    heads,
    used,
    takers,
    early,
    slack,
    fillers,
):
    """The pass that the rank starts now, or −1."""
    leads = leaf[head // m] == 1
    favour = early == 2 or (early == 1 and takers == 0)
    if waiting[head] == 0 and ready[head] <= now and not (favour and leads):
        return head
    arrival = np.int64(1) << 50  # not 60: it is multiplied below
    later = arrival  # when the first of the others that somebody waits for arrives
    best, filler = -1, -1
    for h in range(a, z):
        lane = mine[h]
        i = heads[lane]
        if i < 0 or waiting[i] > 0:
            continue
        if ready[i] > now:
            if i == head:
                arrival = ready[i]
            elif leaf[lane] == 0:
                later = min(later, ready[i])
        elif used + taken[lane] <= room:
            if leaf[lane] == 1:
                if (filler < 0 or place[i] < place[filler]) and _fits(taken, freed, room, m, head, i, used, following):
                    filler = i
            elif (
                (fillers == 2 or favour)
                and (best < 0 or place[i] < place[best])
                and _fits(taken, freed, room, m, head, i, used, following)
            ):
                best = i
    if best >= 0:
        length = duration[best // m]
        if leads or 16 * (now + length - arrival) <= slack * length:
            return best
    if filler >= 0:
        length = duration[filler // m]
        if favour:
            arrival = min(arrival, later)
        if quiet[head // m] == 1 or 16 * (now + length - arrival) <= slack * length:
            return filler
    return -1


@numba.njit(cache=True, nogil=True)
def _quiet(t):  # type: ignore[no-untyped-def]
    """1 for lanes that only weight gradients wait for, such as the first stage's B: delaying them delays nobody."""
    result = np.zeros(len(t.rank), np.int64)
    for lane in range(len(t.rank)):
        result[lane] = 1
        for e in range(t.out_first[lane], t.out_first[lane + 1]):
            if t.leaf[t.out_lane[e]] == 0:
                result[lane] = 0
    return result


@numba.njit(cache=True, nogil=True)
def decode_fast(t, wish, early, slack, fillers):  # type: ignore[no-untyped-def]
    lanes, m = wish.shape
    taken, freed, duration, leaf, room = t.taken, t.freed, t.duration, t.leaf, t.room
    home_first, home_lanes = t.home_first, t.home_lanes
    out_first, out_lane, out_lag, homes = t.out_first, t.out_lane, t.out_lag, t.rank
    count, ranks = lanes * m, len(room)
    start = np.full((lanes, m), -1, np.int64)
    order = np.empty(count, np.int64)
    if not _ordered(t, wish, order):
        return -1, start, order
    quiet = _quiet(t)
    following = np.full(count, -1, np.int64)
    previous = np.full(count, -1, np.int64)
    head = np.empty(ranks, np.int64)
    takers = np.zeros(ranks, np.int64)
    heads = np.empty(lanes, np.int64)  # each lane's next pass
    place = np.empty(count, np.int64)
    at = 0
    begin = np.empty(ranks, np.int64)
    for rank in range(ranks):
        size = (home_first[rank + 1] - home_first[rank]) * m
        head[rank] = order[at]
        begin[rank] = at
        for k in range(at, at + size):
            place[order[k]] = k
            if k > at:
                previous[order[k]] = order[k - 1]
                following[order[k - 1]] = order[k]
            takers[rank] += taken[order[k] // m] > 0
        at += size
    waiting = np.empty(count, np.int64)
    for lane in range(lanes):
        heads[lane] = lane * m
        for j in range(m):
            waiting[lane * m + j] = t.in_first[lane + 1] - t.in_first[lane]
    ready = np.zeros(count, np.int64)
    free = np.zeros(ranks, np.int64)
    used = np.zeros(ranks, np.int64)
    opened = np.full(ranks, -1, np.int64)
    wake = np.zeros(ranks, np.int64)  # when a rank looks next: its pass ends, or what is next in one of its lanes arrives
    done = 0
    while done < count:
        rank, now = 0, wake[0]
        for r in range(1, ranks):
            if wake[r] < now:
                rank, now = r, wake[r]
        if now == NEVER:
            break
        i = _choose(
            taken,
            freed,
            room[rank],
            duration,
            leaf,
            quiet,
            home_lanes,
            home_first[rank],
            home_first[rank + 1],
            m,
            now,
            head[rank],
            following,
            place,
            ready,
            waiting,
            heads,
            used[rank],
            takers[rank],
            early,
            slack,
            fillers,
        )
        if i < 0:
            wake[rank] = NEVER
            for h in range(home_first[rank], home_first[rank + 1]):
                k = heads[home_lanes[h]]
                if k >= 0 and waiting[k] == 0 and ready[k] > now:
                    wake[rank] = min(wake[rank], ready[k])
            continue
        lane, j = i // m, i % m
        end = now + duration[lane]
        start[lane, j] = now
        order[begin[rank]] = i
        begin[rank] += 1
        done += 1
        if opened[rank] < 0:
            opened[rank] = now
        free[rank] = end
        used[rank] += taken[lane] - freed[lane]
        takers[rank] -= taken[lane] > 0
        heads[lane] = i + 1 if j + 1 < m else -1
        if previous[i] >= 0:
            following[previous[i]] = following[i]
        else:
            head[rank] = following[i]
        if following[i] >= 0:
            previous[following[i]] = previous[i]
        wake[rank] = end if head[rank] >= 0 else NEVER
        for e in range(out_first[lane], out_first[lane + 1]):
            k = out_lane[e] * m + j
            ready[k] = max(ready[k], end + out_lag[e])
            waiting[k] -= 1
            if waiting[k] == 0:
                other = homes[out_lane[e]]
                wake[other] = min(wake[other], max(ready[k], free[other]))
    if done < count:
        return -1, start, order
    value = 0
    for rank in range(ranks):
        value = max(value, free[rank] - (opened[rank] if t.span else 0))
    return value, start, order
