"""CP-SAT on some ranks with all their streams and pools, others as lags.

Searches over ranks' orders (`ranks`) know one stream a rank, so where copies hold memory they miss what matters. Here the
kept ranks have their side streams, their devices' bytes, and what they hold in further pools. Passes of other ranks are lags
within a microbatch, least times before and least times after. All that is left out only relaxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from ortools.sat.python import cp_model

from ..problem import UNLIMITED, Ints, Problem
from ..tables import Edges
from ..util.clock import Clock
from .bounds.bound import STREAMS, Bound
from .bounds.energy import paths_within
from .bounds.memory_arcs import INFINITE
from .bounds.necessary_arcs import heads_and_tails
from .cp import build_cp

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
    mine = (e.bytes > 0) & ~(computing[e.before] & computing[e.after])
    room = problem.room
    where = np.where(e.pool > 0, problem.ranks - 1 + e.pool, problem.passes.rank[e.before])
    moving = bool((repeated[e.before] & repeated[e.after])[mine].any())
    small = np.bincount(problem.passes.rank).max() <= (MAX_RANK_PASSES if moving else MAX_GATHERED_PASSES)
    return bool(small and (room[where[mine]] < UNLIMITED).any())


def ranks_alone(problem: Problem, ranks: tuple[int, ...]) -> tuple[Problem, Ints, Ints]:
    """The passes of these ranks as a problem, with the longest paths over other ranks as lags; and of each pass the least
    time before its start and after its end, µs, in the window of the first of the ranks."""
    p = problem.passes
    rows = np.flatnonzero(np.isin(p.rank, ranks))
    before, after = _pairs(p.microbatch[rows])
    span = paths_within(problem, rows[before], rows[after])
    found = span >= 0
    before, after = before[found], after[found]
    lag = span[found] - p.duration[rows[before]] - p.duration[rows[after]]
    alone = replace(problem, capacity=None).only(rows)
    capacity = None if problem.capacity is None else problem.capacity[: alone.ranks]
    alone = replace(alone, capacity=capacity, edges=alone.edges + Edges.of(before, after, lag=np.maximum(0, lag)))
    head, tail = (time[rows] for time in heads_and_tails(problem, ranks[0]))
    return alone, head, tail


def _pairs(microbatch: Ints) -> tuple[Ints, Ints]:
    """All pairs of two different rows with the same microbatch."""
    order = np.argsort(microbatch, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(microbatch[order])) + 1)
    pairs = [np.stack(np.meshgrid(one, one, indexing="ij")).reshape(2, -1) for one in groups]
    before, after = np.concatenate(pairs, axis=1)
    return before[before != after], after[before != after]


def streams_bound(ranks: tuple[int, ...], value: int) -> Bound:
    """The bound that `ranks_refute` proved, with its proof in words."""
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    proof = f"{names}: CP-SAT searched the orders of all passes there, copies and memory too, whatever other ranks do"
    return Bound(value, proof, STREAMS, ranks)


def ranks_refute(problem: Problem, ranks: tuple[int, ...], value: int, solver: cp_model.CpSolver) -> bool | None:
    """Whether these ranks alone take `value` µs or more; None where the solver does not tell in its time. For the span there
    is one rank."""
    alone, head, tail = ranks_alone(problem, ranks)
    if int((head + alone.passes.duration + tail).max()) >= value:
        return True
    status = solver.solve(build_cp(alone, 0, value - 1, (head, tail)).model)
    return None if status == cp_model.UNKNOWN else status == cp_model.INFEASIBLE


def higher_stream_bounds(
    problem: Problem,
    low: int,
    incumbent: Ints,
    clock: Clock,
    seconds: float,
    solver_for: SolverFor,
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
