"""Tabu searches from several schedules side by side, those that have come further for longer.

Where a search begins decides how far it comes: some of the best schedules lead nowhere, and some that are several percent
longer lead to the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence, Sequence
from functools import lru_cache, partial

import numpy as np

from ...schedule import Schedule
from ...util.clock import Clock
from .one_stream import OneStream, on_one_stream
from .order_tables import decided_by_orders, schedule_of, tables_of
from .tabu_search import begun, search_orders

SECONDS_PER_TURN, SECONDS_PER_PASS = 4e-6, 2.5e-8  # that a turn takes, about
# Of one search, before another's turn: seconds at most, and share of what is left; turns at least. A step of which fewer fit
# into those seconds is too long.
TURN_SECONDS, TURN_SHARE, MIN_TURNS = 0.1, 0.1, 20
SECONDS_PER_WHOLE_PASS = 1e-5  # that all parts of collectives take, about
FIRST_TURNS = 0.25  # of as many turns a search has at first
MOST_SEARCHES = 6
SEEN = 16  # schedules whose form with one pass a collective is kept


class _Search:
    """One search: its tables and what it knows, the value, µs, that it began with and its best, and the turns it has had."""

    def __init__(self, schedule: Schedule) -> None:
        self.tables, self.turns = tables_of(schedule), 0
        self.first = self.value = int(schedule.timeline().value)
        self.state = begun(self.tables, self.value)

    def go_on(self, turns: int, target: int, seed: int) -> bool:
        """Take so many turns. False where no move holds any more."""
        self.turns += turns
        goes_on = bool(search_orders(self.tables, self.state, turns, target, seed))
        self.value = int(self.state.numbers[0])
        return goes_on


def better_orders(
    known: Callable[[], Schedule], starts: MutableSequence[Schedule], clock: Clock, seed: int, target: Callable[[], int]
) -> Iterator[Schedule | None]:
    """Better schedules than `known()`, which others may improve meanwhile, until the clock ends; None after turns without
    one. `starts` are other schedules to search from, at any time; they are taken out. The best search has half of the turns,
    the next a quarter, and so on. Ends at the value `target()`, µs, where no move holds, and at once where orders alone do
    not decide the memory, or of a very long step. A collective is one pass here (see `OneStream`)."""
    problem = known().problem
    view = on_one_stream(problem)
    moved = problem if view is None else view.one
    turn = SECONDS_PER_TURN + len(moved.passes) * SECONDS_PER_PASS
    if MIN_TURNS * turn > TURN_SECONDS or not decided_by_orders(moved):
        return
    seen = lru_cache(SEEN)(partial(_seen, view))
    first, random = seen(known()), np.random.default_rng(seed)
    searches, value = [_Search(first)] if _fits(first) else [], int(first.timeline().value)
    while searches and clock.left > 0 and (value := min(value, int(seen(known()).timeline().value))) > target():
        _add(searches, [seen(starts.pop()) for _ in range(len(starts))], seen(known()))
        _, one = min(enumerate(searches), key=lambda ranked: ranked[1].turns << ranked[0])
        share = 1.0 if one.turns else FIRST_TURNS
        turns = max(MIN_TURNS, int(share * min(TURN_SECONDS, TURN_SHARE * clock.left) / turn))
        clock.spend(turns * turn)
        goes_on = one.go_on(turns, target(), int(random.integers(1 << 31)))
        yield _whole(view, schedule_of(moved, one.tables, one.state.best), clock) if one.value < value else None
        value = min(value, one.value)
        if not goes_on:
            searches.remove(one)


def _seen(view: OneStream | None, schedule: Schedule) -> Schedule:
    """The schedule with one pass a collective."""
    return schedule if view is None else view.seen(schedule)


def _whole(view: OneStream | None, schedule: Schedule, clock: Clock) -> Schedule | None:
    """The schedule with all parts of collectives; None where it does not hold."""
    if view is None:
        return schedule
    clock.spend(SECONDS_PER_WHOLE_PASS * len(view.problem.passes))
    return view.whole(schedule)


def _add(searches: list[_Search], starts: Sequence[Schedule], best: Schedule) -> None:
    """Add a search from each start that fits the memory and is like none, and keep the best of all searches, the best one
    first. Where the best schedule is better, and none of the starts, the first search goes on from it."""
    if best.timeline().value < min(one.value for one in searches) and best not in starts and _fits(best):
        searches[0] = _Search(best)
    for new in starts:
        if _fits(new) and all(new.timeline().value not in (one.first, one.value) for one in searches):
            searches.append(_Search(new))
    searches.sort(key=lambda one: one.value)
    searches[:] = [one for k, one in enumerate(searches) if k < MOST_SEARCHES or not one.turns]


def _fits(schedule: Schedule) -> bool:
    """Whether a schedule fits the memory."""
    room = schedule.problem.capacity
    return room is None or all(np.less_equal(schedule.timeline().peak_bytes, room))


def try_moves(schedule: Schedule) -> None:
    """A few turns, so that kernels are compiled."""
    _Search(schedule).go_on(2, 0, 0)
