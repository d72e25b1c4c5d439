"""Messages between passes: in which order a rank runs its passes, when it posts each receive, how many bytes wait.

Each edge that carries something is a message. It takes memory on its receiver from when the receive is posted until the
receiving pass begins, and on its sender until it has left. Between two stages of one rank it lies there from one pass to the
other. The executor posts receives as this module says (`exec.lowering`), and predicts memory with it (`exec.memory`).

A problem does not count these bytes, since how long they wait depends on the schedule: counted on edges between ranks, they
would need syncs between ranks. `lacking` tells how many bytes a schedule lacks for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Ints, MessageRoom
from ..problem.tables import Bools
from .schedule import Schedule


def rank_rows(schedule: Schedule, begin: NDArray[Any] | None = None) -> tuple[Ints, ...]:
    """The rows of each rank's passes in the order in which the rank issues them: by start in the predicted timeline. A pass
    that only begins work (kinds `begun`) comes before the compute pass during which it starts, since the rank is busy until
    that ends. begin: when passes begin, µs, shape (passes,), if that is not their start (see `exec.awaits`)."""
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
    """A schedule's messages, shape (messages,) each. orders: each rank's rows in order (see `rank_rows`). before, after:
    rows of the sending and the receiving pass. boundary: the stage before the boundary that it crosses; −1: it belongs to
    no microbatch. beside: whether it is a side input or the gradient of one. lag: µs that it travels."""

    schedule: Schedule
    orders: tuple[Ints, ...]
    before: Ints
    after: Ints
    boundary: Ints
    beside: Bools
    lag: Ints

    @classmethod
    def of(cls, schedule: Schedule, begin: NDArray[Any] | None = None) -> Handover:
        """The messages of a schedule. begin: see `rank_rows`."""
        e, stage = schedule.problem.edges, schedule.problem.passes.stage
        rows = np.flatnonzero(e.handing)
        before, after, beside = e.before[rows], e.after[rows], e.beside[rows]
        row = np.where(beside, np.minimum(stage[before], stage[after]), stage[before] - e.carrying("gradient")[rows])
        boundary = np.where(schedule.problem.in_microbatch[before], row, -1)
        return cls(schedule, rank_rows(schedule, begin), before, after, boundary, beside, e.lag[rows])

    def sizes(self, room: MessageRoom) -> Ints:
        """Bytes of each message, shape (messages,); 0 where they are not known."""
        problem = self.schedule.problem
        known = np.zeros(problem.stages + 1, np.int64)  # stages without layers have no messages
        known[: len(room.sizes)] = room.sizes
        sides, stage = np.zeros((problem.stages, problem.stages), np.int64), problem.passes.stage
        for giver, taker, size in room.sides:
            sides[giver, taker] = size
        takers = np.maximum(stage[self.before], stage[self.after])
        return np.where(self.beside, sides[self.boundary * self.beside, takers], known[self.boundary])

    @cached_property
    def place(self) -> Ints:
        """The place of each pass in its rank's order, shape (passes,)."""
        place = np.zeros(len(self.schedule.problem.passes), np.int64)
        for rows in self.orders:
            place[rows] = np.arange(len(rows))
        return place

    @cached_property
    def _starts(self) -> tuple[NDArray[np.int64], ...]:
        """For each rank the earliest start among the passes from each place of its order on, µs."""
        start = self.schedule.timeline().start
        return tuple(np.minimum.accumulate(start[rows][::-1])[::-1] for rows in self.orders)

    def running(self, rank: int, times: NDArray[np.int64]) -> Ints:
        """The place in its order that a rank has reached at these times, µs; −1 before its first pass."""
        return np.asarray(np.searchsorted(self._starts[rank], times, "right") - 1, np.int64)

    @cached_property
    def posted(self) -> Ints:
        """Before which place of the receiver's order each receive is posted, shape (messages,). That is the pass which runs
        there when the message is sent, and at least one before the receiving pass; messages between two ranks are posted in
        the order in which they are sent. A message within a rank has the place of its sending pass."""
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
        """Before which place of the sender's order each message has certainly left, shape (messages,): one pass behind the
        first that starts after it has arrived."""
        rank, places = self.schedule.problem.passes.rank, self.place[self.before] + 2
        there = self.schedule.timeline().end[self.before] + self.lag
        for source in range(len(self.orders)):
            own = np.flatnonzero(rank[self.before] == source)
            places[own] = np.maximum(places[own], self.running(source, there[own]) + 2)
        return places

    def waiting(self, rank: int, sizes: Ints) -> Ints:
        """Bytes of messages on a rank while each pass of its order runs, shape (passes of the rank,). sizes: bytes of each
        message, shape (messages,)."""
        passes, change = self.schedule.problem.passes, np.zeros(len(self.orders[rank]) + 1, np.int64)
        home, begun = passes.rank, passes.that(begun=True)  # a message sent by such a pass stays until the pass ends
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
    """The most bytes of messages that each rank holds at once, shape (ranks,); 0 if sizes are not known."""
    return np.array([waiting.max(initial=0) for _, waiting in _held_and_waiting(schedule)], np.int64)


def lacking(schedule: Schedule) -> Ints:
    """Bytes that each rank lacks for activations and messages that wait, shape (ranks,). 0: its capacity and the bytes
    reserved for messages are enough, or sizes or capacity are not known."""
    problem = schedule.problem
    if problem.messages is None or problem.capacity is None:
        return np.zeros(problem.ranks, np.int64)
    return np.asarray(np.maximum(0, needed(schedule) - np.array(problem.capacity)), np.int64)


def needed(schedule: Schedule) -> Ints:
    """Bytes of capacity that each rank needs, shape (ranks,): its peak of activations, or more where the messages that wait
    do not fit into the bytes that are reserved for them."""
    problem, peaks = schedule.problem, np.array(schedule.timeline().peak_bytes, np.int64)
    if problem.messages is None:
        return peaks
    both = [(held + waiting).max(initial=0) for held, waiting in _held_and_waiting(schedule)]
    return np.asarray(np.maximum(peaks, np.array(both) - np.array(problem.messages.reserved)), np.int64)


def _held_and_waiting(schedule: Schedule) -> list[tuple[Ints, Ints]]:
    """For each rank: bytes of activations and bytes of messages at the start of each pass of its order."""
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
