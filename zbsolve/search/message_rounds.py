"""Schedules in whose memory messages that wait have room, too.

How many messages wait is known when a schedule is (see `handover`), so no search counts them. Where the best schedule lets
more wait than fit beside what it holds, the step is searched again with more memory kept free for them. The bound stays that
of the step: what holds for all schedules holds for those in which messages fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..handover import lacking, most_waiting
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..util.clock import Clock
from ..util.errors import NotFound
from ..util.text import exact_bytes
from .certify import work_bound
from .state import State

ROUNDS = 4  # in which more and more is kept free
PATIENCE = 0.6  # of the time is left when a search whose best schedule lets too much wait is given up for another round
LEAST_SHARE = 0.1  # of all the time for a further round, however much the first took


def patience(clock: Clock) -> float:
    """How much of a search's time is left when it may be given up (see `State.astray`)."""
    return PATIENCE * clock.left


def search_again(state: State, amount: float, search: Callable[[State], None]) -> float:
    """Search again where `state`, a search that has ended, lets too much wait, until something as short as a round's best
    fits; what fits is offered to `state`. amount: seconds or effort for all; search: searches a state until it is done.
    Returns the time that the further rounds took."""
    last, more, spent = state, np.zeros(state.problem.ranks, np.int64), 0.0
    for turn in range(ROUNDS):
        if last.schedule is None or last.lean_value == last.value:
            break
        more = more + lacking(last.schedule)
        problem = _reserving(state.problem, _more_for_all(last.schedule, more) if turn else more)
        problem = problem or _reserving(state.problem, more)
        if problem is None:
            break
        left = max(LEAST_SHARE * amount, amount - state.clock.used - spent)
        clock = Clock(left, left if state.clock.counted else None)
        last = State(problem, clock, work_bound(problem), progress=state.progress)
        last.patience = patience(clock) if turn < ROUNDS - 1 else 0.0
        last.leads += [one for one in (state.schedule,) if one is not None]
        search(last)
        spent += clock.used
        if last.lean is not None:
            state.offer(Schedule(state.problem, last.lean.order, last.lean.syncs), last.lean_solver)
    return spent


def no_room(state: State) -> NotFound:
    """Why no schedule of the search counts: messages that wait do not fit."""
    assert state.schedule is not None
    less = lacking(state.schedule)
    rank = int(less.argmax())
    wait, lack = (exact_bytes(int(one[rank])) for one in (most_waiting(state.schedule), less))
    return NotFound(
        f"messages: in the best schedule {wait} of them wait on rank {rank}, which lacks {lack}; none was found in which "
        "they fit, and it is not proven that there is none"
    )


def _more_for_all(schedule: Schedule, more: Ints) -> Ints:
    """At least `more`, and on those ranks enough for all that waits at once, whenever it does."""
    return np.where(more > 0, np.maximum(more, most_waiting(schedule)), 0)


def _reserving(problem: Problem, more: Ints) -> Problem | None:
    """The step with so many bytes more kept free for messages on each rank; None where a pass has no room then."""
    assert problem.capacity is not None
    assert problem.messages is not None
    room = np.array(problem.capacity) - more
    if (problem.taken > room[problem.passes.rank]).any():
        return None
    messages = problem.messages._replace(reserved=tuple((problem.messages.reserved + more).tolist()))
    return replace(problem, capacity=tuple(room.tolist()), messages=messages)
