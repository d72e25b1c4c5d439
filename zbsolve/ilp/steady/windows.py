"""A bound from microbatches in a row: what waves of forwards and backwards that cross cost each microbatch of a long step.

On two ranks, forwards that go down and backwards that come up meet. Where they do, one of them waits, or microbatches keep
distances at which none does. No rank alone knows of it. Here one rank is kept with all that it runs and holds, and all
others with the passes for which others wait, in a model of microbatches 0 … n in a row.

**Bound.** Let T be a time for which the model has no solution: no microbatches 0 … n keep all rules of the problem while for
each i from 1 to n the first pass of microbatch i on the kept rank starts less than i · T behind that of microbatch 0. Then a
step of m > n microbatches takes at least h + (m − k) · T + r(k) + t for some k from 1 to n: h is the least time before the
rank's first pass, t the least time after its last pass, and r(k) the least time in which the rank runs k microbatches.

*Proof.* Let s(j) be the start of the rank's first pass of microbatch j; all its other passes of j follow this one. Passes
keep all rules if others are left out: no order, no time and no memory of those that stay depends on them. So any
microbatches j … j + n of a schedule are a solution of the model but for the distances. As it has none, for each j < m − n
there is an i ≤ n with s(j + i) ≥ s(j) + i · T. Such steps lead from microbatch 0 to some j ≥ m − n, with s(j) ≥ h + j · T.
From s(j) on the rank has k = m − j microbatches to run. ∎

For r(k): let K whole microbatches fit the memory that first passes take. As lanes run in order, the first pass of j + K
waits until a pass of j has freed some of it, so s(j + K) ≥ s(j) + l for the least life l of such an edge. Where this was
used q = ⌊(k − 1) / K⌋ times, the work of k − q · K microbatches is left.

This holds for lanes that run by number, as bounds do (if microbatches are alike, nothing is lost), and for starts at whole
µs. Nothing is said of microbatches before, so microbatch 0 can come at a good moment: n must be long enough for that to be
used up. CP-SAT proves that there is no solution. It needs the order of each two passes as a variable of its own, and that
orders follow from each other: a pass before another one on one rank means the same for those before the first on a rank
they share with those behind the other.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, permutations, product
from math import ceil
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from ...greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph, rank_work
from ...greedy.blocks.building_block import longest_ways
from ...problem import UNLIMITED, Ints, Problem
from ...util.clock import Clock
from ...util.machine import half_of_cores
from ..bounds.bound import AREA, IN_A_ROW, Bound, least_before_rounding, rounded_up, value_unit
from ..bounds.necessary_arcs import WHOLE_STEP, heads_and_tails
from ..cp import make_solver

LEAST_IN_A_ROW, PER_FLIGHT = 24, 4  # microbatches of a model: so many, and so many for each that fits the rank's memory
MAX_ORDERS = 20_000  # orders of two passes in a model; with more, there is no bound
LONG = 4  # a step has at least so many times the microbatches of its model
FIRST_STEP, LAST_STEP = 0.02, 0.003  # shares of T by which it is raised
TRIES = 5  # the time is enough for so many that use up their limit
FAR = 1 << 40  # µs


class Row(NamedTuple):
    """What the model is about: a microbatch's graph; the kept rank, and its first lane; the lanes that are in; n."""

    g: MicrobatchGraph
    rank: int
    first: int
    lanes: Ints
    n: int

    def rest(self) -> Ints:
        """r(k) for k = 1 … n, µs, shape (n,)."""
        g, k = self.g, np.arange(1, self.n + 1)
        edges = np.flatnonzero((g.before == self.first) & (g.bytes > 0))
        life = int(longest_ways(g, np.array([self.first]))[g.after[edges], 0].min())
        whole = max(1, int(g.capacity[self.rank]) // int(g.bytes[edges].sum()))
        turns = (k - 1) // whole
        return np.asarray(turns * life + (k - turns * whole) * int(rank_work(g)[self.rank]))


def row_of(problem: Problem, rank: int) -> Row | None:
    """The model around one rank of a step of one microbatch. None where there is no such rank, where none of its passes
    comes before all others, where its memory has no limit, or where the model would be too large."""
    g = microbatch_graph(problem)
    if g is None or not 0 <= rank < problem.ranks or g.capacity[rank] >= UNLIMITED:
        return None
    own = g.rank_lanes[g.rank_lane_first[rank] : g.rank_lane_first[rank + 1]]
    first = int(own[0])  # lanes are in a topological order
    held = int(g.bytes[(g.before == first)].sum())
    if (longest_ways(g, own[:1])[own, 0] < 0).any() or held == 0:
        return None
    lanes = np.flatnonzero((g.sink == 0) | (g.rank == rank))
    n = max(LEAST_IN_A_ROW, PER_FLIGHT * int(g.capacity[rank] // held))
    pairs = sum(count * (count - 1) // 2 for count in np.bincount(g.rank[lanes]).tolist())
    return Row(g, rank, first, lanes, n) if pairs * n * n <= MAX_ORDERS else None


def higher_in_a_row(problem: Problem, count: int, known: Bound, clock: Clock) -> Bound:
    """The bound of a step of `count` microbatches, where it is higher than the known one by a rank's memory; else that. It
    takes the time that is left on the clock, or less. problem: the step of one microbatch."""
    row = row_of(problem, known.ranks[-1]) if known.kind == AREA else None
    if row is None or count < LONG * row.n:
        return known
    time, step, best, limit = Fraction(known.value, count), FIRST_STEP, known, clock.left / TRIES
    while step >= LAST_STEP and clock.left > 0:
        tried = Fraction(round(time * 1000 * (1 + Fraction(step))), 1000)
        if _refuted(row, tried, min(limit, clock.left), clock):
            time = tried
            best = max(best, _bound(row, _value(problem, row, count, time)), key=lambda bound: bound.value)
        else:
            step /= 2
    return rounded_up(best, value_unit(problem))


def proven_in_a_row(problem: Problem, count: int, stated: Bound, clock: Clock) -> Bound | None:
    """The stated bound, where this model of its rank proves it again in the time of the clock; else None."""
    row = row_of(problem, *stated.ranks) if len(stated.ranks) == 1 else None
    if row is None or count <= row.n:
        return None
    least = least_before_rounding(stated.value, value_unit(problem)) - _around(problem, row)
    k, rest = np.arange(1, row.n + 1).tolist(), row.rest().tolist()
    time = max(Fraction(least - r, count - before) for before, r in zip(k, rest, strict=True))
    return _bound(row, stated.value) if time > 0 and _refuted(row, time, clock.left, clock) else None


def _value(problem: Problem, row: Row, count: int, time: Fraction) -> int:
    """The bound of a step of so many microbatches, µs."""
    k, rest = np.arange(1, row.n + 1).tolist(), row.rest().tolist()
    return _around(problem, row) + min(ceil((count - last) * time) + r for last, r in zip(k, rest, strict=True))


def _around(problem: Problem, row: Row) -> int:
    """h + t, µs; 0 for the span of the rank."""
    if problem.objective != "makespan":
        return 0
    head, tail = heads_and_tails(problem, WHOLE_STEP)
    return int(head[row.g.passes[row.first, 0]]) + int(tail[problem.passes.rank == row.rank].min())


def _bound(row: Row, value: int) -> Bound:
    why = f"rank {row.rank} and all passes that others wait for: no {row.n + 1} microbatches in a row come as fast"
    return Bound(value, f"{why}, waves that cross and memory counted", IN_A_ROW, (row.rank,))


def _refuted(row: Row, time: Fraction, seconds: float, clock: Clock) -> bool:
    """Whether CP-SAT proves in this time that the model with this T has no solution."""
    solver = make_solver(seconds, half_of_cores(), seed=0, effort=seconds if clock.counted else None)
    status = solver.solve(_Model(row, time).model)
    clock.spend(solver.response_proto.deterministic_time)
    return int(status) == cp_model.INFEASIBLE


class _Model:
    """start[l, j]: the start of lane l's pass of microbatch j, µs."""

    def __init__(self, row: Row, time: Fraction) -> None:
        self.row, self.model, g = row, cp_model.CpModel(), row.g
        # If there is a solution, one is within `far` of any of its starts: no time in which nothing runs needs to be longer
        # than the longest lag, and cutting it keeps all rules and makes no distance longer.
        far = (row.n + 1) * int(g.duration.sum() + len(g.duration) * g.lag.max(initial=0))
        self.start = {
            (lane, j): self.model.new_int_var(0, 2 * far, "") for lane in row.lanes.tolist() for j in range(row.n + 1)
        }
        self._edges()
        self._orders()
        self._memory()
        self.model.add(self.start[row.first, 0] == far)
        for k in range(1, row.n + 1):
            self.model.add(self.start[row.first, k] <= far + ceil(k * time) - 1)

    def _edges(self) -> None:
        """Passes wait for their inputs, and in each lane for the pass before."""
        g, start = self.row.g, self.start
        for lane, j in start:
            if (lane, j + 1) in start:
                self.model.add(start[lane, j + 1] >= start[lane, j] + int(g.duration[lane]))
        for a, b, lag in zip(g.before.tolist(), g.after.tolist(), g.lag.tolist(), strict=True):
            for j in range(self.row.n + 1) if (b, 0) in start else ():
                self.model.add(start[b, j] >= start[a, j] + int(g.duration[a]) + lag)

    def _orders(self) -> None:
        """Each rank runs one pass at a time."""
        g, lanes = self.row.g, self.row.lanes
        self.behind = longest_ways(g, np.arange(len(g.duration))).T >= 0  # [a, b]: b is a or waits for it
        self.first_is: dict[tuple[int, int, int, int], cp_model.IntVar] = {}  # (a, i, b, j): a's pass of i comes first
        here = [lanes[g.rank[lanes] == rank].tolist() for rank in range(len(g.capacity))]
        for a, b in (pair for own in here for pair in combinations(own, 2)):
            for i, j in product(range(self.row.n + 1), repeat=2):
                if i > j or not self.behind[a, b]:
                    self._order(a, i, b, j)
        for (a, i, b, j), known in self.first_is.items():
            for other in ((a, i - 1, b, j), (a, i, b, j + 1)):
                if other in self.first_is:
                    self.model.add_implication(known, self.first_is[other])
        for own, others in permutations(here, 2):
            for a, b in permutations(own, 2):
                self._follow(a, b, others)

    def _order(self, a: int, i: int, b: int, j: int) -> None:
        first = self.first_is[a, i, b, j] = self.model.new_bool_var("")
        one, other, duration = self.start[a, i], self.start[b, j], self.row.g.duration
        self.model.add(one + int(duration[a]) <= other).only_enforce_if(first)
        self.model.add(other + int(duration[b]) <= one).only_enforce_if(~first)

    def _follow(self, a: int, b: int, others: list[int]) -> None:
        """If a pass of lane a comes before one of lane b on their rank, so does each pass before the one on another rank
        than each pass behind the other."""
        before = [lane for lane in others if self.behind[lane, a]]
        behind = [lane for lane in others if self.behind[b, lane]]
        if not before or not behind or before[-1] == behind[0]:
            return
        for i, j in product(range(self.row.n + 1), repeat=2):
            known, follows = self._before(a, i, b, j), self._before(before[-1], i, behind[0], j)
            if known is not None and follows is not None:
                self.model.add_implication(known, follows)

    def _before(self, a: int, i: int, b: int, j: int) -> cp_model.LiteralT | None:
        """Whether a's pass of i comes before b's of j; None where that is known."""
        if (a, i, b, j) in self.first_is:
            return self.first_is[a, i, b, j]
        return ~self.first_is[b, j, a, i] if (b, j, a, i) in self.first_is else None

    def _memory(self) -> None:
        """What the kept rank holds fits."""
        g, model = self.row.g, self.model
        held = np.flatnonzero((g.bytes > 0) & (g.rank[g.before] == self.row.rank))
        intervals, sizes = [], []
        for a, b, size in zip(g.before[held].tolist(), g.after[held].tolist(), g.bytes[held].tolist(), strict=True):
            for j in range(self.row.n + 1):
                end = self.start[b, j] + int(g.duration[b])
                intervals.append(model.new_interval_var(self.start[a, j], model.new_int_var(0, FAR, ""), end, ""))
                sizes.append(size)
        model.add_cumulative(intervals, sizes, int(g.capacity[self.row.rank]))
