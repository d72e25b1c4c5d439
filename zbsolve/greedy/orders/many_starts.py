"""Tabu searches from several schedules in turn; the better a search is, the more time it gets.

The result of a search depends on its start: some of the best schedules lead nowhere, and some that are several percent
longer lead to the optimum.

In these searches a collective is one pass on a common stream, so that the orders of streams alone decide a step. That is
correct: all ranks run collectives in one order, and none ends before all ranks have begun it. The one pass waits for all
that the parts wait for and takes as long as the longest of them; so if the step with such passes is valid, all parts can
start when it does. Bytes of side passes are held by other passes in their place (see `side_stream`). Other side passes keep
their streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ...problem import Ints, Problem
from ...problem.tables import Edges
from ...schedule import Schedule
from ...util.clock import Clock
from ...util.errors import Deadlock
from ..side_stream import behind_collectives, held_by_others, in_their_place, room_beside, with_side_streams
from ..syncs import with_syncs
from .critical_moves import decided_by_orders, schedule_of, tables_of
from .tabu_search import PART, begun, search_orders, search_parts, turn_seconds

# --- Collectives as one pass each ---


STREAM = ("collectives",)


@dataclass(frozen=True, eq=False)
class OneStream:
    """A step `problem`, and the same step with one pass for each collective, `one`. rows: the pass of the step for which
    each pass of `one` stands; for a collective it is the first part."""

    problem: Problem
    one: Problem
    rows: Ints

    def seen(self, schedule: Schedule) -> Schedule:
        """A schedule of the step as one of `one`. A collective begins when its last part does."""
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
        """A schedule of `one` as one of the step: parts of a collective take its place, and side passes behind collectives
        for which no pass waits come last. If that exceeds the memory, side streams are ordered anew. None: a deadlock."""
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
        """The streams with compute passes, which both problems have."""
        return {stream for stream, rows in self.problem.members.items() if self.problem.computing[rows].any()}


def _turns(schedule: Schedule, rows: Ints, count: int) -> Ints:
    """The place of each pass on its stream, shape (count,). rows: the numbers of the schedule's passes in the result."""
    turns = np.zeros(count, np.int64)
    for sequence in schedule.sequences.values():
        turns[rows[sequence]] = np.arange(len(sequence))
    return turns


def on_one_stream(problem: Problem) -> OneStream | None:
    """The step with one pass for each collective; None without these, or if other passes cannot hold side passes' bytes."""
    number, room = problem.collective, room_beside(problem)
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
    """The edges after each pass is replaced by the one that stands for it; of equal edges one stays, with the longest lag.
    Bytes are those of compute passes."""
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


# One search runs for at most so many seconds, and this share of the time left, before another's turn; and for MIN_TURNS at
# least. If these do not fit into TURN_SECONDS the step is too long.
TURN_SECONDS, TURN_SHARE, MIN_TURNS = 0.1, 0.1, 20
SECONDS_PER_WHOLE_PASS = 1e-5  # the time of `OneStream.whole`, about
FIRST_TURNS = 0.25  # the first run of a search has this share of the usual turns
# Of runs in parts of the step: their least and largest share; the weight of what earlier runs gained; and a gain, as a share
# of the value, that changes little.
PARTS_SHARE, EARLIER, LITTLE = (0.15, 0.85), 0.7, 1e-5
MOST_SEARCHES = 6
SEEN = 16  # schedules whose form with one pass a collective is cached


class _Search:
    """One search. first, value: the value of its start and its best one, µs. turns: how many it has had. gained: by runs in
    the whole step lately, and by runs in parts of it, µs."""

    def __init__(self, schedule: Schedule) -> None:
        self.tables, self.turns = tables_of(schedule), 0
        self.first = self.value = int(schedule.timeline().value)
        self.state = begun(self.tables, self.value)
        self.gained = [0.0, 0.0]

    def go_on(self, turns: int, target: int, random: np.random.Generator) -> bool:
        """Take so many turns, or search parts of the step for as long; more often what has gained more. Returns False if no
        move is possible any more."""
        whole, part = (gain + LITTLE * self.first for gain in self.gained)
        goes_on, count, seed = True, len(self.tables.order), int(random.integers(1 << 31))
        in_parts = count > PART and bool(random.random() < np.clip(part / (whole + part), *PARTS_SHARE))
        if in_parts:
            search_parts(self.tables, self.state, turns * turn_seconds(count), target, seed)
        else:
            goes_on = bool(search_orders(self.tables, self.state, turns, target, seed))
        gain, self.value = self.value - int(self.state.numbers[0]), int(self.state.numbers[0])
        self.gained[in_parts] += (1 - EARLIER) * (gain - self.gained[in_parts])
        self.turns += turns
        return goes_on


def better_orders(
    known: Callable[[], Schedule], starts: MutableSequence[Schedule], clock: Clock, seed: int, target: Callable[[], int]
) -> Iterator[Schedule | None]:
    """Better and better schedules until the clock ends; None after turns without a better one.

    known: the best schedule, which other sources may improve meanwhile. starts: further schedules to search from; the search
    removes those that it takes. target: the value, µs, at which to end. The best search has half of the turns, the next a
    quarter, and so on. It ends early if no move is possible, and at once if orders alone do not decide the memory or the
    step is very long. A collective is one pass here (see `OneStream`)."""
    problem = known().problem
    view = on_one_stream(problem)
    moved = problem if view is None else view.one
    turn = turn_seconds(len(moved.passes))
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
        goes_on = search.go_on(turns, target(), random)
        yield _whole(view, schedule_of(moved, search.tables, search.state.best), clock) if search.value < value else None
        value = min(value, search.value)
        if not goes_on:
            searches.remove(search)


def _whole(view: OneStream | None, schedule: Schedule, clock: Clock) -> Schedule | None:
    """The schedule with all parts of collectives; None if it is not valid."""
    if view is None:
        return schedule
    clock.spend(SECONDS_PER_WHOLE_PASS * len(view.problem.passes))
    return view.whole(schedule)


def _add(searches: list[_Search], starts: Sequence[Schedule], best: Schedule) -> None:
    """Add a search from each start that fits the memory and has a new value, and keep the best searches, sorted. If `best`
    is better than all and not among the starts, the first search restarts from it."""
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
    """Run a few turns, to compile the kernels."""
    search = _Search(schedule)
    search_parts(search.tables, search.state, 1e-6, 0, 0)
    search.go_on(2, 0, np.random.default_rng(0))
