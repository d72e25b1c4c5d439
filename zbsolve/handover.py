"""What passes hand to other passes: in which order a rank runs them, when a receive is posted, how many bytes wait.

A message goes along each edge that carries something. It takes memory on its receiver from when its receive is posted
until its pass takes it, and on its sender while it leaves. Between two stages of one rank it lies there from one pass to the
other. The executor posts receives as this module says (`exec.lowering`), and predicts memory with it (`exec.memory`).

Problems do not count these bytes, for the schedule says how long they lie: on edges between ranks they would need syncs of
ranks with each other. `lacking` says what a schedule lacks for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .problem import Ints, MessageRoom
from .schedule import Schedule
from .tables import Bools


def rank_rows(schedule: Schedule, begin: NDArray[Any] | None = None) -> tuple[Ints, ...]:
    """The rows of each rank's passes in the order of the schedule's predicted timeline, which keeps each stream's order. A
    pass that only begins work comes before the pass that runs meanwhile, for the rank is busy until that ends. begin: when
    passes begin, µs, shape (passes,), where that is not their start (see `exec.awaits`)."""
    problem, timeline = schedule.problem, schedule.timeline()
    start, end, rank = timeline.start if begin is None else begin, timeline.end, problem.passes.rank
    turn = np.arange(len(start)) if timeline.turn is None else timeline.turn
    rows = np.lexsort((turn, start, rank))
    begun, orders = problem.passes.that(begun=True), []
    for own in np.split(rows, np.searchsorted(rank[rows], np.arange(1, problem.ranks))):
        place = np.arange(len(own))
        busy = np.maximum.accumulate(np.where(problem.computing[own], place, -1))
        moved = begun[own] & ~problem.computing[own] & (busy >= 0) & (start[own] < end[own[busy]])
        orders.append(own[np.argsort(np.where(moved, busy - 0.5, place), kind="stable")].astype(np.int64))
    return tuple(orders)


@dataclass(frozen=True, eq=False)
class Handover:
    """The messages of a schedule. orders: each rank's rows in order (see `rank_rows`); before, after: of each message the
    rows of the passes that make and take it; boundary: after which stage, −1 where it is of no microbatch; beside: whether
    it is a side input or its gradient; lag: µs on its way."""

    schedule: Schedule
    orders: tuple[Ints, ...]
    before: Ints
    after: Ints
    boundary: Ints
    beside: Bools
    lag: Ints

    @classmethod
    def of(cls, schedule: Schedule, begin: NDArray[Any] | None = None) -> Handover:
        """Those along the edges that carry something; begin: as `rank_rows` takes it."""
        e, stage = schedule.problem.edges, schedule.problem.passes.stage
        rows = np.flatnonzero(e.handing)
        before, after, beside = e.before[rows], e.after[rows], e.beside[rows]
        row = np.where(beside, np.minimum(stage[before], stage[after]), stage[before] - e.carrying("gradient")[rows])
        boundary = np.where(schedule.problem.in_microbatch[before], row, -1)
        return cls(schedule, rank_rows(schedule, begin), before, after, boundary, beside, e.lag[rows])

    def sizes(self, room: MessageRoom) -> Ints:
        """Bytes of each message, shape (messages,); 0 where they are not known."""
        problem = self.schedule.problem
        known = np.zeros(problem.stages + 1, np.int64)  # stages that only help the model's have no messages
        known[: len(room.sizes)] = room.sizes
        sides, stage = np.zeros((problem.stages, problem.stages), np.int64), problem.passes.stage
        for giver, taker, size in room.sides:
            sides[giver, taker] = size
        takers = np.maximum(stage[self.before], stage[self.after])
        return np.where(self.beside, sides[self.boundary * self.beside, takers], known[self.boundary])

    @cached_property
    def place(self) -> Ints:
        """Where each pass stands in its rank's order, shape (passes,)."""
        place = np.zeros(len(self.schedule.problem.passes), np.int64)
        for rows in self.orders:
            place[rows] = np.arange(len(rows))
        return place

    @cached_property
    def _starts(self) -> tuple[NDArray[np.int64], ...]:
        """Of each rank, when the pass at each place starts, or a later one that starts earlier."""
        start = self.schedule.timeline().start
        return tuple(np.minimum.accumulate(start[rows][::-1])[::-1] for rows in self.orders)

    def running(self, rank: int, times: NDArray[np.int64]) -> Ints:
        """Where in its order a rank is at these times, µs; −1 before its first pass."""
        return np.asarray(np.searchsorted(self._starts[rank], times, "right") - 1, np.int64)

    @cached_property
    def posted(self) -> Ints:
        """Before which place of its taker's order each message is received, shape (messages,): the pass that runs when it is
        sent, at least one before its taker, and not behind that of a later message of its sender. One for the same rank: the
        pass that makes it."""
        rank, place, end = self.schedule.problem.passes.rank, self.place, self.schedule.timeline().end
        source, destination = rank[self.before], rank[self.after]
        places = place[self.before].copy()
        ways = np.lexsort((place[self.before], destination, source))
        ways = ways[source[ways] != destination[ways]]
        pair = source[ways] * len(self.orders) + destination[ways]
        for own in np.split(ways, np.flatnonzero(np.diff(pair)) + 1) if len(ways) else ():
            at = self.running(int(destination[own[0]]), end[self.before[own]])
            at = np.minimum(at, place[self.after[own]] - 1)
            places[own] = np.maximum(0, np.minimum.accumulate(at[::-1])[::-1])
        return places

    @cached_property
    def gone(self) -> Ints:
        """Before which place of its sender's order each message has gone, shape (messages,): one pass behind the first that
        starts after it has arrived."""
        rank, places = self.schedule.problem.passes.rank, self.place[self.before] + 2
        there = self.schedule.timeline().end[self.before] + self.lag
        for source in range(len(self.orders)):
            own = np.flatnonzero(rank[self.before] == source)
            places[own] = np.maximum(places[own], self.running(source, there[own]) + 2)
        return places

    def waiting(self, rank: int, sizes: Ints) -> Ints:
        """Bytes of messages on a rank while each pass of its order runs, and right behind it. sizes: bytes of each message,
        shape (messages,)."""
        passes, change = self.schedule.problem.passes, np.zeros(len(self.orders[rank]) + 1, np.int64)
        home, begun = passes.rank, passes.that(begun=True)  # a message that is a pass leaves until that ends
        there, left = home[self.after] == rank, (home[self.before] == rank) & (home[self.after] != rank)
        sent = self.place[self.before[left]]
        ends = self.schedule.timeline().end[self.before[left]]
        over = np.where(begun[self.before[left]], np.maximum(sent, self.running(rank, ends - 1)), sent) + 1
        np.add.at(change, self.posted[there], sizes[there])
        np.subtract.at(change, self.place[self.after[there]], sizes[there])
        np.add.at(change, sent, sizes[left])
        np.subtract.at(change, over, sizes[left])
        return np.cumsum(change[:-1])


def most_waiting(schedule: Schedule) -> Ints:
    """The most bytes of messages that a rank holds at once, shape (ranks,); 0 where their sizes are not known."""
    return np.array([waiting.max(initial=0) for _, waiting in _held_and_waiting(schedule)], np.int64)


def lacking(schedule: Schedule) -> Ints:
    """Bytes that each rank lacks for what the schedule holds and lets wait, shape (ranks,): 0 where the capacity and what is
    reserved for messages are enough, and where sizes or the capacity are not known."""
    problem = schedule.problem
    if problem.messages is None or problem.capacity is None:
        return np.zeros(problem.ranks, np.int64)
    return np.asarray(np.maximum(0, needed(schedule) - np.array(problem.capacity)), np.int64)


def needed(schedule: Schedule) -> Ints:
    """Bytes that each rank needs, shape (ranks,): at its peak, or where messages that wait do not fit what is reserved for
    them, so much more."""
    problem, peaks = schedule.problem, np.array(schedule.timeline().peak_bytes, np.int64)
    if problem.messages is None:
        return peaks
    both = [(held + waiting).max(initial=0) for held, waiting in _held_and_waiting(schedule)]
    return np.asarray(np.maximum(peaks, np.array(both) - np.array(problem.messages.reserved)), np.int64)


def _held_and_waiting(schedule: Schedule) -> list[tuple[Ints, Ints]]:
    """Of each rank the bytes that passes hold and those of messages, when each pass of its order starts."""
    problem, timeline = schedule.problem, schedule.timeline()
    if problem.messages is None:
        return [(np.zeros(1, np.int64),) * 2] * problem.ranks
    handover, rows_of = Handover.of(schedule), []
    sizes = handover.sizes(problem.messages)
    for rank, rows in enumerate(handover.orders):
        start, (times, held) = timeline.start[rows], timeline.memory(rank)
        waiting = handover.waiting(rank, sizes)
        rows_of.append((held[np.searchsorted(times, start, "right") - 1], waiting[handover.running(rank, start)]))
    return rows_of
