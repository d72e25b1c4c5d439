"""Large-neighbourhood search: CP-SAT re-orders a part of a schedule while the rest keeps its order.

The parts are windows of time over all ranks, over a few neighbouring ranks, and whole ranks (Shaw, 1998). Passes outside
keep the order that they have among each other, so their times may still move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from ortools.sat.python import cp_model

from ..clock import Clock
from ..greedy.list_scheduler import from_starts
from ..problem import Ints
from ..schedule import Schedule
from .cp import build

FREE = 150  # passes that a neighbourhood frees at first; grows while CP-SAT finishes them, shrinks while it does not


def neighbourhoods(schedule: Schedule, clock: Clock, seed: int, bound: Callable[[], int]) -> Iterator[Schedule | None]:
    """Better schedules than `schedule`, one after the other, until the clock ends; None after a part without one."""
    rng = np.random.default_rng(seed)
    best, size = schedule, FREE
    while clock.left > 0 and best.timeline().value > bound():
        free = _part(best, rng, size)
        found, finished = _reorder(best, free, clock, int(rng.integers(1 << 30)), bound())
        size = min(len(free) * 2, int(size * 1.15)) if finished else max(20, int(size * 0.8))
        if found is not None and found.timeline().value < best.timeline().value:
            best = found
            yield best
        else:
            # An equal schedule is taken too: it lets the search drift over plateaus.
            best = best if found is None or found.timeline().value > best.timeline().value else found
            yield None


def _part(schedule: Schedule, rng: np.random.Generator, size: int) -> Ints:
    """About `size` passes around a random moment, on all ranks or on a range of them."""
    timeline, problem = schedule.timeline(), schedule.problem
    ranks = problem.ranks
    width = ranks if rng.random() < 0.4 else int(rng.integers(1, max(2, ranks // 2 + 1)))
    low = int(rng.integers(0, ranks - width + 1))
    rows = np.flatnonzero((problem.passes.rank >= low) & (problem.passes.rank < low + width))
    moment = rng.random() * timeline.makespan
    distance = np.abs((timeline.start[rows] + timeline.end[rows]) / 2 - moment)
    near: Ints = rows[np.argsort(distance, kind="stable")[:size]]
    return near


def _reorder(schedule: Schedule, free: Ints, clock: Clock, seed: int, bound: int) -> tuple[Schedule | None, bool]:
    """The best schedule with the passes of `free` re-ordered, and whether CP-SAT finished."""
    problem, timeline = schedule.problem, schedule.timeline()
    value = int(timeline.value)
    horizon = int(timeline.makespan) * (1 if problem.objective == "makespan" else 2)
    built = build(problem, min(bound, value), value, horizon)
    duration = problem.passes.duration.tolist()
    loose = set(free.tolist())
    for rows in schedule.sequences.values():
        fixed = [i for i in rows.tolist() if i not in loose]
        for i, j in zip(fixed, fixed[1:], strict=False):
            built.model.add(built.start[j] >= built.start[i] + duration[i])
    for variable, start in zip(built.start, timeline.start.tolist(), strict=True):
        built.model.add_hint(variable, start)
    solver = cp_model.CpSolver()
    limit = min(clock.left, 3.0)
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = limit
    if clock.counted:
        solver.parameters.max_time_in_seconds = 1e6
        solver.parameters.max_deterministic_time = limit
    status = solver.solve(built.model)
    clock.spend(solver.response_proto.deterministic_time + 0.05)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, False
    found = np.array([solver.value(s) for s in built.start], np.int64)
    return from_starts(problem, found), status == cp_model.OPTIMAL
