"""Passes on side streams: all-to-alls and gradient exchanges, which take streams of their own and no memory.

Schedulers that give each rank one order see the problem without them: their time becomes a lag between what they link.
Their own order follows from that of the other passes, and is made here for all schedulers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import Edges, Ints, Problem
from ..schedule import Schedule
from ..timeline import simulate
from .problem_arrays import compressed_rows


def without_side_streams(problem: Problem) -> Problem:
    """The problem without its passes on side streams. What waited for such a pass waits, its time longer, for what that pass
    waited for."""
    rows = problem.side_stream
    if not len(rows):
        return problem
    away = np.zeros(len(problem.passes), bool)
    away[rows] = True
    e, duration = problem.edges, problem.passes.duration
    first, into, delay = compressed_rows(e.after, len(away), e.before, e.lag)
    before, after, lag, size = e.before, e.after, e.lag, e.bytes
    while len(here := np.flatnonzero(away[before])):  # each turn goes one pass further back
        count = first[before[here] + 1] - first[before[here]]
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        source = np.repeat(first[before[here]], count) + offset
        more = (
            into[source],
            np.repeat(after[here], count),
            np.repeat(lag[here] + duration[before[here]], count) + delay[source],
            np.zeros(len(source), np.int64),
        )
        rest = np.flatnonzero(~away[before])
        columns = zip((before, after, lag, size), more, strict=True)
        before, after, lag, size = (np.concatenate([column[rest], new]) for column, new in columns)
    return replace(problem, edges=Edges.of(before, after, lag=lag, bytes=size)).only(np.flatnonzero(~away))


def with_side_streams(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule of `problem` with the order of `schedule`, one of the problem `without_side_streams`.

    Passes on side streams run in the order in which what they wait for has ended. Raises Deadlock where the given order
    has one.
    """
    if not len(problem.side_stream):
        return Schedule(problem, schedule.order, schedule.syncs)
    given = Schedule(problem, schedule.order, schedule.syncs).sequences
    timeline = simulate(problem, list(given.values()))
    turn = np.arange(len(timeline)) if timeline.turn is None else timeline.turn
    sequences: dict[str, Ints] = dict(given)
    for stream, rows in problem.members.items():
        if stream not in given:
            sequences[stream] = rows[np.lexsort((turn[rows], timeline.start[rows]))]
    return Schedule.of(problem, sequences, schedule.syncs)
