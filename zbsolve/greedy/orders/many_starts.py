"""Tabu searches from several schedules side by side, those that have come further for longer.

Where a search begins decides how far it comes: some of the best schedules lead nowhere, and some that are several percent
longer lead to the optimum.

A collective is one pass in these searches, on one stream, so that the order of each stream alone decides a step. Ranks come
to collectives in one order, and none ends before all ranks have begun it. So a collective is no shorter than a pass on a
stream of its own, which waits for all that its parts wait for and takes as long as the longest of them: where the step with
such passes holds, all parts can start when they do. What passes on side streams hold, other passes hold in their place (see
`side_stream`). Other passes on side streams keep their streams, apart from the collectives'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ...problem import Ints, Problem
from ...schedule import Schedule
from ...tables import Edges
from ...util.clock import Clock
from ...util.errors import Deadlock
from ..side_stream import behind_collectives, held_by_others, in_their_place, room_beside, with_side_streams
from ..syncs import with_syncs
from .critical_moves import decided_by_orders, schedule_of, tables_of
from .tabu_search import begun, search_orders

# --- Collectives as one pass each ---


STREAM = ("collectives",)


@dataclass(frozen=True, eq=False)
class OneStream:
    """A step, and the same with one pass a collective, `one`. rows: which pass of the step each of its passes stands for; of
    a collective it is the first part."""

    problem: Problem
    one: Problem
    rows: Ints

    def seen(self, schedule: Schedule) -> Schedule:
        """A schedule of the step as one of `one`. A collective begins when all of its parts have."""
        number, start = self.problem.collective, schedule.timeline().start.copy()
        parts, begun = np.flatnonzero(number >= 0), np.zeros(int(number.max()) + 1, np.int64)
        np.maximum.at(begun, number[parts], start[parts])
        start[parts] = begun[number[parts]]
        turn, place = _turns(schedule, np.arange(len(number)), len(number)), np.zeros(len(number), np.int64)
        place[self.rows] = np.arange(len(self.rows))
        orders = {stream: place[rows] for stream, rows in schedule.sequences.items() if stream in self._computing}
        for stream in self.one.members.keys() - orders.keys():
            rows = self.one.members[stream]
            orders[stream] = rows[np.lexsort((turn[self.rows[rows]], start[self.rows[rows]]))]
        return Schedule.of(self.one, orders)

    def whole(self, schedule: Schedule) -> Schedule | None:
        """A schedule of `one` as one of the step: parts of a collective come where it does, and passes that no pass waits
        for behind all of them. Where memory does not hold so, side streams are ordered anew; None where that does not hold
        either."""
        computing = {stream: self.rows[rows] for stream, rows in schedule.sequences.items() if stream in self._computing}
        try:
            joined = Schedule.of(self.problem, computing | self._beside(schedule))
            room = self.problem.capacity
            if room is None or np.less_equal(joined.timeline().peak_bytes, room).all():
                return with_syncs(joined)
            return with_side_streams(self.problem, Schedule.of(self.problem, computing))
        except Deadlock:
            return None

    def _beside(self, schedule: Schedule) -> dict[str, Ints]:
        """The orders of side streams in a schedule of `one`."""
        problem, number = self.problem, self.problem.collective
        key, turn = np.zeros(len(number), np.int64), _turns(schedule, self.rows, len(number))
        key[self.rows] = schedule.timeline().start
        parts = np.flatnonzero(number >= 0)
        first = self.rows[number[self.rows] >= 0]  # of each collective
        first = first[np.argsort(number[first])][number[parts]]
        key[parts], turn[parts] = key[first], turn[first]
        key[behind_collectives(problem)] += key.max(initial=0) + 1
        beside = {stream: rows for stream, rows in problem.members.items() if stream not in self._computing}
        return {stream: rows[np.lexsort((turn[rows], key[rows]))] for stream, rows in beside.items()}

    @property
    def _computing(self) -> set[str]:
        """The streams whose passes both have."""
        return {stream for stream, rows in self.problem.members.items() if self.problem.computing[rows].any()}


def _turns(schedule: Schedule, rows: Ints, count: int) -> Ints:
    """The place of each pass on its stream, shape (count,): rows says which passes those of the schedule are."""
    turns = np.zeros(count, np.int64)
    for sequence in schedule.sequences.values():
        turns[rows[sequence]] = np.arange(len(sequence))
    return turns


def on_one_stream(problem: Problem) -> OneStream | None:
    """The step with one pass a collective; None where it has none, or where other passes cannot hold what passes on side
    streams do."""
    number, room = problem.collective, room_beside(problem, 1.0)
    if number.max(initial=-1) < 0 or not held_by_others(problem) or (room is not None and room.min() < 0):
        return None
    parts = np.flatnonzero(number >= 0)
    _, first = np.unique(number[parts], return_index=True)
    stands_for = np.arange(len(number))
    stands_for[parts] = parts[first][number[parts]]
    p = problem.passes
    duration, streams = p.duration.copy(), p.streams.copy()
    np.maximum.at(duration, stands_for, p.duration)
    streams[parts] = len(p.stream_sets)
    passes = replace(p, duration=duration, streams=streams, stream_sets=(*p.stream_sets, STREAM))
    rows = np.unique(stands_for)
    capacity = None if room is None else tuple(room.tolist())
    return OneStream(
        problem, replace(problem, passes=passes, edges=_edges(problem, stands_for), capacity=capacity).only(rows), rows
    )


def _edges(problem: Problem, stands_for: Ints) -> Edges:
    """Edges between what passes stand for, each once with the longest lag; bytes are those of passes that compute."""
    e, aside, count = problem.edges, ~problem.computing, len(stands_for)
    before, after = stands_for[e.before], stands_for[e.after]
    size = np.where(aside[e.before] | aside[e.after], 0, problem.device_bytes)
    order = np.lexsort((-e.lag, before * count + after))
    order = order[before[order] != after[order]]
    pair = before[order] * count + after[order]
    new = np.concatenate([[True], pair[1:] != pair[:-1]])[: len(pair)]
    total = np.bincount(np.cumsum(new) - 1, size[order]).astype(np.int64)
    kept = order[new]
    held, taker, freer = in_their_place(problem)
    edges = Edges.of(before[kept], after[kept], lag=e.lag[kept], bytes=total)
    return edges + Edges.of(taker, freer, bytes=problem.device_bytes[held])


# --- Searches side by side ---


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
    seen = lru_cache(SEEN)((lambda schedule: schedule) if view is None else view.seen)
    first, random = seen(known()), np.random.default_rng(seed)
    searches, value = [_Search(first)] if _fits(first) else [], int(first.timeline().value)
    while searches and clock.left > 0 and (value := min(value, int(seen(known()).timeline().value))) > target():
        _add(searches, [seen(starts.pop()) for _ in range(len(starts))], seen(known()))
        _, search = min(enumerate(searches), key=lambda ranked: ranked[1].turns << ranked[0])
        share = 1.0 if search.turns else FIRST_TURNS
        turns = max(MIN_TURNS, int(share * min(TURN_SECONDS, TURN_SHARE * clock.left) / turn))
        clock.spend(turns * turn)
        goes_on = search.go_on(turns, target(), int(random.integers(1 << 31)))
        yield _whole(view, schedule_of(moved, search.tables, search.state.best), clock) if search.value < value else None
        value = min(value, search.value)
        if not goes_on:
            searches.remove(search)


def _whole(view: OneStream | None, schedule: Schedule, clock: Clock) -> Schedule | None:
    """The schedule with all parts of collectives; None where it does not hold."""
    if view is None:
        return schedule
    clock.spend(SECONDS_PER_WHOLE_PASS * len(view.problem.passes))
    return view.whole(schedule)


def _add(searches: list[_Search], starts: Sequence[Schedule], best: Schedule) -> None:
    """Add a search from each start that fits the memory and is like none, and keep the best of all searches, the best one
    first. Where the best schedule is better, and none of the starts, the first search goes on from it."""
    if best.timeline().value < min(search.value for search in searches) and best not in starts and _fits(best):
        searches[0] = _Search(best)
    for new in starts:
        if _fits(new) and all(new.timeline().value not in (search.first, search.value) for search in searches):
            searches.append(_Search(new))
    searches.sort(key=lambda search: search.value)
    searches[:] = [search for k, search in enumerate(searches) if k < MOST_SEARCHES or not search.turns]


def _fits(schedule: Schedule) -> bool:
    """Whether a schedule fits the memory."""
    room = schedule.problem.capacity
    return room is None or all(np.less_equal(schedule.timeline().peak_bytes, room))


def try_moves(schedule: Schedule) -> None:
    """A few turns, so that kernels are compiled."""
    _Search(schedule).go_on(2, 0, 0)
