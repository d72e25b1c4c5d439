"""The finder, which gives the sources of schedules their time, and the prover, which raises the bound.

They run side by side, a thread each. Further cores run further finders with other seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, islice, takewhile
from typing import TYPE_CHECKING

import numpy as np

from ..ilp.bounds.bound import ALL_ORDERS, WHOLE, Bound
from ..ilp.ranks.group_search import higher_bounds
from ..util.machine import POLL, run_threads
from .sources import AHEAD, ANEW, FIRST, LAST, TURNS, Arm, Search, anew_seconds, arms_of, turns_seconds
from .state import LARGE_PASSES, State

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver


WHOLE_PASSES = 400  # up to so many passes CP-SAT runs on the whole problem
FEW_PASSES = 200  # up to here CP-SAT often helps; above, it did in none of 104 plain steps, so searches over ranks get more
RANK_SHARES = (0.2, 0.4, 0.8, 1.0)  # of the time, for searches over ranks: with copies, FEW_PASSES, WHOLE_PASSES, more


def prove(state: State, seed: int) -> None:
    """Raise the bound: closed forms, searches over a few ranks, then CP-SAT on the whole problem if it is small."""
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
    """A CP-SAT solver, which stops when the search ends."""
    from ..ilp.cp import make_solver

    solver = make_solver(seconds, threads, seed=seed, effort=effort)
    state.stoppers.append(solver.stop_search)
    return solver


def cp(state: State, seed: int, seconds: float) -> None:
    """CP-SAT on the whole problem from the incumbent, for a schedule, a bound, or the proof that none fits the memory."""
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


def search_of(state: State, seed: int, early: bool = True) -> Search:
    """A new search. early: try starting policies among the first sources."""
    return Search(state, seed, partial(_search_small, seed=seed), early)


def quick(search: Search) -> Iterator[None]:
    """The quick sources (FIRST)."""
    return chain.from_iterable(arms_of(FIRST, search))


def find(search: Search) -> Iterator[None]:
    """The other sources: AHEAD, TURNS, ANEW and LAST. If LAST ends early, TURNS begin again with another seed."""
    state, search.anew = search.state, anew_seconds(search)
    share = search.clock.share(turns_seconds(search))
    if state.enough is None:
        yield from chain.from_iterable(arms_of(AHEAD, search))
    yield from _turns(search, share.left - search.anew)
    if state.schedule is not None and state.enough is None:
        yield from chain.from_iterable(arms_of(ANEW, search))
        yield from _in_turns(state, list(arms_of(LAST, search)))
        search.seed += 1
        yield from _turns(search, search.clock.left)


def _search_small(state: State, seed: int) -> Iterator[None]:
    """A search for a smaller problem, or with another seed: FIRST, then TURNS for all of the time."""
    search = search_of(state, seed)
    yield from quick(search)
    yield from _turns(search, state.clock.left)


def _turns(search: Search, seconds: float) -> Iterator[None]:
    """The sources of TURNS, for so many seconds: of an arm that starts late, less than its own are left."""
    search.seconds, share = seconds, search.clock.share(seconds)
    yield from takewhile(lambda _: not share.over, _in_turns(search.state, list(arms_of(TURNS, search))))


def _in_turns(state: State, arms: list[Arm]) -> Iterator[None]:
    """Step the arms until all have ended or the state is done. The arm with the least time so far steps next, so that none
    waits behind another that gains little by little."""
    used = [0.0] * len(arms)
    while arms and not state.done:
        turn, began = int(np.argmin(used)), state.clock.used
        try:
            next(arms[turn])
            used[turn] += state.clock.used - began
        except StopIteration:
            del arms[turn], used[turn]
        yield


# --- Beside the prover ---


SEED_STRIDE = 7919  # between the seeds of two finders
MAX_FINDERS, MAX_PASSES = 30, 1_000_000  # further finders at most; passes of all of them together, to limit memory


def search_side_by_side(state: State, seed: int, steps: Iterator[None]) -> None:
    """Run finder, prover and further finders with other seeds in parallel until the gap is closed or the time is up. When
    the prover has ended, its thread runs another finder. steps: of the first finder."""

    def prove_first() -> None:
        prove(state, seed)
        _find_on(state, next(further))

    further = (find(search_of(state, seed + SEED_STRIDE * k)) for k in count(1))
    more = min(state.contest.all_threads - 2, MAX_FINDERS, MAX_PASSES // len(state.problem.passes))
    jobs: list[Callable[[], None]] = [partial(_find_on, state, steps), prove_first]
    jobs += [partial(_find_on, state, finder, place) for place, finder in enumerate(islice(further, max(0, more)), 1)]
    try:
        run_threads(jobs, lambda: state.done, partial(_stop, state))
    finally:
        state.progress = None  # a thread in the middle of a kernel may end later and must not report


def prove_until_lost(state: State, seed: int) -> None:
    """Run the prover alone, with effort as the limit. It stops early if the search is lost to a rival."""
    run_threads([partial(prove, state, seed)], lambda: state.lost, lambda: _stop(state) if state.lost else None)


def _stop(state: State) -> None:
    """Stop the clock and the solvers that run."""
    state.clock.stop()
    for end in state.stoppers:
        end()


def _find_on(state: State, steps: Iterator[None], place: int = 0) -> None:
    """Take a finder's steps until the search is done. place: 0, or its number among further finders, from 1. While CP-SAT
    runs on several threads, the first of the further finders wait, one for each thread beside the prover's own."""
    for _ in steps:
        while 0 < place < state.exact_threads and not state.done:
            time.sleep(POLL)
        if state.done:
            return
