"""The least memory at which a step repeats strictly, a round a period: CP-SAT on the library's `PeriodicModel`."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
