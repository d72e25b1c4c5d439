"""When passes of slices would begin if all took as long: the reference by which attention work is shared out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..problem import Problem
from ..tables import Ints


class Slots(NamedTuple):
    """start: the slot in which each pass begins, shape (passes,); −1 for what is no forward and no backward. A forward
    takes one slot, a backward (B and its W, or BW) `backward` of them."""

    start: Ints
    backward: int


class _Lane(NamedTuple):
    """Rows of the forwards and of the backwards of a stage, in the order in which they run."""

    stage: int
    forward: list[int]
    backward: list[int]


def even_slots(problem: Problem) -> Slots:
    """The slots of a step in sequence slices, one forward one backward: a rank runs a forward where one
    is ready and it holds fewer than vn + p − 1 − s slices (v stages of the rank, n slices, p ranks, s its first stage), else
    a backward. On placement single that is SlimPipe's order (arXiv 2504.14519, section 4.1)."""
    p = problem.passes
    back = problem.rows("B", "BW")
    length = max(1, round(_mean(problem, back) / max(1.0, _mean(problem, problem.rows("F")))))
    return Slots(_Walk(problem, length).starts(), length) if len(back) else Slots(np.full(len(p), -1), length)


def _mean(problem: Problem, rows: Ints) -> float:
    return float(problem.passes.duration[rows].mean()) if len(rows) else 0.0


class _Walk:
    """The slots, one after the other."""

    def __init__(self, problem: Problem, length: int) -> None:
        p, self.length = problem.passes, length
        self.start = np.full(len(p), -1, np.int64)
        self.ranks: list[list[_Lane]] = [[] for _ in range(problem.ranks)]
        sign = {"F": p.slice, "B": -p.slice}
        forward, backward = problem.rows("F"), problem.rows("B", "BW")
        self.stages = int(p.stage[forward].max()) + 1
        for stage in range(self.stages):
            lanes = []
            for rows, turn in ((forward, sign["F"]), (backward, sign["B"])):
                mine = rows[p.stage[rows] == stage]
                lanes.append(mine[np.lexsort((turn[mine], p.microbatch[mine]))].tolist())
            self.ranks[int(p.rank[lanes[0][0]])].append(_Lane(stage, *lanes))
        self.place, count = problem.parts.tolist(), int(problem.parts.max()) + 1
        never = np.iinfo(np.int64).max
        self.forward_end = np.full((self.stages + 1, count), never)
        self.backward_end = np.full((self.stages + 1, count), never)
        self.forward_end[-1] = 0  # before stage 0 is the batch: index −1
        self.limit = [len(mine) * problem.slices + problem.ranks - 1 - min(one.stage for one in mine) for mine in self.ranks]

    def starts(self) -> Ints:
        """The slot of every pass."""
        free, held = [0] * len(self.ranks), [0] * len(self.ranks)
        done = [{one.stage: [0, 0] for one in mine} for mine in self.ranks]
        left, now = sum(len(one.forward) + len(one.backward) for mine in self.ranks for one in mine), 0
        while left:
            begun = 0
            for rank, mine in enumerate(self.ranks):
                if free[rank] <= now and (length := self._begin(mine, done[rank], held, rank, now)):
                    free[rank], begun = now + length, begun + 1
            left -= begun
            if not begun and max(free) <= now:  # every rank waits for room: one more slice each
                self.limit = [one + 1 for one in self.limit]
            else:
                now += 1
        return self.start

    def _begin(self, mine: list[_Lane], done: dict[int, list[int]], held: list[int], rank: int, now: int) -> int:
        """Begin a pass of the rank, if one is ready; how many slots it takes, or 0."""
        for lane in reversed(mine):
            at = done[lane.stage]
            if at[0] < len(lane.forward) and held[rank] < self.limit[rank]:
                row = lane.forward[at[0]]
                if self.forward_end[lane.stage - 1, self.place[row]] <= now:
                    at[0], held[rank] = at[0] + 1, held[rank] + 1
                    self.start[row] = now
                    self.forward_end[lane.stage, self.place[row]] = now + 1
                    return 1
        for lane in reversed(mine):
            at = done[lane.stage]
            if at[1] < len(lane.backward):
                row = lane.backward[at[1]]
                ready = self.forward_end if lane.stage == self.stages - 1 else self.backward_end
                other = lane.stage if lane.stage == self.stages - 1 else lane.stage + 1
                if ready[other, self.place[row]] <= now:
                    at[1], held[rank] = at[1] + 1, held[rank] - 1
                    self.start[row] = now
                    self.backward_end[lane.stage, self.place[row]] = now + self.length
                    return self.length
        return 0
