"""How full a schedule's fullest rank is: what searches for less memory compare."""

from __future__ import annotations

from fractions import Fraction

from ..problem import Problem
from ..schedule import Schedule


def rooms(problem: Problem) -> tuple[int, ...]:
    """What the peak of each rank is divided by: its capacity where capacities differ, in bytes; else 1, so that bytes count.
    A rank without room counts in bytes too: nothing fits it."""
    if problem.capacity is None or len(set(problem.capacity)) == 1:
        return (1,) * problem.ranks
    return tuple(max(1, one) for one in problem.capacity)


def fullness(schedule: Schedule) -> Fraction:
    """The largest peak of a rank: in bytes, or as a share of the rank's capacity where capacities differ."""
    peaks = schedule.timeline().peak_bytes
    return max(Fraction(peak, room) for peak, room in zip(peaks, rooms(schedule.problem), strict=True))
