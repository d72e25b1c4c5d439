"""Certificates: what is known of a schedule, and of one that somebody else made, too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ilp.bounds.bound import BUSIEST, WORK, Bound, rounded_up, value_unit, with_assumption
from ..ilp.bounds.closed_forms import closed_form
from ..ilp.proof_check import recheck
from ..partition.splits import Splits
from ..problem import Problem
from ..schedule import GIVEN, Certificate, Schedule
from ..util.clock import Clock
from ..util.errors import BadInput, WrongBound
from ..verifier import Violation, verify
from .finder import prove
from .state import State

QUICK_PASSES = 100_000  # passes: beyond, closed forms with memory take more than some five seconds


def work_bound(problem: Problem) -> Bound:
    """What no order can be below, whatever it does."""
    return Bound(problem.work, BUSIEST, WORK)


def certificate_of(schedule: Schedule, bound: Bound, solver: str, seconds: float = 0.0, seed: int = 0) -> Certificate:
    """The certificate of a schedule whose problem has this `bound`.

    Bounds are for schedules whose lanes run in table order, which the proof says where microbatches differ. A schedule whose
    lanes run otherwise can fairly be shorter there: then the work of the busiest rank is its bound. Raises WrongBound where
    a bound is false.
    """
    value, problem = int(schedule.timeline().value), schedule.problem
    bound = rounded_up(bound, value_unit(problem))
    check_bound(schedule, bound.value, bound.proof)
    if bound.value > value or (problem.ordered and out_of_order(schedule)):
        bound = work_bound(problem)
    bound = with_assumption(bound, problem)
    stated = (problem.objective, value, bound.value, bound.kind, bound.ranks, bound.proof)
    return Certificate(*stated, solver, round(seconds, 3), seed, problem.digest)


def certified_as(schedule: Schedule, known: Certificate, solver: str) -> Schedule:
    """`schedule`, which `solver` found, with a certificate whose bound is that of another one of the same problem."""
    bound = Bound(known.bound, known.proof, known.relaxation, known.ranks)
    return schedule.certified(certificate_of(schedule, bound, solver, known.seconds, known.seed))


def proven(schedule: Schedule) -> Schedule:
    """The schedule with a certificate: its own, or a quick one. Raises BadInput where it does not hold."""
    if schedule.certificate is None:
        return certified(schedule, GIVEN)
    for violation in verify(schedule.problem, schedule):
        raise BadInput(str(violation))
    return schedule


def check_bound(schedule: Schedule, bound: int, proof: str) -> None:
    """Raise WrongBound where `bound`, for schedules whose lanes run in table order, is above the value of one that does.

    A hint's lanes may run otherwise; where microbatches differ such a schedule can fairly be shorter than the bound.
    """
    value = int(schedule.timeline().value)
    if bound > value and not out_of_order(schedule):
        raise WrongBound(
            f"problem {schedule.problem.digest}: the bound of {bound} µs ({proof}) is above a verified schedule's "
            f"{value} µs; this is a defect in zbsolve: please report it with the problem"
        )


def out_of_order(schedule: Schedule) -> tuple[str, ...]:
    """The first two passes of a lane that run against its order, as they run; () where all lanes run in table order."""
    problem = schedule.problem
    at = np.zeros(len(problem.passes), np.int64)
    for rows in schedule.sequences.values():
        at[rows] = np.arange(len(rows))
    for rows in problem.lanes:
        for k in np.flatnonzero(np.diff(at[rows]) < 0)[:1].tolist():
            return problem.names[rows[k + 1]], problem.names[rows[k]]
    return ()


def certified(
    schedule: Schedule, solver: str, seconds: float | None = None, progress: Callable[[State], None] | None = None
) -> Schedule:
    """`schedule` with a certificate that names `solver`: its value, and the highest bound proven in so many seconds; None:
    the closed forms alone, or the work of the busiest rank where the problem is large. Raises BadInput where the schedule
    does not hold."""
    problem = schedule.problem
    violations = verify(problem, Schedule(problem, schedule.order, schedule.syncs))
    if violations:
        raise BadInput(f"schedule: {violations[0]}")
    bound, used = work_bound(problem), 0.0
    if seconds is None:
        if len(problem.passes) <= QUICK_PASSES:
            bound = max(bound, closed_form(problem), key=lambda pair: pair.value)
    else:
        state = State(problem, Clock(seconds, None), bound, progress=progress)
        state.offer(schedule, solver)
        prove(state, 0)
        bound, used = state.bound, state.clock.used
    return schedule.certified(certificate_of(schedule, bound, solver, used))


def proven_again(schedule: Schedule, stated: Certificate, seconds: float, *, search: bool = True) -> str | Violation:
    """The proof of the stated bound, which is found here and not the file's; a violation where it is not proven. The
    schedule was verified. search: False refuses relaxations that only a search can prove."""
    if not all(0 <= rank < schedule.problem.ranks for rank in stated.ranks):
        return Violation("bound", (), f"the certificate names ranks {list(stated.ranks)} of {schedule.problem.ranks}")
    bound = Bound(stated.bound, stated.proof, stated.relaxation, stated.ranks)
    again = recheck(schedule.problem, bound, seconds, search=search)
    if again.value < stated.bound:
        text = f"bound {stated.bound} µs is not proven again; {again.value} µs is ({again.proof})"
        return Violation("bound", (), text)
    problem, swapped = schedule.problem, out_of_order(schedule)
    if swapped and problem.ordered and stated.bound > problem.work:
        text = f"{swapped[0]} runs before {swapped[1]}, and bounds of this problem are about microbatches in order"
        return Violation("bound", swapped, f"{text}: only the work of a rank, {problem.work} µs, is one of this schedule")
    every = schedule.every_split
    if every is None or every.bound <= 0:  # in files of searches that had no time for one
        return again.proof
    from ..ilp import every_split  # CP-SAT takes a second to load

    if why := every_split.proven_again(Splits.told(every, problem), every, seconds):
        return Violation("bound", (), f"bound of every split: {why}")
    return (
        f"{again.proof}; every split of its layers takes {every.bound} µs or more, by cuts of {len(every.looked)} splits"
        + (f", and {len(every.apart)} others one by one" if every.apart else "")
    )
