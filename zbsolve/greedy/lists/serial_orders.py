"""Serial schedule generation where passes on side streams hold memory: orders that fit, even in very little memory.

Passes are appended to their rank's order one by one, the least target first (Kolisch, 1996). A pass on a side stream that
takes memory comes right before the first pass that waits for it; other passes on side streams come as soon as
their inputs are there. Lanes keep their order, since some bytes are held from a lane's first pass or to its last one. A pass
that needs a new one of these can be delayed, so that passes that wait for the same one run together.

If nothing else fits, `one_after_another` runs one microbatch after the other, one pass after the other. If memory is short
in several pools at once (the host and the devices), any rule for the next pass may run into a dead end. Then it backtracks
within the microbatch."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ...schedule import Schedule
from ...timeline import Floats
from ...util.errors import NotFound
from ..arrays.accounts import brings_back
from ..arrays.problem_arrays import ProblemArrays, arrays_of
from ..side_stream import rooms_beside, with_room_for_them, with_side_streams, without_side_streams
from ..syncs import Moments, synced
from .list_scheduler import deepest_first, list_schedule

# --- One microbatch after the other ---


# The priority (0 first) of passes that bring memory back, that copy it out, of all others, and of those that take memory for
# others. Rule 0 brings copies back at once; rule 1 as late as possible; rule 2 copies out as late as possible.
RULES = ((0, 1, 2, 3), (2, 0, 1, 2), (1, 2, 0, 3))
TRIES = 4000  # passes that one rule tries in a microbatch, beyond one try each


def one_after_another(problem: Problem) -> Schedule | None:
    """The schedule that fits as if no two passes ran at once (its edges and syncs may still let them overlap). None if one
    microbatch fits in no order that was tried."""
    order = _Order(problem).all_passes()
    if order is None:
        return None
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    sequences: dict[str, Ints] = {stream: rows[np.argsort(place[rows])] for stream, rows in problem.members.items()}
    return synced(problem, sequences, Moments(2 * place, 2 * place + 1))


class _Order:
    """Makes an order of all passes. used: bytes held in each pool. moves: (pool, bytes taken, bytes freed) of each pass in
    pools with a limit. waiting: how many inputs of each pass are missing. harmless: passes that leave no pool fuller."""

    def __init__(self, problem: Problem) -> None:
        a = arrays_of(problem)
        count = len(problem.passes)
        self.room: list[int] = problem.room.tolist()
        self.used = [0] * len(self.room)
        self.moves: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        for pool in np.flatnonzero(problem.room < UNLIMITED).tolist():
            taken, freed = problem.moved(pool)
            for i in np.flatnonzero((taken > 0) | (freed > 0)).tolist():
                self.moves[i].append((pool, int(taken[i]), int(freed[i])))
        self.harmless = [all(freed >= taken for _, taken, freed in moves) for moves in self.moves]
        out, reserving = np.isin(np.arange(count), a.accounts.copy_out), ~problem.computing & (problem.taken > 0)
        self.kind = np.select([brings_back(problem), out, reserving], [0, 1, 3], 2).tolist()
        self.depth = a.depth.tolist()
        # Lanes keep their order, too.
        before = np.concatenate([problem.edges.before, *(rows[:-1] for rows in problem.lanes)])
        after = np.concatenate([problem.edges.after, *(rows[1:] for rows in problem.lanes)])
        self.waiting: list[int] = np.bincount(after, minlength=count).tolist()
        self.behind: list[list[int]] = [[] for _ in range(count)]
        for i, j in zip(before.tolist(), after.tolist(), strict=True):
            self.behind[i].append(j)
        order = np.argsort(a.account, kind="stable")
        self.accounts = np.split(order, np.flatnonzero(np.diff(a.account[order])) + 1)

    def all_passes(self) -> list[int] | None:
        """All passes in order; None if no order of some microbatch was found."""
        order: list[int] = []
        for rows in self.accounts:
            tried = (self._account(rows.tolist(), rule) for rule in RULES)
            behind = next((passes for passes in tried if passes is not None), None)
            if behind is None:
                return None
            order += behind
        return order

    def _account(self, rows: list[int], rule: tuple[int, ...]) -> list[int] | None:
        """The passes of one microbatch in an order that fits, or None; found by backtracking. rows: its passes."""
        bit = {i: 1 << k for k, i in enumerate(rows)}
        ready = {i for i in rows if self.waiting[i] == 0}
        order: list[int] = []
        done, dead, tries = 0, set[int](), len(rows) + TRIES
        choices = [self._choices(ready, rule)]
        while len(order) < len(rows):
            if choices[-1] and tries > 0:
                i = choices[-1].pop()
                if done | bit[i] in dead:
                    continue
                tries -= 1
                done |= bit[i]
                order.append(i)
                self._move(i, 1, ready, bit)
                choices.append(self._choices(ready, rule))
                continue
            if not order:
                return None
            dead.add(done)
            choices.pop()
            i = order.pop()
            done ^= bit[i]
            self._move(i, -1, ready, bit)
        return order

    def _choices(self, ready: set[int], rule: tuple[int, ...]) -> list[int]:
        """The passes that fit next, the best last, of equals the deepest; a pass alone where it leaves no pool fuller."""
        fit = [i for i in ready if all(self.used[pool] + taken <= self.room[pool] for pool, taken, _ in self.moves[i])]
        fit.sort(key=lambda i: (-rule[self.kind[i]], self.depth[i], -i))
        return next(([i] for i in reversed(fit) if self.harmless[i]), fit)

    def _move(self, i: int, way: int, ready: set[int], account: Collection[int]) -> None:
        """Run pass i (way 1), or undo it (way −1). account: the passes of the microbatch."""
        for pool, taken, freed in self.moves[i]:
            self.used[pool] += way * (taken - freed)
        ready ^= {i}
        for j in self.behind[i]:
            self.waiting[j] -= way
            if self.waiting[j] == 0 and j in account:
                ready.add(j)
            else:
                ready.discard(j)


# --- One pass after the other ---


def serial_schedule(problem: Problem, target: Floats | Ints, put_off: float) -> Schedule | None:
    """The schedule by target starts; None if it runs into a dead end of memory. target: µs, shape (passes,). put_off: µs by
    which a pass that needs a new side pass is delayed."""
    order = _Serial(problem, arrays_of(problem), target, put_off).order()
    if order is None:
        return None
    plain = without_side_streams(problem)
    place = np.cumsum(problem.computing) - 1  # of a compute pass in `plain`
    sequences: dict[str, list[int]] = {stream: [] for stream in plain.streams}
    for i in order:
        for stream in problem.passes.stream_sets[problem.passes.streams[i]]:
            sequences[stream].append(int(place[i]))
    return with_side_streams(problem, Schedule.of(plain, sequences))


def serial_targets(problem: Problem) -> list[Floats]:
    """Target starts to try, µs, shape (passes,) each: one microbatch after the other; one stage after the other; and the
    list scheduler's starts of compute passes, with more and with less memory left for side streams."""
    a, whole = arrays_of(problem), int(problem.passes.duration.sum())
    targets = [np.asarray(key, np.float64) for key in (a.account * whole + a.depth, a.depth * (1 + whole) + a.account)]
    for room in reversed(rooms_beside(problem)):
        plain = with_room_for_them(problem, room)
        if plain is not None:
            with suppress(NotFound):
                start = list_schedule(plain, deepest_first(plain)).timeline().start
                targets.append(np.zeros(len(problem.passes)))
                targets[-1][problem.computing] = start
    return targets


class _Serial:
    """The state of serial generation. waiting: how many inputs of each pass are missing. used: bytes held on each rank.
    stuck: passes that wait for memory, by rank. on_demand: whether a pass takes memory on a side stream. needs: such passes
    that each pass waits for. found: the order so far."""

    def __init__(self, problem: Problem, a: ProblemArrays, target: Floats | Ints, put_off: float) -> None:
        self.a, self.target, self.put_off = a, target.tolist(), put_off
        self.taken, self.freed, self.rank = a.taken.tolist(), a.freed.tolist(), a.rank.tolist()
        self.capacity = a.capacity.tolist()
        self.waiting, self.used = a.inputs.tolist(), [0] * len(self.capacity)
        count = len(self.rank)
        self.side, self.done = ~problem.computing, [False] * count
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
        """Passes of compute streams in order; None if some pass never fits."""
        for i in [i for i, count in enumerate(self.waiting) if count == 0]:
            self._arrived(i)
        while self.ready:
            _, i = heappop(self.ready)
            if not self.done[i]:
                self._append(i)
        return self.found if all(done or side for done, side in zip(self.done, self.side.tolist(), strict=True)) else None

    def _after(self, i: int) -> list[int]:
        return list(self.a.out_pass[self.a.out_first[i] : self.a.out_first[i + 1]].tolist())

    def _arrived(self, i: int) -> None:
        """All inputs of pass i have arrived."""
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
        """Append pass i to its rank's order, or let it wait for memory."""
        rank, new = self.rank[i], [k for k in self.needs[i] if not self.done[k]]
        more = self.taken[i] + sum(self.taken[k] for k in new)
        limit = self.capacity[rank]
        if limit < UNLIMITED and more and self.used[rank] + more > limit:
            self.stuck[rank].append(i)
            return
        for k in new:
            self.done[k] = True
            self.used[rank] += self.taken[k] - self.freed[k]
            for j in self._after(k):  # these need no new side pass any more
                if self.waiting[j] == 0 and not self.done[j] and not self.side[j] and self.put_off:
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
