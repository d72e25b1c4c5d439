"""The least memory at which a step repeats strictly, a round a period: CP-SAT on the library's `PeriodicModel`, and without
it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
from ortools.sat.python import cp_model

from zbsolve import Infeasible, Problem
from zbsolve.ilp.cp import FOUND
from zbsolve.ilp.steady.periodic import PeriodicModel
from zbsolve.ilp.steady.rounds import rounds_of


@dataclass(frozen=True)
class PeriodicSchedule:
    """One round's passes, repeated every `period` µs. offset[name]: the start of each pass of the problem's last round, µs.
    memory: bytes on the fullest rank. proven: no strictly periodic schedule of this period needs less."""

    period: int
    offset: dict[str, int]
    memory: int
    proven: bool


def least_memory(problem: Problem, period: int | None = None, seconds: float = 10.0, seed: int = 0) -> PeriodicSchedule:
    """The least memory at which the problem's placement repeats every `period` µs. The problem's capacity plays no part.

    period: by default the work of the busiest rank for one round, so that only the ramps have a bubble. Raises Infeasible
    where no schedule repeats in this period, BadInput where a pass occupies several streams.
    """
    rounds = rounds_of(replace(problem, capacity=None))
    time = rounds.work if period is None else period
    model = PeriodicModel(rounds, time)
    memory = model.model.new_int_var(0, model.max_bytes, "memory")
    for held in model.held():
        model.model.add(held <= memory)
    model.model.minimize(memory)
    status, solver = model.solve(seconds, seed)
    if status == cp_model.INFEASIBLE:
        raise Infeasible(f"period {time} µs: no schedule repeats so often")
    if status not in FOUND:
        raise Infeasible(f"period {time} µs: none found in {seconds} s")
    start = dict(zip((problem.names[i] for i in rounds.rows), model.starts(solver), strict=True))
    return PeriodicSchedule(time, start, int(solver.value(memory)), status == cp_model.OPTIMAL)


def exhaustive_memory(problem: Problem, period: int) -> int | None:
    """The same by trying all starts: each pass starts less than two periods behind the last moment at which an input of its
    own is there. For a step of few short passes that has no updates. None where no schedule repeats so often."""
    rounds = rounds_of(problem)
    e, duration, streams = problem.edges, problem.passes.duration[rounds.rows].tolist(), problem.passes.streams[rounds.rows]
    inputs = list(zip(*(column.tolist() for column in rounds.edges), strict=True))
    holding = np.flatnonzero((e.bytes > 0) & (rounds.round[e.after] == rounds.last))
    arcs = rounds.into(e.before[holding], e.after[holding], problem.passes.rank[e.before[holding]])
    held = list(zip(*(column.tolist() for column in arcs[:3]), e.bytes[holding].tolist(), strict=True))
    order = list[int]()
    while len(order) < len(duration):
        ready = {row for row in range(len(duration)) if all(i in order for i, j, *_ in inputs if j == row)}
        order += sorted(ready - set(order))
    shared = [pair for pair in combinations(order, 2) if streams[pair[0]] == streams[pair[1]]]
    least = None
    for delays in product(range(2 * period), repeat=len(order) - 1):
        start = [0] * len(order)
        for row, delay in zip(order, (0, *delays), strict=True):
            start[row] = delay + max((start[i] + duration[i] + lag for i, j, lag, _ in inputs if j == row), default=0)
        if all(duration[i] <= (start[j] - start[i]) % period <= period - duration[j] for i, j in shared):
            memory = [0] * (problem.ranks * period)
            for (i, j, rank, size), now in product(held, range(period)):
                memory[rank * period + now] += size * ((now - start[i]) // period - (now - start[j] - duration[j]) // period)
            least = max(memory) if least is None else min(least, max(memory))
    return least
