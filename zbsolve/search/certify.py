"""Certificates of schedules, also of those that were not found here: made, and proven again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..ilp.bounds.bound import BUSIEST, WORK, Bound, rounded_up, value_unit, with_assumption
from ..ilp.bounds.closed_forms import closed_form
from ..ilp.proof_check import recheck
from ..partition.splits import Splits
from ..problem import Problem
from ..schedule import GIVEN, Certificate, Schedule
from ..util.clock import Clock
from ..util.errors import BadInput, WrongBound
from ..util.text import exact_time
from ..verifier import Violation, verify
from .finder import prove
from .state import State

QUICK_PASSES = 100_000  # above so many passes, closed forms with memory take more than about five seconds


def work_bound(problem: Problem) -> Bound:
    """The work of the busiest rank, which bounds every order."""
    return Bound(problem.work, BUSIEST, WORK)


def certificate_of(schedule: Schedule, bound: Bound, solver: str, seconds: float = 0.0, seed: int = 0) -> Certificate:
    """The certificate of a schedule whose problem has this `bound`.

    Bounds hold for schedules whose lanes run by number; where microbatches differ, the proof says so. A schedule with
    another order of a lane may be shorter: its bound is the busiest rank's work. Raises WrongBound if a bound is false.
    """
    value, problem = int(schedule.timeline().value), schedule.problem
    bound = rounded_up(bound, value_unit(problem, bound.kind))
    check_bound(schedule, bound.value, bound.proof)
    if bound.value > value or (problem.ordered and out_of_order(schedule)):
        bound = work_bound(problem)
    bound = with_assumption(bound, problem)
    stated = (problem.objective, value, bound.value, bound.kind, bound.ranks, bound.proof)
    return Certificate(*stated, solver, round(seconds, 3), seed, problem.digest)


def certified_as(schedule: Schedule, known: Certificate, solver: str) -> Schedule:
    """`schedule`, which `solver` found, with a certificate that takes its bound from `known`, one of the same problem."""
    bound = Bound(known.bound, known.proof, known.relaxation, known.ranks)
    return schedule.certified(certificate_of(schedule, bound, solver, known.seconds, known.seed))


def proven(schedule: Schedule) -> Schedule:
    """The schedule with a certificate: its own, as `from_file` has it, or one by closed forms. Raises BadInput if the
    schedule is not valid."""
    if schedule.certificate is None:
        return certified(schedule, GIVEN)
    for violation in verify(schedule.problem, schedule):
        raise BadInput(str(violation))
    return from_file(schedule, verified=True)


def from_file(schedule: Schedule, seconds: float = 60.0, *, verified: bool = False) -> Schedule:
    """A schedule that a file states: its certificate is marked (`unchecked`) if its value is another than the schedule's, or
    if its bound is not proven again in so many seconds without a search. verified: is the schedule known to be valid?"""
    stated = schedule.certificate
    if stated is None or not stated.checked:
        return schedule
    again: str | Violation | None = None if verified else next(iter(verify(schedule.problem, schedule)), None)
    again = again or proven_again(replace(schedule, every_split=None), stated, seconds, search=False)
    return schedule.certified(replace(stated, proof=again) if isinstance(again, str) else stated.unchecked())


def check_bound(schedule: Schedule, bound: int, proof: str) -> None:
    """Raise WrongBound if `bound` is above the value of a schedule whose lanes run by number.

    A hint's lanes may run in another order, and where microbatches differ such a schedule may be shorter than the bound.
    """
    value = int(schedule.timeline().value)
    if bound > value and not out_of_order(schedule):
        raise WrongBound(
            f"problem {schedule.problem.digest}: the bound of {bound} µs ({proof}) is above a verified schedule's "
            f"{value} µs; this is a defect in zbsolve: please report it with the problem"
        )


def out_of_order(schedule: Schedule) -> tuple[str, ...]:
    """Two passes of a lane that do not run by number, in the order in which they run; () if all lanes do."""
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
    """`schedule` with a certificate that names `solver`, and the highest bound that is proven in so many seconds. None: by
    closed forms, or of a large problem the work of the busiest rank. Raises BadInput if the schedule is not valid."""
    problem = schedule.problem
    for violation in verify(problem, Schedule(problem, schedule.order, schedule.syncs)):
        raise BadInput(f"schedule: {violation}")
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
    """A proof of the stated bound, made here and not taken from the file; a violation if it cannot be proven. The schedule
    was verified before. search: False refuses relaxations that only a search can prove."""
    if not all(0 <= rank < schedule.problem.ranks for rank in stated.ranks):
        return Violation("bound", (), f"the certificate names ranks {list(stated.ranks)} of {schedule.problem.ranks}")
    bound = Bound(stated.bound, stated.proof, stated.relaxation, stated.ranks)
    again = recheck(schedule.problem, bound, seconds, search=search)
    if again.value < stated.bound:
        return Violation("bound", (), f"{stated.bound} µs is not proven again; {again.value} µs is ({again.proof})")
    problem, swapped = schedule.problem, out_of_order(schedule)
    if swapped and problem.ordered and stated.bound > problem.work:
        text = f"{swapped[0]} runs before {swapped[1]}, and bounds of this problem are about microbatches in order"
        return Violation("bound", swapped, f"{text}: only the work of a rank, {problem.work} µs, is one of this schedule")
    every = schedule.every_split
    if every is None or every.bound <= 0:  # in files of searches that had no time for one
        return again.proof
    from ..ilp import every_split  # CP-SAT takes a second to load

    if why := every_split.proven_again(Splits.told(every, problem), every, seconds):
        return Violation("bound", (), f"of every split: {why}")
    text = f"{again.proof}; every split of its layers takes {exact_time(every.bound)} or more"
    text += f", by cuts of {len(every.looked)} splits" if every.looked else ""
    return text + (f", and {len(every.apart)} others one by one" if every.apart else "")
