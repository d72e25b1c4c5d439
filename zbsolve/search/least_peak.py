"""Among schedules of one value, one with a low memory peak.

A *question* is whether some schedule of this value fits less memory. It is searched like the value itself, in a problem of
less capacity, and ends at the first schedule of that value or at a bound above it. Bisection over the memory needs few
questions: each schedule found lowers the peak, each refuted question raises the floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

import numpy as np

from ..ilp.bounds.bound import Bound
from ..ilp.bounds.closed_forms import closed_form
from ..problem import Problem
from ..profile.noise import Aim
from ..schedule import Schedule
from ..schedule.handover import lacking
from ..systems.table import presets_of
from ..util.clock import Clock
from ..verifier import verify
from .state import LARGE_PASSES, State, fullness, rooms

PREFER_TIME, PREFER_MEMORY = PREFERENCES = ("time", "memory")
TOLERANCE = Fraction(1, 100)  # how much longer than the best value schedules may be for "memory"
VALUE_SHARE = 0.6  # of all the time, for the search for the value if something else than time is preferred
# If time is preferred, this search has this share of the time left; and at most as long as the first one or MIN_SECONDS.
LEFT_SHARE, MIN_SECONDS = 0.25, 1.0
CLOSE = Fraction(1, 100)  # of a peak: with less between floor and peak, one last question is asked
QUESTION_SHARE = 0.34  # of the time left, for one question
MAX_UNANSWERED = 3  # the search gives up after so many unanswered questions
CLOSED_FORM_EFFORT = 2e-6  # effort a pass that is counted for closed forms

Ask = Callable[[State, str, int, str], None]  # searches until the state is done, by method, seed and solver


@dataclass(frozen=True)
class LeastPeak:
    """The state of the search for less memory. schedule: the one with the lowest peak so far, found by `solver`. before: the
    one that the search began with. floor: a proven lower bound on the peak of every schedule of at most `enough` µs, in
    bytes or as a share of the capacity (see `fullness`)."""

    schedule: Schedule
    before: Schedule
    enough: int
    floor: Fraction = Fraction(0)
    solver: str = ""

    @property
    def proven(self) -> bool:
        """Whether no schedule of at most `enough` µs has a lower peak."""
        return self.floor >= fullness(self.schedule)


def value_clock(seconds: float, effort: float | None, prefer: str | Aim | None) -> Clock:
    """The clock of the search for the value."""
    share = 1.0 if prefer in (None, PREFER_TIME) else VALUE_SHARE
    return Clock(seconds * share, None if effort is None else effort * share)


def second_clock(seconds: float, effort: float | None, prefer: str | Aim, used: float) -> Clock | None:
    """The clock of the second search, for what is preferred. used: by the search for the value. None: no time is left."""
    left = (seconds if effort is None else effort) - used
    if prefer == PREFER_TIME:
        left = min(LEFT_SHARE * left, max(MIN_SECONDS, used))
    return Clock(left, None if effort is None else left) if left > 0 else None


def least_peaks(begin: Schedule, prefer: str, clock: Clock, seed: int, ask: Ask) -> Iterator[LeastPeak]:
    """Schedules with lower and lower peaks, from `begin` on, while the clock has time. They have its value if time is
    preferred, else at most 1 % more. The first comes at once.

    ask: searches the answer of a question. The floor holds for schedules whose lanes run by number, as bounds do. Large
    problems are left as they are, since one question would take too long.
    """
    value = int(begin.timeline().value)
    least_peak = LeastPeak(begin, begin, value if prefer == PREFER_TIME else int(value * (1 + TOLERANCE)))
    yield least_peak
    if len(begin.problem.passes) > LARGE_PASSES or not fullness(begin):
        return
    least_peak = _or_named(least_peak, clock)
    least_peak = replace(least_peak, floor=_floor(begin.problem, least_peak.enough, fullness(least_peak.schedule), clock))
    tried, unanswered = least_peak.floor, 0
    while clock.left > 0 and unanswered < MAX_UNANSWERED:
        level = _next_level(begin.problem, max(tried, least_peak.floor), fullness(least_peak.schedule))
        yield least_peak
        if level is None:
            return
        share = clock.apart(QUESTION_SHARE * clock.left)
        state = State(_below(least_peak.schedule.problem, level), share, Bound(0, ""), enough=least_peak.enough)
        state.leads += [least_peak.schedule]
        ask(state, "auto", seed, "")
        if clock.counted:
            clock.spend(state.clock.used)
        if (order := _answer(state, begin.problem, least_peak.enough)) is not None:
            least_peak = replace(least_peak, schedule=order, solver=state.solver)
            continue
        tried = level
        if state.refuted:
            least_peak = replace(least_peak, floor=level)
        else:
            unanswered += 1
    yield least_peak


def _or_named(least_peak: LeastPeak, clock: Clock) -> LeastPeak:
    """The schedule, or a named order as short with a lower peak: the search for the value may have ended before those."""
    problem = least_peak.schedule.problem
    for name, order in presets_of(problem):
        if clock.left <= 0:
            break
        if fullness(order) >= fullness(least_peak.schedule) or order.timeline().value > least_peak.enough:
            continue
        if not verify(problem, order) and not lacking(order).any():
            least_peak = replace(least_peak, schedule=order, solver=name)
    return least_peak


def _answer(state: State, problem: Problem, enough: int) -> Schedule | None:
    """The schedule that answers a question, on the original problem; None if there is none, or its messages do not fit."""
    if state.schedule is None or state.value > enough:
        return None
    order = Schedule(problem, state.schedule.order, state.schedule.syncs)
    return None if lacking(order).any() else order


def _below(problem: Problem, level: Fraction) -> Problem:
    """The problem with its memory lowered so that schedules have a `fullness` below `level`."""
    return replace(problem, capacity=_room_below(problem, level))


def _room_below(problem: Problem, level: Fraction) -> tuple[int, ...]:
    """The capacity of each rank for `_below`, bytes."""
    edges, parts = problem.edges, np.zeros(problem.ranks, np.int64)
    np.gcd.at(parts, problem.passes.rank[edges.before], edges.bytes)
    # What a rank holds is a multiple of `parts`, so its capacity is rounded down to one.
    each = zip(rooms(problem), np.maximum(parts, 1).tolist(), strict=True)
    room = [max(0, ceil(level * limit) - 1) // part * part for limit, part in each]
    return tuple(room if problem.capacity is None else map(min, room, problem.capacity))


def _next_level(problem: Problem, low: Fraction, high: Fraction) -> Fraction | None:
    """The level of the next question. low: below it nothing was found. high: of the best schedule. None: nothing is left."""
    if low >= high:
        return None
    middle = (low + high) / 2
    ends = _room_below(problem, low), _room_below(problem, high)
    return high if high - low <= CLOSE * high or _room_below(problem, middle) in ends else middle


def _floor(problem: Problem, enough: int, high: Fraction, clock: Clock) -> Fraction:
    """The highest level below which closed forms exclude schedules of at most `enough` µs. `high` is tried first, since then
    no question is left."""
    low = Fraction(0)
    clock.spend(CLOSED_FORM_EFFORT * len(problem.passes))
    if _impossible(_below(problem, high), enough):
        return high
    while clock.left > 0 and (level := _next_level(problem, low, high)) is not None:
        clock.spend(CLOSED_FORM_EFFORT * len(problem.passes))
        if _impossible(_below(problem, level), enough):
            low = level
        elif level == high:
            break
        else:
            high = level
    return low


def _impossible(problem: Problem, enough: int) -> bool:
    """Whether closed forms exclude schedules of at most `enough` µs."""
    capacity = np.array(problem.capacity)
    return bool((problem.taken > capacity[problem.passes.rank]).any()) or closed_form(problem).value > enough
