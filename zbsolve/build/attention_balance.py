"""Which rank computes how much attention for which pass: ranks that would wait help passes that are in their attention. The
attention is divided by a simulation of passes of slices that all take equally long."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from ..problem import Problem
from ..problem.tables import Ints
from ..schedule import Schedule
from ..util.errors import BadInput
from .attention_costs import AttentionExchange, attending, parts_of, traffic


class Handing(NamedTuple):
    """A pass that hands over a part of its attention to another rank.

    row: of the pass in the problem's table, a forward or backward.
    blocks: how many blocks of its attention.
    behind: the row of the helper's own pass after which it computes them; −1: before that of row `ahead`.
    ahead: see `behind`.
    """

    row: int
    blocks: int
    behind: int
    ahead: int = -1


# The place of each kind of pass in the reference order: at the forward or backward of its own stage, or of the model's last
# or first stage, and by how many half slots after (negative: before) it.
FORWARD, BACKWARD = 0, 1
OWN, LAST, FIRST = 0, 1, 2
TURNS = {
    **dict.fromkeys(("F", "O", "AF"), (FORWARD, OWN, 0)),
    **dict.fromkeys(("B", "BW", "R", "AB"), (BACKWARD, OWN, 0)),
    "X": (BACKWARD, OWN, -1),
    "W": (BACKWARD, OWN, 1),
    **dict.fromkeys(("VB", "S", "VR"), (FORWARD, LAST, 1)),
    **dict.fromkeys(("T", "VG"), (BACKWARD, LAST, 1)),
    "VE": (FORWARD, FIRST, -1),
    "VS": (BACKWARD, FIRST, 1),
}


def one_forward_one_backward(problem: Problem) -> Schedule:
    """A step in slices in the order of `even_slots`, with W right after its B, and a recompute right before it. Raises
    BadInput for passes of other kinds, whose place is not known."""
    p, start = problem.passes, even_slots(problem)
    for kind in p.kinds:
        if kind not in TURNS:
            raise BadInput(f"attention exchange: the problem has passes of kind {kind}: add those afterwards")
    number, last = problem.parts, int(p.stage[problem.rows("F")].max())
    begun = np.zeros((2, problem.stages, int(number.max()) + 1), np.int64)
    for which, kinds in ((FORWARD, ("F",)), (BACKWARD, ("B", "BW"))):
        rows = problem.rows(*kinds)
        begun[which, p.stage[rows], number[rows]] = start[rows]
    turn = np.zeros(len(p), np.int64)
    for kind in p.kinds:
        rows, (which, where, later) = problem.rows(kind), TURNS[kind]
        stage = (p.stage[rows], np.full(len(rows), last), np.zeros(len(rows), np.int64))[where]
        turn[rows] = 2 * begun[which, stage, number[rows]] + later
    order = {name: rows[np.argsort(turn[rows], kind="stable")] for name, rows in problem.members.items()}
    return Schedule.of(problem, order)


def balanced(schedule: Schedule, costs: AttentionExchange) -> list[Handing]:
    """The attention that is handed over if ranks run the orders of `schedule`, of a step in even slices without an exchange.

    The step is simulated. Whenever k ranks would wait, the k passes with the most attention left hand some of it over,
    each to one of these ranks: the amount with which the later of both ends earliest. At that moment no other choice of k
    passes, with one helper each, leaves less to the pass with the most: all other passes keep theirs, and each of these
    k is left with as little as one helper allows. costs: the result of `AttentionExchange.checked`.
    """
    return _Simulation(schedule, costs).handings()


class _Running(NamedTuple):
    """A pass that may hand over attention: when its attention begins, and µs of the work after it."""

    row: int
    begin: int
    behind: int


class _Simulation:
    """A simulation of the step. end: the end of each pass that has begun, as far as it is known."""

    def __init__(self, schedule: Schedule, costs: AttentionExchange) -> None:
        problem = schedule.problem
        p, e, count = problem.passes, problem.edges, len(problem.passes)
        self.problem, self.costs, self.duration = problem, costs, p.duration.tolist()
        rows = attending(problem)
        self.place = np.full(count, -1, np.int64)
        self.place[rows] = np.arange(len(rows))
        self.parts, self.forward = parts_of(problem, costs, rows), p.are("F")[rows]
        self.after: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        index = problem.index
        chains = [(index[a], index[b], 0) for a, b in schedule.syncs]
        for names in schedule.order.values():
            order = [index[name] for name in names]
            chains += [(a, b, 0) for a, b in zip(order, order[1:], strict=False)]
        for a, b, lag in (*zip(e.before.tolist(), e.after.tolist(), e.lag.tolist(), strict=True), *chains):
            self.after[a].append((b, lag))
        self.waiting = np.bincount([b for row in self.after for b, _ in row], minlength=count).tolist()
        self.ready, self.end = [0] * count, [-1] * count
        self.rank = np.where(problem.computing, p.rank, -1).tolist()
        self.last, self.runs, self.helps = [-1] * problem.ranks, [-1] * problem.ranks, [0] * problem.ranks
        self.first = [index[schedule.order[f"compute:{rank}"][0]] for rank in range(problem.ranks)]
        self.giving: dict[int, _Running] = {}
        self.events: list[tuple[int, int, int]] = []  # (µs; 0: a pass ends, 1: it is ready, 2: look for help; row)
        self.handed: list[Handing] = []

    def handings(self) -> list[Handing]:
        """All handings, in the order in which their helpers begin."""
        for row, waiting in enumerate(self.waiting):
            if waiting == 0:
                heappush(self.events, (0, 1, row))
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, what, row = heappop(self.events)
                if what == 0 and self.end[row] == now:
                    self._ended(row, now)
                elif what == 1:
                    self._start(row, now)
            self._help(now)
        return self.handed

    def _ended(self, row: int, now: int) -> None:
        self.end[row] = -1  # ignore a second event for this end
        self.giving.pop(row, None)
        if self.rank[row] >= 0:
            self.last[self.rank[row]], self.runs[self.rank[row]] = row, -1
        for other, lag in self.after[row]:
            self.ready[other] = max(self.ready[other], now + lag)
            self.waiting[other] -= 1
            if self.waiting[other] == 0:
                heappush(self.events, (self.ready[other], 1, other))

    def _start(self, row: int, now: int) -> None:
        rank, at = self.rank[row], int(self.place[row])
        if rank >= 0 and self.helps[rank] > now:
            heappush(self.events, (self.helps[rank], 1, row))
            return
        self.end[row] = now + self.duration[row]
        heappush(self.events, (self.end[row], 0, row))
        if rank >= 0:
            self.runs[rank] = row
        if at >= 0 and self.parts.blocks[at]:
            begin = now + int(self.parts.before[at])
            self.giving[row] = _Running(row, begin, int(self.parts.behind[at]))
            heappush(self.events, (begin, 2, row))

    def _help(self, now: int) -> None:
        """Let waiting ranks help the passes with the most attention left."""
        idle = [rank for rank, row in enumerate(self.runs) if row < 0 and self.helps[rank] <= now]
        if not idle or not self.giving:
            return
        candidates = [run for run in self.giving.values() if run.begin <= now < self.end[run.row] - run.behind]
        candidates.sort(key=lambda run: (run.behind - self.end[run.row], run.row))
        for rank, running in zip(idle, candidates, strict=False):
            self._hand(running, rank, now)

    def _hand(self, running: _Running, rank: int, now: int) -> None:
        """Hand over as many blocks as let the later of both end earliest; of several such numbers, the least."""
        at, p = int(self.place[running.row]), self.problem.passes
        many = np.arange(int(self.parts.blocks[at]) + 1)
        stage, earlier = np.full(len(many), p.stage[running.row]), np.full(len(many), p.slice[running.row])
        sent = traffic(self.costs, stage, earlier, many, np.full(len(many), not self.forward[at]))
        away = np.rint(many * self.parts.key_time[at]).astype(np.int64)
        forth, back = (self.costs.message(stage, size) for size in sent)
        made = np.maximum(now, running.begin + forth) + away
        done = np.maximum(running.begin + int(self.parts.attention[at]) - away, made + back)
        done[0] = running.begin + int(self.parts.attention[at])
        best = int(done.argmin())
        if best:
            self.handed.append(Handing(running.row, best, self.last[rank], self.first[rank] if self.last[rank] < 0 else -1))
            self.giving.pop(running.row)
            self.helps[rank] = int(made[best])
            self.end[running.row] = int(done[best]) + running.behind
            heappush(self.events, (self.end[running.row], 0, running.row))
            heappush(self.events, (self.helps[rank], 2, running.row))


class _Lane(NamedTuple):
    """Rows of a stage's forwards or backwards, in the order in which they run. way: the number of this visit among all
    that a slice makes to stages, down and up again, from 1 on."""

    way: int
    rows: deque[int]


def even_slots(problem: Problem) -> Ints:
    """The slot in which each pass of a step in slices begins, shape (passes,); −1: it is neither forward nor backward. A
    forward takes one slot, a backward (B and its W, or BW) as many as fit its mean time. One forward one backward: a rank
    runs a forward if one is ready and it holds fewer than vn + p − 1 − s slices (v stages on the rank, n slices, p ranks, s
    its first stage), else a backward. On placement single that is SlimPipe's order (arXiv 2504.14519, section 4.1)."""
    forward, backward = (problem.passes.duration[problem.rows(*kinds)] for kinds in (("F",), ("B", "BW")))
    if not len(backward):
        return np.full(len(problem.passes), -1)
    return _starts(problem, max(1, round(float(backward.mean()) / max(1.0, float(forward.mean())))))


def _lanes(problem: Problem, stages: int) -> list[list[_Lane]]:
    """The lanes of each rank: forwards first, later stages first."""
    p, lanes = problem.passes, [list[_Lane]() for _ in range(problem.ranks)]
    for kinds, sign in ((("F",), 1), (("B", "BW"), -1)):
        rows = problem.rows(*kinds)
        rows = rows[np.lexsort((sign * p.slice[rows], p.microbatch[rows]))]
        for stage in np.unique(p.stage[rows])[::-1].tolist():
            own = rows[p.stage[rows] == stage]
            way = stage + 1 if sign > 0 else 2 * stages - stage
            lanes[int(p.rank[own[0]])].append(_Lane(way, deque(own.tolist())))
    return lanes


def _starts(problem: Problem, length: int) -> Ints:
    """The slot of every pass, by a simulation slot by slot. length: slots of a backward."""
    part, stages = problem.parts.tolist(), int(problem.passes.stage[problem.rows("F")].max()) + 1
    lanes, start = _lanes(problem, stages), np.full(len(problem.passes), -1, np.int64)
    end = np.full((2 * stages + 1, max(part) + 1), np.iinfo(np.int64).max)  # of each visit; 0: the batch, which is ready
    end[0] = 0
    own = [[lane.way - 1 for lane in row if lane.way <= stages] for row in lanes]
    limit = [len(ways) * problem.slices + problem.ranks - 1 - min(ways) for ways in own]
    held, free, left, now = [0] * len(lanes), [0] * len(lanes), sum(len(lane.rows) for row in lanes for lane in row), 0
    while left:
        begun = 0
        for rank, of_rank in enumerate(lanes):
            for lane in of_rank if free[rank] <= now else ():
                forth = lane.way <= stages
                room = not forth or held[rank] < limit[rank]
                if lane.rows and room and end[lane.way - 1, part[lane.rows[0]]] <= now:
                    row, free[rank] = lane.rows.popleft(), now + (1 if forth else length)
                    start[row], end[lane.way, part[row]] = now, free[rank]
                    held[rank], begun = held[rank] + (1 if forth else -1), begun + 1
                    break
        left -= begun
        if not begun and max(free) <= now:  # every rank waits for room: allow one more slice on each
            limit = [slots + 1 for slots in limit]
        else:
            now += 1
    return start
