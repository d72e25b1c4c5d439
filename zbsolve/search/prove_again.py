"""A certificate's bound, proven again from its schedule alone."""

from __future__ import annotations

from ..ilp.bounds.bound import Bound
from ..ilp.proof_check import recheck
from ..schedule import Certificate, Schedule
from ..verifier import Violation
from .certify import out_of_order


def proven_again(schedule: Schedule, stated: Certificate, seconds: float, *, search: bool = True) -> str | Violation:
    """The proof of the stated bound, which is found here and not the file's; a violation where it is not proven. The
    schedule was verified. search: False refuses relaxations that only a search can prove."""
    if not all(0 <= rank < schedule.problem.ranks for rank in stated.ranks):
        return Violation("bound", (), f"the certificate names ranks {list(stated.ranks)} of {schedule.problem.ranks}")
    bound = Bound(stated.bound, stated.proof, stated.relaxation, stated.ranks)
    found = recheck(schedule.problem, bound, seconds, search=search)
    if found.value < stated.bound:
        text = f"bound {stated.bound} µs is not proven again; {found.value} µs is ({found.proof})"
        return Violation("bound", (), text)
    problem, swapped = schedule.problem, out_of_order(schedule)
    if swapped and not problem.alike and stated.bound > problem.work:
        text = f"{swapped[0]} runs before {swapped[1]}, and bounds of this problem are about microbatches in order"
        return Violation("bound", swapped, f"{text}: only the work of a rank, {problem.work} µs, is one of this schedule")
    return found.proof
