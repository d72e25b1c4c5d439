"""`solve`: greedy, then exact; always an incumbent and a bound; what leaves here was verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .errors import BadInput, Infeasible
from .greedy.list_scheduler import deepest_first, list_schedule
from .greedy.presets import PRESETS, preset
from .ilp.bounds import Bound, closed_form
from .problem import Problem
from .schedule import Certificate, Schedule
from .verifier import verify

METHODS = ("auto", "greedy", "cp", "milp")


@dataclass
class State:
    """The best schedule and bound so far, and who found them."""

    problem: Problem
    deadline: float
    bound: Bound
    schedule: Schedule | None = None
    value: int = -1
    solver: str = ""

    def offer(self, schedule: Schedule, solver: str) -> None:
        """Keep `schedule` where it is better and holds."""
        value = int(schedule.timeline().value)
        if self.schedule is not None and value >= self.value:
            return
        if not verify(self.problem, schedule):
            self.schedule, self.value, self.solver = schedule, value, solver

    def raise_bound(self, bound: Bound) -> None:
        """Keep `bound` where it is higher."""
        if bound.value > self.bound.value:
            self.bound = bound

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def done(self) -> bool:
        """Nothing more to gain: value equals bound, or no time is left."""
        return (self.schedule is not None and self.value <= self.bound.value) or self.left <= 0


def solve(
    problem: Problem,
    *,
    seconds: float = 10.0,
    seed: int = 0,
    method: str = "auto",
    solver: str = "cbc",
    progress: Callable[[State], None] | None = None,
) -> Schedule:
    """A schedule for `problem` with a certificate: value, proven lower bound, gap.

    method: "auto" (greedy, then CP-SAT until the bound is met or time is up), "greedy", "cp", "milp" (with `solver`), or
    the name of a preset. progress: called whenever value or bound may have changed. Returns early when the value equals
    the bound. Raises Infeasible with the reason, or BadInput.
    """
    if method not in METHODS and method not in PRESETS:
        raise BadInput(f"method '{method}': one of {', '.join((*METHODS, *PRESETS))}")
    if not seconds > 0:
        raise BadInput(f"seconds: {seconds} is not a positive time")
    began = time.monotonic()
    state = State(problem, began + seconds, Bound(0, ""))
    state.raise_bound(closed_form(problem))
    for _ in _steps(state, method, seed, solver):
        if progress is not None:
            progress(state)
        if state.done:
            break
    if state.schedule is None:
        raise Infeasible(_why(problem, method))
    certificate = Certificate(
        problem.objective,
        state.value,
        min(state.bound.value, state.value),
        state.bound.proof,
        state.solver,
        round(time.monotonic() - began, 3),
        seed,
        problem.digest,
    )
    return state.schedule.certified(certificate)


def _steps(state: State, method: str, seed: int, solver: str) -> Iterator[None]:
    """Each step may improve value or bound."""
    problem = state.problem
    if method in PRESETS:
        state.offer(preset(method, problem), method)
        return
    state.offer(list_schedule(problem, deepest_first(problem)), "greedy")
    yield
    for name in PRESETS:
        try:
            state.offer(preset(name, problem), name)
        except BadInput:
            continue
        yield
    if method == "greedy":
        return
    if method == "milp":
        from .ilp.milp import solve_milp

        milp = solve_milp(problem, state.schedule, state.bound.value, state.left, solver=solver, seed=seed)
        if milp.schedule is not None:
            state.offer(milp.schedule, f"milp {solver}")
        state.raise_bound(Bound(milp.bound, f"milp {solver}: the whole problem"))
        return
    from .ilp.cp import solve_cp

    cp = solve_cp(problem, state.schedule, state.bound.value, state.left, seed=seed)
    if cp.schedule is not None:
        state.offer(cp.schedule, "cp-sat")
    state.raise_bound(Bound(cp.bound, "cp-sat: the whole problem"))
    yield


def _why(problem: Problem, method: str) -> str:
    if method in PRESETS:
        return f"{method} does not fit this problem's memory"
    return "no schedule was found within this memory"
