"""Necessary arcs: who must wait for whom in every schedule whose lanes run in table order; longest paths along them.

Three sources: the problem's edges; each lane's chain (its passes share a stream and run in order); and memory: where
the passes up to `b` have taken and what `a` and the passes after it free does not fit together, `b` waits for `a`.

Longest paths see machines too: what must run on a pass's own stream before it, after some point in time, takes its work.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numba
import numpy as np

from ..greedy.arrays import arrays, compressed
from ..problem import Ints, Problem

NOWHERE = -(1 << 60)
FAR = 1 << 40


class Arcs(NamedTuple):
    """Arcs in compressed rows both ways, and a topological order; lag from the end of one pass to the start of the next.

    place[i]: position of pass i in its lane; shift[l, m]: the least n such that pass k of lane l comes before pass k + n of
    lane m for every k (FAR: none known); mates: the lanes that share lane l's only stream, in compressed rows.
    depth: least start of every pass, µs; after: least time from its end to the end of all.
    """

    out_first: Ints
    out_pass: Ints
    out_lag: Ints
    in_first: Ints
    in_pass: Ints
    in_lag: Ints
    order: Ints
    lane: Ints
    place: Ints
    length: Ints
    shift: Ints
    mate_first: Ints
    mates: Ints
    depth: Ints
    after: Ints


_made: WeakKeyDictionary[Problem, Arcs] = WeakKeyDictionary()


def arcs(problem: Problem) -> Arcs:
    """The problem's necessary arcs, remembered while the problem lives."""
    if problem not in _made:
        _made[problem] = _make(problem)
    return _made[problem]


def _make(problem: Problem, lanes: bool = True) -> Arcs:
    edges, count, a = problem.edges, len(problem.passes), arrays(problem)
    length = np.diff(a.lane_first)
    place = np.zeros(count, np.int64)
    place[a.lane_rows] = np.arange(count) - np.repeat(a.lane_first[:-1], length)
    shift = _level(problem, place, length) if lanes else np.full((len(length), len(length)), FAR)
    before, after = [edges.before], [edges.after]
    if lanes:
        for rows in problem.lanes:
            before.append(rows[:-1])
            after.append(rows[1:])
        for b, t in _memory_arcs(problem, place, length, shift):
            before.append(b)
            after.append(t)
    tails, heads = np.concatenate(before), np.concatenate(after)
    lags = np.concatenate([edges.lag, np.zeros(len(tails) - len(edges), np.int64)])
    out_first, out_pass, out_lag = compressed(tails, count, heads, lags)
    in_first, in_pass, in_lag = compressed(heads, count, tails, lags)
    order = _topological(out_first, out_pass, np.diff(in_first))
    if len(order) < count:  # lanes against the graph: no schedule runs them in order; keep to the graph
        return _make(problem, lanes=False)
    _closure(shift)
    mate_first, mates = _mates(problem, length) if lanes else (np.zeros(len(length) + 1, np.int64), np.zeros(0, np.int64))
    made = Arcs(
        *(out_first, out_pass, out_lag, in_first, in_pass, in_lag, order),
        *(a.lane, place, length, shift, mate_first, mates, order, order),
    )
    zero = np.zeros(count, np.int64)
    return made._replace(depth=starts(problem, made, zero), after=ends(problem, made, zero))


def starts(problem: Problem, a: Arcs, begin: Ints) -> Ints:
    """The least start of each pass, µs, where pass i starts at begin[i] or later (NOWHERE: no limit is known, then the
    result may be NOWHERE too)."""
    result: Ints = _longest(
        *(a.order, a.in_first, a.in_pass, a.in_lag, problem.passes.duration, begin),
        *(a.lane, a.place, a.length, a.shift, a.mate_first, a.mates, _rows(problem), np.cumsum(a.length) - a.length),
    )
    return result


def ends(problem: Problem, a: Arcs, begin: Ints) -> Ints:
    """The least time from each pass's end to a moment that is begin[i] or more after the end of pass i: `starts`, run
    backwards in time."""
    result: Ints = _longest(
        *(a.order[::-1], a.out_first, a.out_pass, a.out_lag, problem.passes.duration, begin),
        *(a.lane, a.length[a.lane] - 1 - a.place, a.length, a.shift.T, a.mate_first, a.mates),
        *(_rows(problem, backwards=True), np.cumsum(a.length) - a.length),
    )
    return result


def heads_and_tails(problem: Problem, rank: int) -> tuple[Ints, Ints]:
    """Least time before each pass's start and after its end, µs: from the step's begin and to its end for the makespan;
    from the first start of `rank` and to its last end for the span (NOWHERE: none is known)."""
    a = arcs(problem)
    if problem.objective == "makespan":
        return a.depth, a.after
    begin = np.where(problem.passes.rank == rank, 0, NOWHERE)
    return starts(problem, a, begin), ends(problem, a, begin)


def ordered(problem: Problem, rank: int) -> Ints:
    """Rows of a rank's passes whose order decides what it holds: all but those that run beside compute without memory."""
    return np.setdiff1d(np.flatnonzero(problem.passes.rank == rank), problem.beside)


def _rows(problem: Problem, backwards: bool = False) -> Ints:
    """The lanes' passes one after the other, each lane from its first pass to its last, or from its last to its first."""
    return np.concatenate([rows[::-1] if backwards else rows for rows in problem.lanes])


def _mates(problem: Problem, length: Ints) -> tuple[Ints, Ints]:
    """For each lane whose passes use one stream and only that: the lanes that use the same, itself among them."""
    passes = problem.passes
    stream = np.full(len(length), -1, np.int64)
    for number, rows in enumerate(problem.lanes):
        used = np.unique(passes.streams[rows])
        if len(used) == 1 and len(passes.stream_sets[used[0]]) == 1:
            stream[number] = used[0]
    groups = [np.flatnonzero(stream == s) if s >= 0 else np.zeros(0, np.int64) for s in stream.tolist()]
    return np.concatenate([[0], np.cumsum([len(g) for g in groups])]).astype(np.int64), np.concatenate(groups).astype(
        np.int64
    )


def _memory_arcs(problem: Problem, place: Ints, length: Ints, shift: Ints) -> list[tuple[Ints, Ints]]:
    """Arcs that memory forces, as pairs of columns (before, after).

    Take a lane `t` that takes and a lane `f` that frees on one rank, and the edges from any lane that comes before `t`
    (or is `t`) to any lane that comes after `f` (or is `f`), all within a microbatch. When pass j of `t` starts, those
    edges of microbatches up to j have taken their bytes; while pass k of `f` has not ended, those from k on are not
    freed. Where the microbatches k … j together exceed the capacity, pass j of `t` must wait for pass k of `f`. Lanes so
    bound are noted in `shift`.
    """
    if problem.capacity is None:
        return []
    a, edges = arrays(problem), problem.edges
    level = np.flatnonzero((place[edges.before] == place[edges.after]) & (edges.bytes > 0))
    reach = shift == 0
    found = []
    for rank in range(problem.ranks):
        rows = level[a.rank[edges.before[level]] == rank]
        source, target, size = a.lane[edges.before[rows]], a.lane[edges.after[rows]], edges.bytes[rows]
        room = int(a.room[rank])
        for t in np.unique(source).tolist():
            for f in np.unique(target).tolist():
                if length[t] != length[f] or t == f:
                    continue
                use = reach[source, t] & reach[f, target]
                held = np.bincount(place[edges.before[rows[use]]], size[use], int(length[t])).astype(np.int64)
                total = np.concatenate([[0], np.cumsum(held)])
                last = np.searchsorted(total, total[:-1] + room, side="right") - 1
                k = np.flatnonzero((last < length[t]) & (last > np.arange(length[t])))
                if len(k):
                    shift[f, t] = min(int(shift[f, t]), int((last[k] - k).max()))
                    found.append((a.lane_rows[a.lane_first[f] + k], a.lane_rows[a.lane_first[t] + last[k]]))
    return found


def _level(problem: Problem, place: Ints, length: Ints) -> Ints:
    """Lane, lane → 0 where pass k of the first comes before pass k of the second for every k, or where they are one lane;
    FAR elsewhere."""
    edges, lane = problem.edges, arrays(problem).lane
    lanes, most = len(length), int(length.max())
    same = np.flatnonzero(place[edges.before] == place[edges.after])
    source, target = lane[edges.before[same]], lane[edges.after[same]]
    pairs = np.unique((source * lanes + target) * most + place[edges.before[same]]) // most
    reach = np.eye(lanes, dtype=bool)
    for pair, count in zip(*np.unique(pairs, return_counts=True), strict=True):
        i, j = divmod(int(pair), lanes)
        reach[i, j] |= bool(length[i] == length[j] == count)
    for k in range(lanes):
        from_here = np.flatnonzero(reach[:, k])
        reach[from_here] |= reach[k]
    return np.where(reach, 0, FAR).astype(np.int64)


@numba.njit(cache=True, nogil=True)
def _closure(shift):  # type: ignore[no-untyped-def]
    """Shifts along ways over other lanes; the least sum (Floyd, Warshall)."""
    for k in range(len(shift)):
        for i in range(len(shift)):
            if shift[i, k] < FAR:
                for j in range(len(shift)):
                    if shift[i, k] + shift[k, j] < shift[i, j]:
                        shift[i, j] = shift[i, k] + shift[k, j]


@numba.njit(cache=True, nogil=True)
def _topological(first, after, waiting):  # type: ignore[no-untyped-def]
    """The passes in an order that respects all arcs; shorter than all of them where there is a cycle."""
    waiting = waiting.copy()
    order = np.empty(len(waiting), np.int64)
    n = 0
    for i in range(len(waiting)):
        if waiting[i] == 0:
            order[n] = i
            n += 1
    at = 0
    while at < n:
        i = order[at]
        at += 1
        for e in range(first[i], first[i + 1]):
            waiting[after[e]] -= 1
            if waiting[after[e]] == 0:
                order[n] = after[e]
                n += 1
    return order[:n]


@numba.njit(cache=True, nogil=True)
def _longest(order, first, neighbour, lag, duration, begin, lane, place, length, shift, mate_first, mates, rows, row_first):  # type: ignore[no-untyped-def]
    """Longest paths to each pass's start, with machines: of the passes of its own stream that come before it, those that
    cannot start before h all run between h and its start.

    Lanes are walked in order, so the passes before it grow by at most one a lane from one pass of a lane to the next. Of
    the possible h two are followed: the least, with all the work; and the one that gave most so far.
    """
    start = begin.copy()
    lanes = len(length)
    least, all_work = np.full(lanes, FAR), np.zeros(lanes, np.int64)
    since, work = np.full(lanes, NOWHERE), np.zeros(lanes, np.int64)
    for i in order:
        at = start[i]
        for e in range(first[i], first[i + 1]):
            j = neighbour[e]
            if start[j] > NOWHERE:
                at = max(at, start[j] + duration[j] + lag[e])
        one = lane[i]
        fresh, fresh_work = np.int64(FAR), np.int64(0)
        for m in range(mate_first[one], mate_first[one + 1]):
            mate = mates[m]
            gap = shift[mate, one] if mate != one else 1
            k = place[i] - gap
            if k < 0 or k >= length[mate]:
                continue
            j = rows[row_first[mate] + k]
            if start[j] == NOWHERE:
                continue
            least[one] = min(least[one], start[j])
            all_work[one] += duration[j]
            fresh = min(fresh, start[j])
            fresh_work += duration[j]
            if start[j] >= since[one]:
                work[one] += duration[j]
        if fresh < FAR:
            for h, w in ((least[one], all_work[one]), (fresh, fresh_work)):
                if since[one] == NOWHERE or h + w > since[one] + work[one]:
                    since[one], work[one] = h, w
            at = max(at, since[one] + work[one])
        start[i] = at
    return start
