"""A schedule's order on the times of a profile: the same passes on the same ranks, timed again.

What a schedule's file does not say of its step is refused (see `step_again`).
"""

from __future__ import annotations

import numpy as np

from ..greedy.syncs import with_syncs
from ..handover import lacking
from ..known_steps import step_again
from ..problem import Problem
from ..profile.profile import Profile
from ..schedule import GIVEN, Schedule
from ..util.errors import BadInput
from ..verifier import verify
from .certify import certified
from .solver import lacking_in_words

SHOWN = 3  # passes of one side alone that a refusal names


def timed_again(
    schedule: Schedule, profile: Profile, *, memory: str | int | None = None, replicas: int | None = None
) -> Schedule:
    """The schedule's order on a profile's times and sizes, verified, with a certificate; the schedule itself where its times
    are those.

    memory: bytes a rank; None: the profile's capacity. replicas: pipelines that sum gradients, where it has passes C.
    Raises BadInput where the profile makes other passes, where the file does not say what the step was, and where the order
    does not hold in the memory; Infeasible where no order does.
    """
    found = order_on(schedule, profile, memory=memory, replicas=replicas)
    if found.problem.digest == schedule.problem.digest and schedule.certificate is not None:
        return schedule
    if wrong := why_not(found):
        raise BadInput(f"by the profile's times: {wrong}")
    return certified(with_syncs(found), GIVEN if schedule.certificate is None else schedule.certificate.solver)


def order_on(
    schedule: Schedule, profile: Profile, *, memory: str | int | None = None, replicas: int | None = None
) -> Schedule:
    """The same, not verified: see `why_not`. Raises BadInput and Infeasible as `timed_again`, but for the order."""
    problem = step_again(schedule.problem, profile, memory, replicas)
    _check_same_passes(schedule.problem, problem)
    return Schedule(problem, schedule.order, schedule.syncs)


def why_not(schedule: Schedule) -> str:
    """Why an order does not hold, in words; or ""."""
    for violation in verify(schedule.problem, schedule):
        return str(violation)
    return lacking_in_words(schedule) if lacking(schedule).any() else ""


def _check_same_passes(before: Problem, now: Problem) -> None:
    """Raise BadInput where the passes are not the same, or lie elsewhere."""
    given, other = set(before.names), set(now.names)
    if given != other:
        sides = (("it alone has", given - other), ("the profile's step alone has", other - given))
        shown = {what: (sorted(names)[:SHOWN], len(names) - SHOWN) for what, names in sides if names}
        raise BadInput("; ".join(f"{w} {', '.join(n)}{f' and {more} more' * (more > 0)}" for w, (n, more) in shown.items()))
    rows = np.array([now.index[name] for name in before.names], np.int64)
    moved = np.flatnonzero(now.passes.rank[rows] != before.passes.rank)
    if len(moved):
        raise BadInput(f"the profile's step has {before.names[int(moved[0])]} on another rank")
