"""Collectives as one pass each, on one stream, so that the order of each stream alone decides a step.

Ranks come to collectives in one order, and none ends before all ranks have begun it. So a collective is no shorter than a
pass on a stream of its own, which waits for all that its parts wait for and takes as long as the longest of them: where the
step with such passes holds, all parts can start when they do. What passes on side streams hold, other passes hold in their
place (see `side_stream`). Other passes on side streams keep their streams, apart from the collectives'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...problem import Ints, Problem
from ...schedule import Schedule
from ...tables import Edges
from ...util.errors import Deadlock
from ..side_streams.side_stream import behind_collectives, held_by_others, in_their_place, room_beside, with_side_streams
from ..side_streams.syncs import with_syncs

STREAM = ("collectives",)


@dataclass(frozen=True, eq=False)
class OneStream:
    """A step, and the same with one pass a collective, `one`. rows: which pass of the step each of its passes stands for; of
    a collective it is the first part."""

    problem: Problem
    one: Problem
    rows: Ints

    def seen(self, schedule: Schedule) -> Schedule:
        """A schedule of the step as one of `one`. A collective begins when all of its parts have."""
        number, start = self.problem.collective, schedule.timeline().start.copy()
        parts, begun = np.flatnonzero(number >= 0), np.zeros(int(number.max()) + 1, np.int64)
        np.maximum.at(begun, number[parts], start[parts])
        start[parts] = begun[number[parts]]
        turn, place = _turns(schedule, np.arange(len(number)), len(number)), np.zeros(len(number), np.int64)
        place[self.rows] = np.arange(len(self.rows))
        orders = {stream: place[rows] for stream, rows in schedule.sequences.items() if stream in self._computing}
        for stream in self.one.members.keys() - orders.keys():
            rows = self.one.members[stream]
            orders[stream] = rows[np.lexsort((turn[self.rows[rows]], start[self.rows[rows]]))]
        return Schedule.of(self.one, orders)

    def whole(self, schedule: Schedule) -> Schedule | None:
        """A schedule of `one` as one of the step: parts of a collective come where it does, and passes that keep nobody
        waiting behind all of them. Where memory does not hold so, side streams are ordered anew; None where that does not
        hold either."""
        computing = {stream: self.rows[rows] for stream, rows in schedule.sequences.items() if stream in self._computing}
        try:
            found = Schedule.of(self.problem, computing | self._beside(schedule))
            room = self.problem.capacity
            if room is None or np.less_equal(found.timeline().peak_bytes, room).all():
                return with_syncs(found)
            return with_side_streams(self.problem, Schedule.of(self.problem, computing))
        except Deadlock:
            return None

    def _beside(self, schedule: Schedule) -> dict[str, Ints]:
        """The orders of side streams in a schedule of `one`."""
        problem, number = self.problem, self.problem.collective
        key, turn = np.zeros(len(number), np.int64), _turns(schedule, self.rows, len(number))
        key[self.rows] = schedule.timeline().start
        parts = np.flatnonzero(number >= 0)
        first = self.rows[number[self.rows] >= 0]  # of each collective
        first = first[np.argsort(number[first])][number[parts]]
        key[parts], turn[parts] = key[first], turn[first]
        key[behind_collectives(problem)] += key.max(initial=0) + 1
        beside = {stream: rows for stream, rows in problem.members.items() if stream not in self._computing}
        return {stream: rows[np.lexsort((turn[rows], key[rows]))] for stream, rows in beside.items()}

    @property
    def _computing(self) -> set[str]:
        """The streams whose passes both have."""
        return {stream for stream, rows in self.problem.members.items() if self.problem.computing[rows].any()}


def _turns(schedule: Schedule, rows: Ints, count: int) -> Ints:
    """The place of each pass on its stream, shape (count,): rows says which passes those of the schedule are."""
    found = np.zeros(count, np.int64)
    for mine in schedule.sequences.values():
        found[rows[mine]] = np.arange(len(mine))
    return found


def on_one_stream(problem: Problem) -> OneStream | None:
    """The step with one pass a collective; None where it has none, or where other passes cannot hold what passes on side
    streams do."""
    number, room = problem.collective, room_beside(problem, 1.0)
    if number.max(initial=-1) < 0 or not held_by_others(problem) or (room is not None and room.min() < 0):
        return None
    parts = np.flatnonzero(number >= 0)
    _, first = np.unique(number[parts], return_index=True)
    stands_for = np.arange(len(number))
    stands_for[parts] = parts[first][number[parts]]
    p = problem.passes
    duration, streams = p.duration.copy(), p.streams.copy()
    np.maximum.at(duration, stands_for, p.duration)
    streams[parts] = len(p.stream_sets)
    passes = replace(p, duration=duration, streams=streams, stream_sets=(*p.stream_sets, STREAM))
    rows = np.unique(stands_for)
    capacity = None if room is None else tuple(room.tolist())
    return OneStream(
        problem, replace(problem, passes=passes, edges=_edges(problem, stands_for), capacity=capacity).only(rows), rows
    )


def _edges(problem: Problem, stands_for: Ints) -> Edges:
    """Edges between what passes stand for, each once with the longest lag; bytes are those of passes that compute."""
    e, aside, count = problem.edges, ~problem.computing, len(stands_for)
    before, after = stands_for[e.before], stands_for[e.after]
    size = np.where(aside[e.before] | aside[e.after], 0, problem.device_bytes)
    order = np.lexsort((-e.lag, before * count + after))
    order = order[before[order] != after[order]]
    pair = before[order] * count + after[order]
    new = np.concatenate([[True], pair[1:] != pair[:-1]])[: len(pair)]
    total = np.bincount(np.cumsum(new) - 1, size[order]).astype(np.int64)
    kept = order[new]
    held, taker, freer = in_their_place(problem)
    found = Edges.of(before[kept], after[kept], lag=e.lag[kept], bytes=total)
    return found + Edges.of(taker, freer, bytes=problem.device_bytes[held])
