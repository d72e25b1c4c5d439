"""Large-neighbourhood search: CP-SAT re-orders a part of a schedule while the rest keeps its order (Shaw, 1998).

The part, a neighbourhood, is a run of consecutive passes on each stream of some neighbouring ranks. Passes that nothing in
it leads to keep their times. Passes behind it keep their order, so their times follow. Memory inside a run is what was
held when it began plus what its own passes take and free; the model holds nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from ortools.sat.python import cp_model

from ..greedy.syncs import moments_of, pools_with_syncs, synced
from ..problem import Ints
from ..schedule import Schedule
from ..util.clock import Clock
from .cp import FOUND, NO_LIMIT, make_solver

FIRST_SIZE, MIN_SIZE = 60, 20  # passes of the first neighbourhoods, and at least
GROWTH, SHRINKING = 1.1, 0.7  # times as many passes after CP-SAT has finished one, and after it has not
MAX_SECONDS, MAX_EFFORT = 2.0, 0.5  # for one neighbourhood; in CP-SAT's deterministic time
MIN_PRESOLVED = 20  # passes: fewer are solved faster without presolving
# Where several streams take a pool's memory, CP-SAT takes minutes of more moving passes, which its own measure leaves out:
# such neighbourhoods are passed over, which takes so long an arc.
MOST_WITH_POOLS, SECONDS_PER_ARC = 5_000, 2e-6
ALL_RANKS = 0.3  # how often a neighbourhood is on all ranks
ArcList = list[tuple[int, int, int]]  # (before, after, lag in µs), rows of the table of passes
Runs = dict[
    str, tuple[int, int]
]  # a neighbourhood: stream → first and last + 1 position of the passes that may change places


def better_neighbours(
    known: Callable[[], Schedule], clock: Clock, seed: int, bound: Callable[[], int]
) -> Iterator[Schedule | None]:
    """Better schedules than `known()`, which others may improve meanwhile, one after the other, until the clock ends; None
    after a neighbourhood without one."""
    best = known()
    problem = best.problem
    rng = np.random.default_rng(seed)
    size = float(FIRST_SIZE)
    while clock.left > 0 and best.timeline().value > bound():
        if known().timeline().value < best.timeline().value:
            best = known()
        runs = _random_runs(best, rng, int(size))
        found, finished = _reorder(best, runs, clock, int(rng.integers(1 << 30)), bound())
        size = min(len(problem.passes), size * GROWTH) if finished else max(MIN_SIZE, size * SHRINKING)
        if found is not None and found.timeline().value < best.timeline().value:
            best = found
            yield best
            continue
        if found is not None and found.timeline().value == best.timeline().value:
            best = found  # an equal one lets the search drift over plateaus
        yield None


def _random_runs(schedule: Schedule, rng: np.random.Generator, size: int) -> Runs:
    """About `size` passes around a random moment, on all ranks or on a range of them."""
    timeline, problem = schedule.timeline(), schedule.problem
    ranks = problem.ranks
    width = ranks if rng.random() < ALL_RANKS else int(rng.integers(1, ranks + 1))
    low = int(rng.integers(0, ranks - width + 1))
    moment = rng.random() * timeline.makespan
    each = max(2, size // width)
    runs = {}
    for stream, rows in schedule.sequences.items():
        if len(rows) and low <= problem.passes.rank[rows[0]] < low + width:
            middle = int(np.searchsorted(timeline.start[rows], moment))
            first = max(0, min(middle - each // 2, len(rows) - each))
            runs[stream] = (first, min(len(rows), first + each))
    return runs


def _reorder(schedule: Schedule, runs: Runs, clock: Clock, seed: int, bound: int) -> tuple[Schedule | None, bool]:
    """The best schedule with the neighbourhood re-ordered, and whether CP-SAT finished."""
    arcs, free = _sure_arcs(schedule, runs)
    moving = _moving(arcs, free)
    if len(moving) > MOST_WITH_POOLS and pools_with_syncs(schedule.problem):
        clock.spend(SECONDS_PER_ARC * len(arcs))
        return None, False
    model, start = _model(schedule, runs, arcs, moving, bound)
    limit = NO_LIMIT if clock.counted else min(clock.left, MAX_SECONDS)
    solver = make_solver(limit, 1, seed=seed, effort=MAX_EFFORT)
    solver.parameters.cp_model_presolve = len(free) > MIN_PRESOLVED
    status = solver.solve(model)
    # Building and presolving take real time that CP-SAT's own measure leaves out.
    clock.spend(2 * solver.response_proto.deterministic_time + 2e-4 * len(moving) + 0.02)
    if status not in FOUND:
        return None, False
    order = {stream: rows.copy() for stream, rows in schedule.sequences.items()}
    duration = schedule.problem.passes.duration
    for stream, (a, b) in runs.items():
        rows = order[stream][a:b]
        begins = np.array([solver.value(start[i]) for i in rows.tolist()])
        # What has no length keeps its order among those of one time: the old order goes along the graph.
        order[stream][a:b] = rows[np.lexsort((begins + duration[rows], begins))]
    if not pools_with_syncs(schedule.problem):
        return Schedule.of(schedule.problem, order, schedule.syncs), status == cp_model.OPTIMAL
    timeline = schedule.timeline()
    begin, turn = timeline.start.copy(), np.arange(len(timeline)) if timeline.turn is None else timeline.turn
    for i, variable in start.items():
        begin[i] = solver.value(variable)
    return synced(schedule.problem, order, moments_of(begin, begin + duration, turn)), status == cp_model.OPTIMAL


def _sure_arcs(schedule: Schedule, runs: Runs) -> tuple[ArcList, set[int]]:
    """The arcs that hold whatever order the neighbourhood has: edges, lanes, the order outside, and outside against inside;
    syncs of ranks that it leaves alone; and the neighbourhood's passes."""
    problem = schedule.problem
    edges = problem.edges
    arcs = list(zip(edges.before.tolist(), edges.after.tolist(), edges.lag.tolist(), strict=True))
    free: set[int] = set()
    for stream, rows in schedule.sequences.items():
        a, b = runs.get(stream, (0, 0))
        listed = rows.tolist()
        free |= set(listed[a:b])
        for part in (listed[:a], listed[b:]):
            arcs += [(i, j, 0) for i, j in zip(part, part[1:], strict=False)]
        if a < b:
            arcs += [(listed[a - 1], j, 0) for j in listed[a:b] if a > 0]
            arcs += [(i, listed[b], 0) for i in listed[a:b] if b < len(listed)]
        elif 0 < b < len(listed):
            arcs.append((listed[b - 1], listed[b], 0))
    again = np.zeros(len(problem.passes), bool)  # what takes memory that the neighbourhood orders anew
    for pool in _pools_within(schedule, runs) & set(pools_with_syncs(problem)):
        again |= problem.moved(pool)[0] > 0
    pairs = ((problem.index[a], problem.index[b]) for a, b in schedule.syncs)
    arcs += [(i, j, 0) for i, j in pairs if not again[j]]
    for lane in problem.lanes:
        rows_of_lane = lane.tolist()
        arcs += [(i, j, 0) for i, j in zip(rows_of_lane, rows_of_lane[1:], strict=False) if i in free and j in free]
    return arcs, free


def _pools_within(schedule: Schedule, runs: Runs) -> set[int]:
    """The devices whose ranks have passes on streams that the neighbourhood has runs of, and all pools beside devices."""
    problem = schedule.problem
    ranks = {rank for stream in runs for rank in np.unique(problem.passes.rank[schedule.sequences[stream]]).tolist()}
    return ranks | set(range(problem.ranks, len(problem.room)))


def _moving(arcs: ArcList, free: set[int]) -> set[int]:
    """The neighbourhood and all that it leads to. Every other pass keeps its time."""
    following: dict[int, list[int]] = {}
    for i, j, _ in arcs:
        following.setdefault(i, []).append(j)
    moving, ahead = set(free), list(free)
    while ahead:
        for j in following.get(ahead.pop(), ()):
            if j not in moving:
                moving.add(j)
                ahead.append(j)
    return moving


def _model(
    schedule: Schedule, runs: Runs, arcs: ArcList, moving: set[int], bound: int
) -> tuple[cp_model.CpModel, dict[int, cp_model.IntVar]]:
    """Variables for moving passes only; the objective lies between the bound and what the schedule has now."""
    problem, timeline = schedule.problem, schedule.timeline()
    model = cp_model.CpModel()
    now, duration = timeline.start.tolist(), problem.passes.duration.tolist()
    value = int(timeline.value)
    horizon = int(timeline.makespan) * (1 if problem.objective == "makespan" else 2)
    start = {i: model.new_int_var(0, horizon - duration[i], "") for i in moving}
    several = set(pools_with_syncs(problem))
    for i, variable in start.items():
        model.add_hint(variable, now[i])
    for i, j, lag in arcs:
        if j in moving:
            model.add(start[j] >= (start[i] if i in moving else now[i]) + duration[i] + lag)
    for stream, (a, b) in runs.items():
        rows = schedule.sequences[stream]
        inside = rows[a:b].tolist()
        model.add_no_overlap([model.new_fixed_size_interval_var(start[i], duration[i], "") for i in inside])
        if int(problem.passes.rank[rows[0]]) not in several:
            _memory(model, schedule, rows, (a, b), start, horizon)
    for pool in several & _pools_within(schedule, runs):
        _memory_of_pool(model, schedule, pool, start, horizon)
    goal = model.new_int_var(min(bound, value), value, "value")
    _objective(model, schedule, start, goal)
    model.minimize(goal)
    return model, start


def _memory(
    model: cp_model.CpModel,
    schedule: Schedule,
    rows: Ints,
    run: tuple[int, int],
    start: dict[int, cp_model.IntVar],
    horizon: int,
) -> None:
    """What the run's passes take and free, on top of what is held at its begin, fits the rank's capacity."""
    problem = schedule.problem
    if problem.capacity is None or np.isin(rows[0], problem.side_stream):
        return
    place = {i: k for k, i in enumerate(rows.tolist())}
    a, b = run
    room = problem.capacity[int(problem.passes.rank[rows[0]])]
    edges, duration = problem.edges, problem.passes.duration.tolist()
    within = problem.edges_in(int(problem.passes.rank[rows[0]]))
    if edges.bytes[within].sum() <= room:  # all fits, whatever runs on other streams
        return
    intervals, demands = [], []
    for i, j, size in zip(*(c[within].tolist() for c in (edges.before, edges.after, edges.bytes)), strict=True):
        if place[i] < a and place[j] >= b:
            room -= size
        elif place[j] >= a and place[i] < b and (place[j] < b or place[i] >= a):
            begin = start[i] if place[i] >= a else 0
            end = start[j] + duration[j] if place[j] < b else horizon
            length = model.new_int_var(0, horizon, "")
            intervals.append(model.new_interval_var(begin, length, end, ""))
            demands.append(size)
    if sum(demands) > room:
        model.add_cumulative(intervals, demands, room)


def _memory_of_pool(
    model: cp_model.CpModel, schedule: Schedule, pool: int, start: dict[int, cp_model.IntVar], horizon: int
) -> None:
    """All that a pool holds, where several streams take its memory: no order of one of them decides it."""
    problem, now = schedule.problem, schedule.timeline().start.tolist()
    edges, duration = problem.edges, problem.passes.duration.tolist()
    within = problem.edges_in(pool)
    intervals, demands = [], []
    for i, j, size in zip(*(c[within].tolist() for c in (edges.before, edges.after, edges.bytes)), strict=True):
        begin, end = (start.get(k, now[k]) for k in (i, j))
        length = model.new_int_var(0, horizon, "")
        intervals.append(model.new_interval_var(begin, length, end + duration[j], ""))
        demands.append(size)
    model.add_cumulative(intervals, demands, int(problem.room[pool]))


def _objective(
    model: cp_model.CpModel, schedule: Schedule, start: dict[int, cp_model.IntVar], goal: cp_model.IntVar
) -> None:
    """Makespan: the last end of all. Span: each rank's last end less its first start."""
    problem, timeline = schedule.problem, schedule.timeline()
    now, duration = timeline.start.tolist(), problem.passes.duration.tolist()
    whole, of_rank = problem.objective == "makespan", dict[int, list[int]]()
    for i, rank in enumerate(problem.passes.rank.tolist()):
        of_rank.setdefault(rank, []).append(i)
    for listed in of_rank.values():
        first: cp_model.LinearExprT = 0
        if not whole:
            begin = min((now[i] for i in listed if i not in start), default=int(timeline.makespan) * 2)
            first = begin
            if any(i in start for i in listed):
                first = model.new_int_var(0, begin, "")
                for i in (i for i in listed if i in start):
                    model.add(first <= start[i])
        for i in listed:
            model.add(goal >= (start[i] if i in start else now[i]) + duration[i] - first)
