"""Necessary arcs: who must wait for whom in every schedule whose lanes run in table order; longest paths along them.

Three sources: the problem's edges; each lane's chain (its passes share a stream and run in order); and memory: where
the passes up to `b` have taken and what `a` and the passes after it free does not fit together, `b` waits for `a`.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numba
import numpy as np
from numpy.typing import NDArray

from ..greedy.arrays import arrays, compressed
from ..problem import Ints, Problem

NOWHERE = -(1 << 60)


class Arcs(NamedTuple):
    """Arcs in compressed rows both ways, and a topological order; lag from the end of one pass to the start of the next.

    depth: least start of every pass, µs; after: least time from its end to the end of all.
    """

    out_first: Ints
    out_pass: Ints
    out_lag: Ints
    in_first: Ints
    in_pass: Ints
    in_lag: Ints
    order: Ints
    depth: Ints
    after: Ints


_made: WeakKeyDictionary[Problem, Arcs] = WeakKeyDictionary()


def arcs(problem: Problem) -> Arcs:
    """The problem's necessary arcs, remembered while the problem lives."""
    if problem not in _made:
        _made[problem] = _make(problem)
    return _made[problem]


def _make(problem: Problem) -> Arcs:
    edges, count = problem.edges, len(problem.passes)
    before, after = [edges.before], [edges.after]
    for rows in problem.lanes:
        before.append(rows[:-1])
        after.append(rows[1:])
    for b, a in _memory_arcs(problem):
        before.append(b)
        after.append(a)
    tails, heads = np.concatenate(before), np.concatenate(after)
    lags = np.concatenate([edges.lag, np.zeros(len(tails) - len(edges), np.int64)])
    result = _with_order(count, tails, heads, lags)
    if len(result.order) < count:  # lanes against the graph: no such schedule exists, any bound holds; keep to the graph
        result = _with_order(count, edges.before, edges.after, edges.lag)
    zero, duration = np.zeros(count, np.int64), problem.passes.duration
    depth = longest(result.order, result.out_first, result.out_pass, result.out_lag, duration, zero)
    after_end = longest(result.order[::-1].copy(), result.in_first, result.in_pass, result.in_lag, duration, zero)
    return result._replace(depth=depth, after=after_end)


def _with_order(count: int, before: Ints, after: Ints, lag: Ints) -> Arcs:
    out_first, out_pass, out_lag = compressed(before, count, after, lag)
    in_first, in_pass, in_lag = compressed(after, count, before, lag)
    order = _topological(out_first, out_pass, np.diff(in_first))
    return Arcs(out_first, out_pass, out_lag, in_first, in_pass, in_lag, order, order, order)


def _memory_arcs(problem: Problem) -> list[tuple[Ints, Ints]]:
    """Arcs that memory forces, as pairs of columns (before, after).

    Take a lane `t` that takes and a lane `f` that frees on one rank, and the edges from any lane that comes before `t`
    (or is `t`) to any lane that comes after `f` (or is `f`), all within a microbatch. When pass j of `t` starts, those
    edges of microbatches up to j have taken their bytes; while pass k of `f` has not ended, those from k on are not
    freed. Where the microbatches k … j together exceed the capacity, pass j of `t` must wait for pass k of `f`.
    """
    if problem.capacity is None:
        return []
    a, edges = arrays(problem), problem.edges
    length = np.diff(a.lane_first)
    place = np.zeros(len(a.duration), np.int64)
    place[a.lane_rows] = np.arange(len(place)) - np.repeat(a.lane_first[:-1], length)
    level = np.flatnonzero(place[edges.before] == place[edges.after])
    reach = _reach(a.lane[edges.before[level]], a.lane[edges.after[level]], place[edges.before[level]], length)
    level = level[edges.bytes[level] > 0]
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
                    found.append((a.lane_rows[a.lane_first[f] + k], a.lane_rows[a.lane_first[t] + last[k]]))
    return found


def _reach(source: Ints, target: Ints, place: Ints, length: Ints) -> NDArray[np.bool_]:
    """Lane → lane: whether pass k of the first comes before pass k of the second, for every k; every lane reaches itself."""
    lanes, most = len(length), int(length.max())
    pairs = np.unique((source * lanes + target) * most + place) // most
    reach = np.eye(lanes, dtype=bool)
    for pair, count in zip(*np.unique(pairs, return_counts=True), strict=True):
        i, j = divmod(int(pair), lanes)
        reach[i, j] |= bool(length[i] == length[j] == count)
    for k in range(lanes):
        from_here = np.flatnonzero(reach[:, k])
        reach[from_here] |= reach[k]
    return reach


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def longest(order, first, neighbour, lag, duration, begin):  # type: ignore[no-untyped-def]
    """For each pass the longest path to its start from passes that start at `begin` (NOWHERE: not a source)."""
    result = begin.copy()
    for i in order:
        if result[i] < 0:
            continue
        leave = result[i] + duration[i]
        for e in range(first[i], first[i + 1]):
            j = neighbour[e]
            if leave + lag[e] > result[j]:
                result[j] = leave + lag[e]
    return result
