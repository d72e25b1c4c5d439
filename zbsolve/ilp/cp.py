"""The CP-SAT model of a problem: a start a pass, an interval a pass and an edge that holds memory; and the same of some
ranks with all their streams and pools, others as lags.

Searches over ranks' orders (`ranks`) know one stream a rank, so where copies hold memory they miss what matters. Here the
kept ranks have their side streams, their devices' bytes, and what they hold in further pools. Passes of other ranks are lags
within a microbatch, least times before and least times after. All that is left out only relaxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from ortools.sat.python import cp_model

from ..greedy.arrays.problem_arrays import arrays_of
from ..greedy.lists.list_scheduler import schedule_by_start
from ..problem import UNLIMITED, Ints, Problem
from ..schedule import Schedule
from ..tables import Edges
from ..util.clock import Clock
from ..util.machine import half_of_cores
from .bounds.bound import STREAMS, Bound, rank_names, serial_length
from .bounds.energy import paths_within
from .bounds.memory_arcs import INFINITE
from .bounds.necessary_arcs import heads_and_tails

FOUND = (cp_model.OPTIMAL, cp_model.FEASIBLE)  # the statuses that come with a solution
NO_LIMIT = 1e6  # seconds: what is given where work is counted instead


def make_solver(seconds: float, workers: int, *, seed: int | None = None, effort: float | None = None) -> cp_model.CpSolver:
    """A solver that stops after so many seconds; or after `effort` in CP-SAT's deterministic time, with one thread and no
    limit of seconds: its answer must not depend on the machine. Without a seed it has CP-SAT's own."""
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # Ctrl-C belongs to Python
    solver.parameters.max_time_in_seconds = max(0.0, seconds) if effort is None else NO_LIMIT
    solver.parameters.num_workers = workers if effort is None else 1
    if seed is not None:
        solver.parameters.random_seed = seed
    if effort is not None:
        solver.parameters.max_deterministic_time = max(0.0, effort)
    return solver


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
    return problem.ranks * limit + (problem.ranks - 1) * int(problem.edges.lag.max(initial=0))


def build_cp(problem: Problem, bound: int, limit: int, times: tuple[Ints, Ints] | None = None) -> CpModel:
    """A model whose value lies in [bound, limit], µs; it holds a best schedule where one is that good.

    times: of each pass the least time before its start and after its end, µs, shape (passes,) each, where the problem is a
    part of another. Then the value is the window that these times are for, and no objective: the question is whether one is.
    """
    model, horizon = cp_model.CpModel(), limit if times is not None else horizon_of(problem, limit)
    duration, a = problem.passes.duration.tolist(), arrays_of(problem)
    least, behind = (a.depth, a.tail - a.duration) if times is None else times  # else longest paths along edges
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
        for variable, d, tail in zip(start, duration, behind.tolist(), strict=True):
            model.add(value >= variable + d + tail)
    return built


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


def refutes(problem: Problem, bound: int, clock: Clock) -> bool:
    """Whether CP-SAT proves in the time of the clock that no schedule has a value under `bound` (µs)."""
    solver = timed_solver(clock)
    status = solver.solve(build_cp(problem, 0, bound - 1).model)
    clock.spend(solver.response_proto.deterministic_time)
    return status == cp_model.INFEASIBLE


def timed_solver(clock: Clock) -> cp_model.CpSolver:
    """A solver that has what is left of the clock."""
    seed, effort = (0, clock.left) if clock.counted else (None, None)
    return make_solver(clock.left, half_of_cores(), seed=seed, effort=effort)


def solve_cp(
    problem: Problem,
    incumbent: Schedule | int | None,
    bound: int,
    seconds: float,
    *,
    effort: float | None = None,
    solver: cp_model.CpSolver | None = None,
) -> CpResult:
    """Search with CP-SAT for a better schedule than `incumbent`, or a proof that there is none.

    incumbent: a schedule, or a value in µs; then the search asks for a schedule of that value or less.
    bound: µs that no schedule undercuts.
    effort: deterministic time in place of seconds: the same answer on every machine, one thread.
    solver: one that has its limits already.
    """
    known = int(incumbent.timeline().value) if isinstance(incumbent, Schedule) else incumbent
    limit = serial_length(problem) if known is None else known
    built = build_cp(problem, min(bound, limit), limit)
    if isinstance(incumbent, Schedule):
        for variable, start in zip(built.start, incumbent.timeline().start.tolist(), strict=True):
            built.model.add_hint(variable, start)
    if solver is None:
        solver = make_solver(seconds, half_of_cores(), seed=0, effort=effort)
    status = solver.solve(built.model)
    if status == cp_model.INFEASIBLE:
        return CpResult(None, limit, True)
    proven = int(np.ceil(solver.best_objective_bound - 1e-6)) if status != cp_model.UNKNOWN else bound
    if status not in FOUND:
        return CpResult(None, max(bound, proven), False)
    starts: Ints = np.array([solver.value(s) for s in built.start], np.int64)
    return CpResult(schedule_by_start(problem, starts), max(bound, proven), False)


# --- Some ranks ---


SolverFor = Callable[[float, float | None], cp_model.CpSolver]  # of seconds; and of effort, where that is the limit
MAX_RANK_PASSES = 400  # of one rank: CP-SAT tells little of more
MAX_GATHERED_PASSES = 64  # the same where nothing beside computing is of a microbatch
MAX_FAILURES = 2  # tries of a rank without an answer
TRY_SHARE, MIN_SECONDS = 0.25, 0.02  # of the time left for one try; and less is not worth one


def holds_beside(problem: Problem) -> bool:
    """Whether memory with a limit is held by passes on side streams, or in further pools, and ranks are small enough. Where
    only passes of the whole step hold it (gathered parameters, gradients), ranks have to be smaller: CP-SAT then takes
    minutes that its deterministic time does not count, and tells little."""
    e, computing, repeated = problem.edges, problem.computing, problem.in_microbatch
    held = (e.bytes > 0) & ~(computing[e.before] & computing[e.after])
    room = problem.room
    where = np.where(e.pool > 0, problem.ranks - 1 + e.pool, problem.passes.rank[e.before])
    moving = bool((repeated[e.before] & repeated[e.after])[held].any())
    small = np.bincount(problem.passes.rank).max() <= (MAX_RANK_PASSES if moving else MAX_GATHERED_PASSES)
    return bool(small and (room[where[held]] < UNLIMITED).any())


def ranks_alone(problem: Problem, ranks: tuple[int, ...]) -> tuple[Problem, Ints, Ints]:
    """The passes of these ranks as a problem, with the longest paths over other ranks as lags; and of each pass the least
    time before its start and after its end, µs, in the window of the first of the ranks."""
    p = problem.passes
    rows = np.flatnonzero(np.isin(p.rank, ranks))
    before, after = _pairs(p.microbatch[rows])
    span = paths_within(problem, rows[before], rows[after])
    linked = span >= 0
    before, after = before[linked], after[linked]
    lag = span[linked] - p.duration[rows[before]] - p.duration[rows[after]]
    alone = replace(problem, capacity=None).only(rows)
    capacity = None if problem.capacity is None else problem.capacity[: alone.ranks]
    alone = replace(alone, capacity=capacity, edges=alone.edges + Edges.of(before, after, lag=np.maximum(0, lag)))
    head, tail = (time[rows] for time in heads_and_tails(problem, ranks[0]))
    return alone, head, tail


def _pairs(microbatch: Ints) -> tuple[Ints, Ints]:
    """All pairs of two different rows with the same microbatch."""
    order = np.argsort(microbatch, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(microbatch[order])) + 1)
    pairs = [np.stack(np.meshgrid(group, group, indexing="ij")).reshape(2, -1) for group in groups]
    before, after = np.concatenate(pairs, axis=1)
    return before[before != after], after[before != after]


def streams_bound(ranks: tuple[int, ...], value: int) -> Bound:
    """The bound that `ranks_refute` proved, with its proof in words."""
    proof = "CP-SAT searched the orders of all passes there, copies and memory too, whatever other ranks do"
    return Bound(value, f"{rank_names(ranks)}: {proof}", STREAMS, ranks)


def ranks_refute(problem: Problem, ranks: tuple[int, ...], value: int, solver: cp_model.CpSolver) -> bool | None:
    """Whether these ranks alone take `value` µs or more; None where the solver does not tell in its time. For the span there
    is one rank."""
    alone, head, tail = ranks_alone(problem, ranks)
    if int((head + alone.passes.duration + tail).max()) >= value:
        return True
    status = solver.solve(build_cp(alone, 0, value - 1, (head, tail)).model)
    return None if status == cp_model.UNKNOWN else status == cp_model.INFEASIBLE


def higher_stream_bounds(
    problem: Problem, low: int, incumbent: Ints, clock: Clock, seconds: float, solver_for: SolverFor
) -> Iterator[Bound]:
    """Higher bounds than `low`, µs, from one rank after the other, within the seconds. Ranks that can start last come first:
    their backwards come soonest behind their forwards, so copies between them take the most.

    Each rank is asked whether it takes half of what is missing to the incumbent's value, and so on. incumbent: that value,
    µs, shape (1,), which another thread may lower. solver_for: gives CP-SAT for one question.
    """
    first = np.full(problem.ranks, INFINITE)
    np.minimum.at(first, problem.passes.rank, heads_and_tails(problem, -1)[0] if problem.objective == "makespan" else 0)
    share = clock.share(seconds)
    for rank in np.argsort(-first, kind="stable").tolist():
        top, failures = int(incumbent[0]), 0
        while low < min(top, int(incumbent[0])) < INFINITE and failures < MAX_FAILURES:
            left = share.left
            if left <= MIN_SECONDS:
                return
            value, effort = low + (top - low + 1) // 2, left * TRY_SHARE
            solver = solver_for(effort, effort if clock.counted else None)
            answer = ranks_refute(problem, (rank,), value, solver)
            clock.spend(solver.response_proto.deterministic_time)
            if answer:
                low = value
                yield streams_bound((rank,), value)
            else:
                top, failures = value - 1, failures + (answer is None)
