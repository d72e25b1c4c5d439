"""The prover: higher bounds, and the exact solvers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..ilp.bounds.bound import ALL_ORDERS, WHOLE, Bound
from ..ilp.ranks.group_search import higher_bounds
from .state import LARGE_PASSES, State

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver

WHOLE_PASSES = 400  # passes: CP-SAT on the whole problem proves or improves within seconds up to about here
FEW_PASSES = 200  # beyond, it hardly does: of 104 plain steps in none. Searches over ranks may take most of the time there
RANK_SHARES = (0.2, 0.4, 0.8, 1.0)  # of the time for those: beside copies, of few passes, of small problems, of others


def prove(state: State, seed: int) -> None:
    """Higher bounds: relaxations first, then CP-SAT on the whole where that is small."""
    problem, clock = state.problem, state.clock
    few, small = (len(problem.passes) <= most for most in (FEW_PASSES, WHOLE_PASSES))
    state.raise_closed_forms()
    if state.done and len(problem.passes) > LARGE_PASSES:
        return
    from ..ilp.cp import higher_stream_bounds, holds_beside

    beside = holds_beside(problem)
    share = RANK_SHARES[0 if beside else 1 if few else 2 if small else 3]
    for bound in higher_bounds(problem, state.bound, clock, clock.left * share, state.incumbent):
        state.raise_bound(bound)
        if state.done:
            return
    if beside:
        low, share = state.bound.value, clock.left * (0.25 if small else 1.0)
        with state.searching_exactly() as threads:
            solver_for = partial(_solver_for, state, seed, threads)
            for bound in higher_stream_bounds(problem, low, state.incumbent, clock, share, solver_for):
                state.raise_bound(bound)
                if state.done:
                    return
    if small or state.schedule is None:
        cp(state, seed, clock.left)


def _solver_for(state: State, seed: int, threads: int, seconds: float, effort: float | None) -> CpSolver:
    """CP-SAT, which ends with the search. With effort it has one thread and no limit of seconds: its answer must not depend
    on the machine."""
    from ..ilp.cp import NO_LIMIT, make_solver

    limits = (seconds, threads) if effort is None else (NO_LIMIT, 1)
    solver = make_solver(*limits, seed=seed, effort=effort)
    state.stoppers.append(solver.stop_search)
    return solver


def cp(state: State, seed: int, seconds: float) -> None:
    """CP-SAT on the whole problem, from the incumbent: a schedule, a bound, or the proof that none fits the memory."""
    from ..ilp.cp import solve_cp

    known = state.schedule if state.enough is None else state.enough
    with state.searching_exactly() as threads:
        solver = _solver_for(state, seed, threads, seconds, seconds if state.clock.counted else None)
        result = solve_cp(state.problem, known, state.target, seconds, solver=solver)
    state.clock.spend(seconds)
    if result.schedule is not None:
        state.offer(result.schedule, "cp-sat")
    state.infeasible = result.infeasible and (state.schedule is None or state.enough is not None)
    if state.infeasible:
        return
    state.raise_bound(Bound(result.bound, ALL_ORDERS, WHOLE))


def milp(state: State, solver: str, seed: int) -> None:
    """The MILP of the whole problem with the solver of this name, from the incumbent. Raises BadInput."""
    from ..ilp.milp import solve_milp

    result = solve_milp(state.problem, state.schedule, state.bound.value, state.clock.left, solver=solver, seed=seed)
    if result.schedule is not None:
        state.offer(result.schedule, f"milp {solver}")
    state.raise_bound(Bound(result.bound, f"milp {solver}: the whole problem", WHOLE))
