"""Serial schedule generation where passes on side streams hold memory: orders that fit, for however little memory.

One pass after the other is appended to its rank's order, the one with the least target first (Kolisch, 1996). A pass on a
side stream that takes memory (a gather) comes right before the first pass that waits for it, every other one as soon as its
inputs are there. The passes of a lane keep their order: bytes that lie from the first of them, or to the last, count on it.
A pass that would need a new one can be put off, so that all that waits for the same memory runs together.
"""

from __future__ import annotations

from contextlib import suppress
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ...schedule import Schedule
from ...timeline import Floats
from ...util.errors import NotFound
from ..arrays.problem_arrays import ProblemArrays, arrays_of
from ..side_streams.side_stream import rooms_beside, with_room_for_them, with_side_streams, without_side_streams
from .list_scheduler import deepest_first, list_schedule


def serial_schedule(problem: Problem, target: Floats | Ints, put_off: float) -> Schedule | None:
    """The schedule that targets give, shape (passes,), µs; a pass that needs a new pass on a side stream is put off by so
    many µs. None where the order runs into the capacity."""
    order = _Serial(problem, arrays_of(problem), target, put_off).order()
    if order is None:
        return None
    plain = without_side_streams(problem)
    place = np.full(len(problem.passes), -1, np.int64)
    rest = np.setdiff1d(np.arange(len(problem.passes)), problem.side_stream)
    place[rest] = np.arange(len(rest))
    sequences: dict[str, list[int]] = {stream: [] for stream in plain.streams}
    for i in order:
        for stream in problem.passes.stream_sets[problem.passes.streams[i]]:
            sequences[stream].append(int(place[i]))
    return with_side_streams(problem, Schedule.of(plain, sequences))


def serial_targets(problem: Problem) -> list[Floats]:
    """Targets to begin with, shape (passes,) each, µs: one microbatch after the other; one stage after the other; and the
    starts that the list scheduler gives the passes of compute streams, with more and with less memory left for side
    streams."""
    a, whole = arrays_of(problem), int(problem.passes.duration.sum())
    found = [np.asarray(one, np.float64) for one in (a.account * whole + a.depth, a.depth * (1 + whole) + a.account)]
    rest = np.setdiff1d(np.arange(len(problem.passes)), problem.side_stream)
    for room in reversed(rooms_beside(problem)):
        plain = with_room_for_them(problem, room)
        if plain is not None:
            with suppress(NotFound):
                start = list_schedule(plain, deepest_first(plain)).timeline().start
                found.append(np.zeros(len(problem.passes)))
                found[-1][rest] = start
    return found


class _Serial:
    """What serial generation knows. waiting: how many of a pass's inputs are not there; bytes used of each rank; passes that
    wait for memory, by rank. on_demand: takes memory on a side stream."""

    def __init__(self, problem: Problem, a: ProblemArrays, target: Floats | Ints, put_off: float) -> None:
        self.a, self.target, self.put_off = a, target.tolist(), put_off
        self.taken, self.freed, self.rank = a.taken.tolist(), a.freed.tolist(), a.rank.tolist()
        self.capacity = a.capacity.tolist()
        self.waiting, self.used = a.inputs.tolist(), [0] * len(self.capacity)
        count = len(self.rank)
        self.side, self.done = np.zeros(count, bool), [False] * count
        self.side[problem.side_stream] = True
        self.on_demand = (self.side & (a.taken > 0)).tolist()
        self.behind = [-1] * count  # the next pass of its lane
        for lane in (rows.tolist() for rows in problem.lanes if not self.side[rows[0]]):
            for i, j in pairwise(lane):
                self.behind[i] = j
                self.waiting[j] += 1
        self.needs: list[list[int]] = [[] for _ in range(count)]
        for i in np.flatnonzero(self.on_demand).tolist():
            for j in self._after(i):
                self.needs[j].append(i)
        self.ready: list[tuple[float, int]] = []
        self.stuck: list[list[int]] = [[] for _ in self.capacity]
        self.found: list[int] = []

    def order(self) -> list[int] | None:
        """Passes of compute streams in order; None where one never fits."""
        for i in [i for i, count in enumerate(self.waiting) if count == 0]:
            self._arrived(i)
        while self.ready:
            _, i = heappop(self.ready)
            if not self.done[i]:
                self._append(i)
        return self.found if all(done or side for done, side in zip(self.done, self.side.tolist(), strict=True)) else None

    def _after(self, i: int) -> list[int]:
        found: list[int] = self.a.out_pass[self.a.out_first[i] : self.a.out_first[i + 1]].tolist()
        return found

    def _arrived(self, i: int) -> None:
        """All inputs of pass i are there."""
        if self.on_demand[i]:
            for j in self._after(i):
                self._one_less(j)
        elif self.side[i]:
            self._run(i)
        else:
            new = any(not self.done[k] for k in self.needs[i])
            heappush(self.ready, (self.target[i] + self.put_off * new, i))

    def _one_less(self, j: int) -> None:
        self.waiting[j] -= 1
        if self.waiting[j] == 0:
            self._arrived(j)

    def _append(self, i: int) -> None:
        """Pass i comes next on its rank, or waits there for memory."""
        rank, new = self.rank[i], [k for k in self.needs[i] if not self.done[k]]
        more = self.taken[i] + sum(self.taken[k] for k in new)
        limit = self.capacity[rank]
        if limit < UNLIMITED and more and self.used[rank] + more > limit:
            self.stuck[rank].append(i)
            return
        for k in new:
            self.done[k] = True
            self.used[rank] += self.taken[k] - self.freed[k]
            for j in self._after(k):  # they need nothing new any more
                if self.waiting[j] == 0 and not self.done[j] and self.put_off:
                    heappush(self.ready, (self.target[j], j))
        self.found.append(i)
        self._run(i)

    def _run(self, i: int) -> None:
        self.done[i] = True
        rank = self.rank[i]
        self.used[rank] += self.taken[i] - self.freed[i]
        if self.freed[i] and self.stuck[rank]:
            again, self.stuck[rank] = self.stuck[rank], []
            for j in again:
                heappush(self.ready, (self.target[j], j))
        for j in self._after(i):
            self._one_less(j)
        if self.behind[i] >= 0:
            self._one_less(self.behind[i])
