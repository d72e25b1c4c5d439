"""Schedules in whose memory messages that wait have room, too.

How many messages wait is known when a schedule is (see `handover`), so no search counts them. Where the best schedule lets
more wait than fit beside what it holds, the step is searched again with more memory kept free for them. The bound stays that
of the step: what holds for all schedules holds for those in which messages fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..build.one_microbatch import one_microbatch_needs
from ..handover import lacking, most_waiting
from ..problem import Ints, Pool, Problem
from ..schedule import Schedule
from ..util.clock import Clock
from ..util.text import exact_bytes
from .certify import work_bound
from .state import State

ROUNDS = 4  # in which more and more is kept free
PATIENCE = 0.6  # of the time is left when a search whose best schedule lets too much wait is given up for another round
LEAST_SHARE = 0.1  # of all the time for a further round, however much the first took, until something fits


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
        left = amount - state.clock.used - spent
        if left < LEAST_SHARE * amount and turn and state.lean is not None:
            break
        more = more + lacking(last.schedule)
        problem = _with_less_waiting(state.problem, last.schedule, more, turn)
        clock = state.clock.apart(max(LEAST_SHARE * amount, left))
        last = State(problem, clock, work_bound(problem), progress=state.progress, contest=state.contest)
        last.patience = patience(clock) if turn < ROUNDS - 1 else 0.0
        last.leads += [schedule for schedule in (state.schedule,) if schedule is not None]
        search(last)
        spent += clock.used
        if last.lean is not None:
            state.offer(Schedule(state.problem, last.lean.order, last.lean.syncs), last.lean_solver)
    return spent


def lacking_in_words(schedule: Schedule) -> str:
    """Where messages that wait lack most memory."""
    less = lacking(schedule)
    rank = int(less.argmax())
    wait, lack = (exact_bytes(int(one[rank])) for one in (most_waiting(schedule), less))
    return f"rank {rank} lacks {lack} for what is held and the messages that wait, {wait} at once"


def _with_less_waiting(problem: Problem, found: Schedule, more: Ints, turn: int) -> Problem:
    """The step with so many bytes more kept free for messages on each rank, from the second turn on enough for all that wait
    in `found` at once, as far as one microbatch has room still. Where that is not enough, and from the second turn on, half
    of what lies in pools beside the devices then: ranks run so far ahead because they put things there."""
    assert problem.capacity is not None
    assert problem.messages is not None
    least = one_microbatch_needs(problem)
    more = np.where(more > 0, np.maximum(more, most_waiting(found)), 0) if turn else more
    kept = np.minimum(more, np.maximum(0, np.array(problem.capacity) - least[: problem.ranks]))
    messages = problem.messages._replace(reserved=tuple((problem.messages.reserved + kept).tolist()))
    pools = problem.pools if not turn and (kept == more).all() else _half(problem, found, least[problem.ranks :])
    room = tuple((np.array(problem.capacity) - kept).tolist())
    return replace(problem, capacity=room, messages=messages, pools=pools)


def _half(problem: Problem, found: Schedule, least: Ints) -> tuple[Pool, ...]:
    """The pools with half of what `found` has in them, but at least so much."""
    sizes = zip(problem.room[problem.ranks :].tolist(), least.tolist(), found.timeline().pool_peaks, strict=True)
    smaller = [min(room, max(one, peak // 2)) for room, one, peak in sizes]
    return tuple(replace(pool, capacity=room) for pool, room in zip(problem.pools, smaller, strict=True))
