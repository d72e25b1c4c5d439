"""The CP-SAT model of a problem: a start a pass, an interval a pass and an edge that holds memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from ..greedy.arrays.problem_arrays import arrays_of
from ..greedy.lists.list_scheduler import schedule_by_start
from ..problem import UNLIMITED, Ints, Problem
from ..schedule import Schedule
from ..util.machine import half_of_cores
from .bounds.bound import serial_length
from .cp_solver import FOUND, make_solver


@dataclass(frozen=True)
class CpResult:
    """`schedule` is None where none was found in time; `bound` (µs) holds for every schedule of the problem whose
    lanes run in table order; `infeasible` where CP-SAT proved that there is none at or under the limit."""

    schedule: Schedule | None
    bound: int
    infeasible: bool


@dataclass(frozen=True)
class CpModel:
    """The model, open for more constraints: `start[i]` and `interval[i]` of pass i, and `value`, the objective."""

    problem: Problem
    model: cp_model.CpModel
    start: list[cp_model.IntVar]
    interval: list[cp_model.IntervalVar]
    value: cp_model.IntVar


def horizon_of(problem: Problem, limit: int) -> int:
    """µs by which the passes of some best schedule of value at most `limit` have ended.

    With the span as objective that can be later than the limit. Time between the windows of all ranks may be cut to the
    longest lag, so all windows and lags one after the other are enough.
    """
    if problem.objective == "makespan":
        return limit
    lag = int(problem.edges.lag.max()) if len(problem.edges) else 0
    return problem.ranks * limit + (problem.ranks - 1) * lag


def build_cp(problem: Problem, bound: int, limit: int, times: tuple[Ints, Ints] | None = None) -> CpModel:
    """A model whose value lies in [bound, limit], µs; it holds a best schedule where one is that good.

    times: of each pass the least time before its start and after its end, µs, shape (passes,) each, where the problem is a
    part of another. Then the value is the window that these times are for, and no objective: the question is whether one is.
    """
    model, horizon = cp_model.CpModel(), limit if times is not None else horizon_of(problem, limit)
    duration = problem.passes.duration.tolist()
    least, behind = times if times is not None else _least_times(problem)
    start = [
        model.new_int_var(head, max(head, horizon - d - tail), "")
        for head, d, tail in zip(least.tolist(), duration, behind.tolist(), strict=True)
    ]
    interval = [model.new_fixed_size_interval_var(s, d, "") for s, d in zip(start, duration, strict=True)]
    value = model.new_int_var(bound, limit, "value")
    built = CpModel(problem, model, start, interval, value)
    _streams(built)
    _edges(built)
    _lanes(built)
    _memory(built, horizon)
    if times is None:
        _objective(built, horizon)
    else:
        for one, d, tail in zip(start, duration, behind.tolist(), strict=True):
            model.add(value >= one + d + tail)
    return built


def _least_times(problem: Problem) -> tuple[Ints, Ints]:
    """The longest paths along edges to each pass's start, and from its end to the end of all, µs."""
    a = arrays_of(problem)
    return a.depth, a.tail - a.duration


def _streams(m: CpModel) -> None:
    """A stream runs one pass at a time."""
    for rows in m.problem.members.values():
        m.model.add_no_overlap([m.interval[i] for i in rows.tolist()])


def _edges(m: CpModel) -> None:
    """A pass waits for the end of the one before, and for the lag."""
    edges, duration = m.problem.edges, m.problem.passes.duration.tolist()
    for i, j, lag in zip(edges.before.tolist(), edges.after.tolist(), edges.lag.tolist(), strict=True):
        m.model.add(m.start[j] >= m.start[i] + duration[i] + lag)


def _lanes(m: CpModel) -> None:
    """Passes of one kind, stage and rank run in table order (symmetry)."""
    duration = m.problem.passes.duration.tolist()
    for rows in m.problem.lanes:
        for i, j in zip(rows.tolist(), rows[1:].tolist(), strict=False):
            m.model.add(m.start[j] >= m.start[i] + duration[i])


def _memory(m: CpModel, horizon: int) -> None:
    """What edges hold in a pool, from the start of the pass before to the end of the pass after, fits its room."""
    problem = m.problem
    edges, duration = problem.edges, problem.passes.duration.tolist()
    for pool, capacity in enumerate(problem.room.tolist()):
        rows = problem.edges_in(pool)
        if edges.bytes[rows].sum() <= capacity or capacity == UNLIMITED:
            continue
        held, demand = [], []
        for i, j, size in zip(*(c[rows].tolist() for c in (edges.before, edges.after, edges.bytes)), strict=True):
            length = m.model.new_int_var(0, horizon, "")
            held.append(m.model.new_interval_var(m.start[i], length, m.start[j] + duration[j], ""))
            demand.append(size)
        m.model.add_cumulative(held, demand, capacity)


def _objective(m: CpModel, horizon: int) -> None:
    """Makespan: the last end. Span: the longest window of a rank from its first start to its last end."""
    problem, model = m.problem, m.model
    duration = problem.passes.duration.tolist()
    if problem.objective == "makespan":
        for i, start in enumerate(m.start):
            model.add(m.value >= start + duration[i])
    else:
        for rank in range(problem.ranks):
            first = model.new_int_var(0, horizon, "")
            for i in np.flatnonzero(problem.passes.rank == rank).tolist():
                model.add(first <= m.start[i])
                model.add(m.value >= m.start[i] + duration[i] - first)
    model.minimize(m.value)


def refutes(problem: Problem, bound: int, seconds: float) -> bool:
    """Whether CP-SAT proves within `seconds` that no schedule has a value under `bound` (µs)."""
    built = build_cp(problem, 0, bound - 1)
    return make_solver(seconds, half_of_cores()).solve(built.model) == cp_model.INFEASIBLE


def _value(known: Schedule | int) -> int:
    return known if isinstance(known, int) else int(known.timeline().value)


def solve_cp(
    problem: Problem,
    incumbent: Schedule | int | None,
    bound: int,
    seconds: float,
    *,
    effort: float | None = None,
    solver: cp_model.CpSolver | None = None,
) -> CpResult:
    """Search with CP-SAT for a better schedule than `incumbent`, or a proof that there is none. Where `incumbent` is a value
    in µs, the search asks for a schedule of that value or less.

    `effort`: deterministic time instead of seconds (the same answer on every machine, one thread). solver: one that has its
    limits already.
    """
    limit = serial_length(problem) if incumbent is None else _value(incumbent)
    built = build_cp(problem, min(bound, limit), limit)
    if isinstance(incumbent, Schedule):
        for variable, start in zip(built.start, incumbent.timeline().start.tolist(), strict=True):
            built.model.add_hint(variable, start)
    if solver is None:
        solver = make_solver(seconds, half_of_cores() if effort is None else 1, seed=0, effort=effort)
    status = solver.solve(built.model)
    if status == cp_model.INFEASIBLE:
        return CpResult(None, limit, True)
    proven = int(np.ceil(solver.best_objective_bound - 1e-6)) if status != cp_model.UNKNOWN else bound
    if status not in FOUND:
        return CpResult(None, max(bound, proven), False)
    found: Ints = np.array([solver.value(s) for s in built.start], np.int64)
    return CpResult(schedule_by_start(problem, found), max(bound, proven), False)
