"""What is checked alike of all steps with more than compute streams, devices' memory and whole microbatches: finders, bounds
and exact models against `exact_streams`, and what a schedule holds under any timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from zbsolve import Infeasible, Problem, Schedule, solve, verify
from zbsolve.ilp.bounds.bound import Bound
from zbsolve.ilp.bounds.closed_forms import all_closed_forms
from zbsolve.ilp.cp import solve_cp
from zbsolve.ilp.milp import solve_milp
from zbsolve.ilp.proof_check import recheck
from zbsolve.ilp.ranks.group_search import higher_bounds
from zbsolve.util.clock import Clock
from zbsolve.util.errors import NotFound

from .exact_streams import optimum

FACTORS = [0.1, 0.5, 1, 2, 10]  # of durations


def bounds_hold(problem: Problem, least: Callable[[Problem], int | None] = optimum) -> None:
    """No bound is above the optimum, nor what checking it proves, which is at least as much. least: finds the optimum."""
    best = least(problem)
    for bound in (*all_closed_forms(problem), *higher_bounds(problem, Bound(0, ""), Clock(5.0, 1.0), 1.0)):
        again = recheck(problem, bound, 1.0)
        assert bound.value <= again.value
        assert best is None or again.value <= best


def solve_is_exact(problem: Problem, least: Callable[[Problem], int | None] = optimum) -> None:
    """`solve` finds and proves the optimum; where there is none, the exact model says so. least: finds the optimum."""
    best = least(problem)
    if best is None:
        assert solve_cp(problem, None, 0, 20, effort=5.0).infeasible
        return
    schedule = solve(problem, effort=0.5)
    assert verify(problem, schedule) == ()
    assert schedule.certificate is not None
    assert schedule.certificate.bound <= best == schedule.certificate.value


def models_are_exact(problem: Problem) -> None:
    """CP-SAT and MILP both find the optimum, or CP-SAT that there is none."""
    cp_is_exact(problem)
    best = optimum(problem)
    if best is not None:
        _has(problem, solve_milp(problem, None, 0, 60).schedule, best)


def cp_is_exact(problem: Problem) -> None:
    """CP-SAT finds the optimum, or that there is none."""
    best, found = optimum(problem), solve_cp(problem, None, 0, 20, effort=5.0)
    if best is None:
        assert found.infeasible
    else:
        _has(problem, found.schedule, best)


def _has(problem: Problem, schedule: Schedule | None, value: int) -> None:
    assert schedule is not None
    assert verify(problem, schedule) == ()
    assert schedule.timeline().value == value


def overfull(problem: Problem, seed: int) -> dict[bool, int] | None:
    """Of 15 random timings of every pass in a found schedule's order, how many hold more than there is room for: with its
    syncs (True) and without them (False). None: no schedule was found."""
    try:
        schedule = solve(problem, effort=0.1, prefer=None)
    except (Infeasible, NotFound):
        return None
    over = {True: 0, False: 0}
    rng, p = np.random.default_rng(seed), problem.passes
    for _ in range(15):
        times = np.rint(10 * p.duration * rng.choice(FACTORS, len(p))).astype(np.int64)
        other = replace(problem, passes=replace(p, duration=times))
        for kept in over:
            timeline = Schedule(other, schedule.order, schedule.syncs if kept else ()).timeline()
            over[kept] += any(np.greater((*timeline.peak_bytes, *timeline.pool_peaks), problem.room))
    return over
