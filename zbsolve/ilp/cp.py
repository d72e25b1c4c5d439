"""The CP-SAT model of a problem: a start variable for each pass, an interval for each pass and each edge that holds memory.

Also the same model of some ranks with all their streams and pools, for bounds. Searches over ranks' orders (`ranks`) know
one stream a rank, so they miss memory that copies hold. Here the kept ranks have their side streams, their devices, and what
they hold in further pools. Passes of other ranks become lags within a microbatch, and least times before and after. Leaving
out the rest only relaxes the problem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import networkx
import numpy as np
from ortools.sat.python import cp_model

from ..greedy.arrays.problem_arrays import arrays_of
from ..greedy.lists.list_scheduler import schedule_by_start
from ..greedy.syncs import slowing
from ..problem import UNLIMITED, Ints, Problem
from ..problem.tables import WHOLE, Bools, Edges
from ..schedule import Schedule
from ..schedule.timeline import Precedence
from ..util.clock import Clock
from ..util.machine import half_of_cores
from .bounds.bound import STREAMS, Bound, rank_names, serial_length
from .bounds.energy import paths_within
from .bounds.memory_arcs import INFINITE
from .bounds.necessary_arcs import heads_and_tails

FOUND = (cp_model.OPTIMAL, cp_model.FEASIBLE)  # statuses with a solution
MAX_SLOWED_PASSES = 1_000  # with more, the model leaves out slowdowns
NO_LIMIT = 1e6  # seconds: the time limit if effort is the limit


def make_solver(seconds: float, workers: int, *, seed: int | None = None, effort: float | None = None) -> cp_model.CpSolver:
    """A CP-SAT solver with limits. seconds: the time limit. workers: threads. seed: None: CP-SAT's default. effort: a limit
    in CP-SAT's deterministic time in place of seconds, with one thread, for the same answer on every machine."""
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
    """schedule: None if none was found in time. bound: holds for every schedule whose lanes run by number, µs.
    infeasible: whether CP-SAT proved that no schedule is within the limit."""

    schedule: Schedule | None
    bound: int
    infeasible: bool


@dataclass(frozen=True)
class CpModel:
    """The model, open for more constraints: `start[i]`, `end[i]` and `interval[i]` of pass i, and `value`, the objective.
    An end is a variable of its own where other passes may slow the pass."""

    problem: Problem
    model: cp_model.CpModel
    start: list[cp_model.IntVar]
    end: list[cp_model.LinearExpr]
    interval: list[cp_model.IntervalVar]
    value: cp_model.IntVar


def horizon_of(problem: Problem, limit: int) -> int:
    """A time by which all passes of some best schedule end, if its value is at most `limit`, µs.

    For the span that may be later than the limit. But time between the windows of ranks can be cut to the longest lag, so
    all windows and such lags in a row are enough.
    """
    if problem.objective == "makespan":
        return limit
    return problem.ranks * limit + (problem.ranks - 1) * int(problem.edges.lag.max(initial=0))


def build_cp(problem: Problem, bound: int, limit: int, times: tuple[Ints, Ints] | None = None) -> CpModel:
    """A model whose value lies in [bound, limit], µs; it contains a best schedule if one is that good.

    times: if the problem is a part of another one, the least time before the start and after the end of each pass, µs, shape
    (passes,) each. Then the value is the window of these times, and the model only asks whether a solution exists.
    """
    model, horizon = cp_model.CpModel(), limit if times is not None else horizon_of(problem, limit)
    duration, a = problem.passes.duration.tolist(), arrays_of(problem)
    least, behind = (a.depth, a.tail - a.duration) if times is None else times  # else longest paths along edges
    start = [
        model.new_int_var(head, max(head, horizon - d - tail), "")
        for head, d, tail in zip(least.tolist(), duration, behind.tolist(), strict=True)
    ]
    pairs, pace = _meeting(problem), np.full(len(duration), WHOLE)
    np.minimum.at(pace, pairs[:, 0], problem.paces[tuple(problem.passes.kind[pairs.T])])
    most = (-(-problem.passes.duration * WHOLE // pace)).tolist()
    length = [model.new_int_var(d, long, "") if long > d else d for d, long in zip(duration, most, strict=True)]
    end = [
        s + d if long == d else model.new_int_var(d, horizon, "") for s, d, long in zip(start, duration, most, strict=True)
    ]
    interval = [model.new_interval_var(*columns, "") for columns in zip(start, length, end, strict=True)]
    value = model.new_int_var(bound, limit, "value")
    built = CpModel(problem, model, start, end, interval, value)
    _slowed(built, length, pairs, horizon)
    _streams(built)
    _edges(built)
    _memory(built, horizon)
    if times is None:
        _objective(built, horizon)
    else:
        for ended, tail in zip(end, behind.tolist(), strict=True):
            model.add(value >= ended + tail)
    return built


def reach(problem: Problem) -> Bools:
    """reach[i, j]: j comes after i in every schedule, by edges and lanes; shape (passes, passes)."""
    arcs, count = Precedence.of(problem, problem.lanes), len(problem.passes)
    graph = networkx.DiGraph(zip(arcs.before.tolist(), arcs.after.tolist(), strict=True))
    known = np.zeros((count, count), bool)
    for i in reversed(list(networkx.topological_sort(graph))):
        for j in graph[i]:
            known[i] |= known[j]
            known[i, j] = True
    return known


def _meeting(problem: Problem) -> Ints:
    """Pairs (i, j) of passes on one rank, neither of which must wait for the other, where one slows the other; both ways,
    shape (pairs, 2). None of a problem with very many passes: leaving pairs out only relaxes it."""
    if not problem.slowdowns or len(problem.passes) > MAX_SLOWED_PASSES:
        return np.zeros((0, 2), np.int64)
    ordered = reach(problem)
    return np.argwhere(slowing(problem) & ~(ordered | ordered.T))


def _slowed(m: CpModel, length: list[Any], pairs: Ints, horizon: int) -> None:
    """A pass loses work while others slow it: passes of one stream in turn, so their losses add up; of several streams at
    least the one that takes most. Passes here may wait for others, so as not to meet them (see `_with_waits`)."""
    p, lost = m.problem.passes, defaultdict[tuple[int, int], list[Any]](list)
    for i, j in pairs[pairs[:, 0] < pairs[:, 1]].tolist():
        overlap = m.model.new_int_var(0, horizon, "")  # at least the least of these four
        ways = m.end[i] - m.start[j], m.end[j] - m.start[i], length[i], length[j]
        chosen = [m.model.new_bool_var("") for _ in ways]
        m.model.add_exactly_one(chosen)
        for literal, way in zip(chosen, ways, strict=True):
            m.model.add(overlap >= way).only_enforce_if(literal)
        for a, b in ((i, j), (j, i)):
            lost[a, int(p.streams[b])].append((WHOLE - int(m.problem.paces[p.kind[a], p.kind[b]])) * overlap)
    duration = p.duration.tolist()
    for (i, _), losses in lost.items():
        m.model.add(WHOLE * length[i] >= WHOLE * duration[i] + sum(losses))


def _with_waits(schedule: Schedule, start: Ints, end: Ints) -> Schedule:
    """The schedule, or a shorter one in which passes that would slow each other wait as they do in the model's solution,
    by syncs. start, end: those of the solution, µs, shape (passes,)."""
    problem, best, (i, j) = schedule.problem, schedule, _meeting(schedule.problem).T
    apart = (start[i] < end[i]) & (end[i] <= start[j])
    while (met := apart & (schedule.timeline().start[j] < schedule.timeline().end[i])).any():
        waits = [(problem.names[a], problem.names[b]) for a, b in zip(i[met].tolist(), j[met].tolist(), strict=True)]
        schedule = Schedule(problem, schedule.order, (*schedule.syncs, *waits))
        best = min(best, schedule, key=lambda found: found.timeline().value)
    return best


def _streams(m: CpModel) -> None:
    """A stream runs one pass at a time."""
    for rows in m.problem.members.values():
        m.model.add_no_overlap([m.interval[i] for i in rows.tolist()])


def _edges(m: CpModel) -> None:
    """A pass waits for the end of the one before, and for the lag. Lanes run by number (symmetry)."""
    arcs = Precedence.of(m.problem, m.problem.lanes)
    for i, j, lag in zip(arcs.before.tolist(), arcs.after.tolist(), arcs.lag.tolist(), strict=True):
        m.model.add(m.start[j] >= m.end[i] + lag)


def _memory(m: CpModel, horizon: int) -> None:
    """Bytes of edges, each from the start of its first to the end of its second pass, fit the room of every pool."""
    problem = m.problem
    edges = problem.edges
    for pool, capacity in enumerate(problem.room.tolist()):
        rows = problem.edges_in(pool)
        if edges.bytes[rows].sum() <= capacity or capacity == UNLIMITED:
            continue
        held, demand = [], []
        for i, j, size in zip(*(c[rows].tolist() for c in (edges.before, edges.after, edges.bytes)), strict=True):
            length = m.model.new_int_var(0, horizon, "")
            held.append(m.model.new_interval_var(m.start[i], length, m.end[j], ""))
            demand.append(size)
        m.model.add_cumulative(held, demand, capacity)


def _objective(m: CpModel, horizon: int) -> None:
    """Makespan: the last end. Span: the longest window of a rank from its first start to its last end."""
    problem, model = m.problem, m.model
    if problem.objective == "makespan":
        for end in m.end:
            model.add(m.value >= end)
    else:
        for rank in range(problem.ranks):
            first = model.new_int_var(0, horizon, "")
            for i in np.flatnonzero(problem.passes.rank == rank).tolist():
                model.add(first <= m.start[i])
                model.add(m.value >= m.end[i] - first)
    model.minimize(m.value)


def refutes(problem: Problem, bound: int, clock: Clock) -> bool:
    """Whether CP-SAT proves, in the time of the clock, that no schedule has a value below `bound`, µs."""
    solver = timed_solver(clock)
    status = solver.solve(build_cp(problem, 0, bound - 1).model)
    clock.spend(solver.response_proto.deterministic_time)
    return status == cp_model.INFEASIBLE


def timed_solver(clock: Clock) -> cp_model.CpSolver:
    """A solver whose limit is the time left on the clock."""
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

    incumbent: a schedule; or a value in µs: then any schedule of that value or less is wanted. bound: a known lower bound,
    µs. seconds: the time limit. effort: deterministic time in place of seconds, for the same answer on every machine, with
    one thread. solver: one whose limits are set already.
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
    found = schedule_by_start(problem, starts)
    if problem.slowdowns:
        found = _with_waits(found, starts, np.array([solver.value(end) for end in built.end], np.int64))
    return CpResult(found, max(bound, proven), False)


# --- Some ranks ---


SolverFor = Callable[[float, float | None], cp_model.CpSolver]  # from seconds, and effort if that is the limit
MAX_RANK_PASSES = 400  # of one rank: with more, CP-SAT proves little
MAX_STEP_PASSES = 64  # the same if side streams have only passes of the whole step
MAX_FAILURES = 2  # tries of a rank without an answer, after which it is left
TRY_SHARE, MIN_SECONDS = 0.25, 0.02  # of the time left, for one try; the least time that is worth one


def holds_beside(problem: Problem) -> bool:
    """Whether side passes, or further pools, hold limited memory, and ranks are small enough for these bounds. If only
    passes of the whole step hold it (parameters, gradients), ranks must be smaller: CP-SAT then takes minutes that
    its deterministic time does not count, and proves little."""
    e, computing, repeated = problem.edges, problem.computing, problem.in_microbatch
    held = (e.bytes > 0) & ~(computing[e.before] & computing[e.after])
    room = problem.room
    where = np.where(e.pool > 0, problem.ranks - 1 + e.pool, problem.passes.rank[e.before])
    moving = bool((repeated[e.before] & repeated[e.after])[held].any())
    small = np.bincount(problem.passes.rank).max() <= (MAX_RANK_PASSES if moving else MAX_STEP_PASSES)
    return bool(small and (room[where[held]] < UNLIMITED).any())


def ranks_alone(problem: Problem, ranks: tuple[int, ...]) -> tuple[Problem, Ints, Ints]:
    """The passes of these ranks as a problem, with the longest paths over other ranks as lags; and for each pass the least
    time before its start and after its end, µs, within the window of the first of the ranks."""
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
    """Whether these ranks (for the span: one) alone need `value` µs or more; None if the solver finds no answer in time."""
    alone, head, tail = ranks_alone(problem, ranks)
    if int((head + alone.passes.duration + tail).max()) >= value:
        return True
    status = solver.solve(build_cp(alone, 0, value - 1, (head, tail)).model)
    return None if status == cp_model.UNKNOWN else status == cp_model.INFEASIBLE


def higher_stream_bounds(
    problem: Problem, low: int, incumbent: Ints, clock: Clock, seconds: float, solver_for: SolverFor
) -> Iterator[Bound]:
    """Higher bounds than `low`, µs, from one rank after the other, for so many seconds. Ranks that start last come first:
    there the time between forward and backward is shortest, so copies cost most.

    Bisection: each rank is asked whether it needs half of the difference to the incumbent's value more, and so on.
    incumbent: that value, µs, shape (1,), which another thread may lower. solver_for: makes the solver of one question.
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
