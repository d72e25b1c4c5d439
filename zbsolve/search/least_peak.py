"""Among schedules of one value, one that needs little memory: the value is kept, and the memory of all ranks is lowered.

Each question is whether the value can be had within less memory. It is searched like the value itself, in a problem of less
capacity, and ends at the first schedule of that value or at a bound above it. Bisection asks few questions. A schedule says
how much it really needs, and a bound says how much every schedule needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

import numpy as np

from ..handover import lacking
from ..ilp.bounds.bound import Bound
from ..ilp.bounds.closed_forms import closed_form
from ..noise import Aim
from ..problem import Problem
from ..schedule import Schedule
from ..systems.table import presets_of
from ..util.clock import Clock
from ..verifier import verify
from .state import LARGE_PASSES, State, fullness, rooms

PREFER_TIME, PREFER_MEMORY = PREFERENCES = ("time", "memory")
TOLERANCE = Fraction(1, 100)  # of the value that "memory" may give up
VALUE_SHARE = 0.6  # of the time goes to the value and its bound where memory, or steps whose times vary, are preferred
# Where time is preferred: the share of what is left, and as long as the search for the value took, or so many seconds.
LEFT_SHARE, MIN_SECONDS = 0.25, 1.0
CLOSE = Fraction(1, 100)  # of a peak: less is not worth a question but the last
QUESTION_SHARE = 0.34  # of the time left for one question
MAX_UNANSWERED = 3  # questions in all, after which the search gives up
CLOSED_FORM_EFFORT = 2e-6  # a pass, for bounds in closed form

Ask = Callable[[State, str, int, str], None]  # searches until the state is done, by method, seed and solver


@dataclass(frozen=True)
class LeastPeak:
    """What the search for less memory came to. schedule: the one with the least peak, found by `solver`; before: the one it
    began with; floor: what every schedule of at most `enough` µs needs on its fullest rank, as far as proven, in bytes or
    as a share of the capacity (see `fullness`)."""

    schedule: Schedule
    before: Schedule
    enough: int
    floor: Fraction = Fraction(0)
    solver: str = ""

    @property
    def proven(self) -> bool:
        """No schedule of at most `enough` µs has a smaller peak."""
        return self.floor >= fullness(self.schedule)


def value_clock(seconds: float, effort: float | None, prefer: str | Aim | None) -> Clock:
    """The clock of the search for the value."""
    share = 1.0 if prefer in (None, PREFER_TIME) else VALUE_SHARE
    return Clock(seconds * share, None if effort is None else effort * share)


def second_clock(seconds: float, effort: float | None, prefer: str | Aim, used: float) -> Clock | None:
    """The clock of the search for what is preferred, after the other one used so much; None where nothing is left."""
    left = (seconds if effort is None else effort) - used
    if prefer == PREFER_TIME:
        left = min(LEFT_SHARE * left, max(MIN_SECONDS, used))
    return Clock(left, None if effort is None else left) if left > 0 else None


def least_peaks(begin: Schedule, prefer: str, clock: Clock, seed: int, ask: Ask) -> Iterator[LeastPeak]:
    """Schedules with smaller and smaller peaks from `begin`, as long as the clock has time: of its value where time is
    preferred, else of at most 1 % more. The first comes at once.

    ask: how a question is searched for an answer. Schedules are verified. A proof is about schedules whose lanes run in
    table order, as bounds are. Large problems are left as they are: one question would take too long.
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
    """The schedule, or a named order that is as short and has a smaller peak: a search that ends with its first schedule may
    not have looked at those."""
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
    """The schedule that answers a question, on the problem itself; none where messages that wait do not fit."""
    if state.schedule is None or state.value > enough:
        return None
    order = Schedule(problem, state.schedule.order, state.schedule.syncs)
    return None if lacking(order).any() else order


def _below(problem: Problem, level: Fraction) -> Problem:
    """The problem with so much memory that the fullness of its schedules is below `level`."""
    return replace(problem, capacity=_room_below(problem, level))


def _room_below(problem: Problem, level: Fraction) -> tuple[int, ...]:
    """Bytes of each rank below that level, and no more than the problem has."""
    edges, parts = problem.edges, np.zeros(problem.ranks, np.int64)
    np.gcd.at(parts, problem.passes.rank[edges.before], edges.bytes)
    # All bytes that a rank holds are multiples of its part: less than one of it is of no use.
    each = zip(rooms(problem), np.maximum(parts, 1).tolist(), strict=True)
    room = [max(0, ceil(level * limit) - 1) // part * part for limit, part in each]
    return tuple(room if problem.capacity is None else map(min, room, problem.capacity))


def _next_level(problem: Problem, low: Fraction, high: Fraction) -> Fraction | None:
    """The level to ask for, where nothing was found below `low` and a schedule has `high`; None where nothing is left."""
    if low >= high:
        return None
    middle = (low + high) / 2
    ends = _room_below(problem, low), _room_below(problem, high)
    return high if high - low <= CLOSE * high or _room_below(problem, middle) in ends else middle


def _floor(problem: Problem, enough: int, high: Fraction, clock: Clock) -> Fraction:
    """The highest level below which closed forms show no schedule of at most `enough` µs; `high` is tried first, for then
    nothing is left to ask."""
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
    """Whether closed forms show that no schedule has at most `enough` µs."""
    capacity = np.array(problem.capacity)
    return bool((problem.taken > capacity[problem.passes.rank]).any()) or closed_form(problem).value > enough
