"""When each pass runs, and what ranks hold, on lanes and microbatches: no table of passes is made.

Written apart from every search and from `timeline`, to be believed: `check` rests on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..problem import Ints, Problem
from ..util.loops import compiled


def earliest_starts(one: Problem, few: int, order: Sequence[Ints]) -> Ints:
    """Earliest starts, µs, shape (lanes, few), where every rank runs its order; −1 for passes that wait for each other.
    Each lane stands `few` times in the order of its rank."""
    e = one.edges
    rows = np.argsort(e.after, kind="stable")
    first = np.searchsorted(e.after[rows], np.arange(len(one.passes) + 1)).astype(np.int64)
    ends = np.cumsum([0, *(len(own) for own in order)]).astype(np.int64)
    columns = e.before[rows], e.lag[rows], one.passes.duration, np.concatenate(order), ends
    found: Ints = compiled(_earliest)(few, first, *(np.ascontiguousarray(column, np.int64) for column in columns))
    return found


def _earliest(few: int, first: Ints, source: Ints, lag: Ints, duration: Ints, order: Ints, ends: Ints) -> Ints:
    """`earliest_starts`: the ranks in turn, down and up again, each as far as what it waits for is known."""
    ranks, lanes = len(ends) - 1, len(duration)
    start = np.full((lanes, few), -1, np.int64)
    count = np.zeros(lanes, np.int64)
    at, free = ends[:-1].copy(), np.zeros(ranks, np.int64)
    moved = True
    while moved:
        moved = False
        for turn in range(2 * ranks):
            rank = turn if turn < ranks else 2 * ranks - 1 - turn
            while at[rank] < ends[rank + 1]:
                lane = order[at[rank]]
                j = count[lane]
                begin = free[rank]
                for e in range(first[lane], first[lane + 1]):
                    known = start[source[e], j]
                    if known < 0:
                        begin = -1
                        break
                    begin = max(begin, known + duration[source[e]] + lag[e])
                if begin < 0:
                    break
                start[lane, j] = begin
                free[rank] = begin + duration[lane]
                count[lane] += 1
                at[rank] += 1
                moved = True
    return start


def peaks(one: Problem, order: Sequence[Ints]) -> Ints:
    """The most bytes that each rank holds at once, shape (ranks,): on one stream the order alone decides."""
    change = one.taken - one.freed
    return np.array([int((np.cumsum(change[own]) + one.freed[own]).max()) for own in order], np.int64)


def value_of(one: Problem, start: Ints) -> int:
    """Makespan or span, as the objective says, of starts, shape (lanes, microbatches), µs."""
    end = start[:, -1] + one.passes.duration
    if one.objective == "makespan":
        return int(end.max() - start[:, 0].min())
    first, last = np.full(one.ranks, int(end.max())), np.zeros(one.ranks, np.int64)
    np.minimum.at(first, one.passes.rank, start[:, 0])
    np.maximum.at(last, one.passes.rank, end)
    return int((last - first).max())
