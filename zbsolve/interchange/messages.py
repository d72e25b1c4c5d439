"""Sends and receives between the passes of an order, for engines whose files list them.

Both methods here (`posted`, `blocking`) put all messages into one sequence over all ranks, and each rank handles its own in
that order. Thus ranks cannot deadlock, and a sender and its receiver agree on the next message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from .order import Cell, Order, backwards, spans_of


class Message(NamedTuple):
    """A message with an activation or a gradient, which pass `before` makes and pass `after` takes."""

    before: Cell
    after: Cell
    sender: int
    receiver: int

    @property
    def forward(self) -> bool:
        """True for an activation, False for a gradient."""
        return self.before.kind == "F"


class Event(NamedTuple):
    """An event of a rank. word: "run", or "send" or "receive" a message. start, end: µs. turn: a message's number."""

    word: str
    cell: Cell
    start: float
    end: float
    message: Message | None = None
    turn: int = 0


Rows = list[list[Event]]


def messages_of(order: Order, local: bool = False) -> Iterator[Message]:
    """All messages, grouped by sender, in its order. local: include messages between two stages of the same rank."""
    backward, last = backwards(order.rows), len(order.placement) - 1
    for rank, row in enumerate(order.rows):
        for cell in row:
            after = _taken_by(cell, backward, last)
            if after is not None and (local or order.placement[after.stage] != rank):
                yield Message(cell, after, rank, order.placement[after.stage])


def _taken_by(cell: Cell, backward: dict[tuple[int, int], str], last: int) -> Cell | None:
    """The pass of another stage that takes the output of `cell`; None if there is none."""
    stage, kind, m = cell
    if kind == "F":
        return None if stage == last else Cell(stage + 1, "F", m)
    return None if kind == "W" or not stage else Cell(stage - 1, backward[stage - 1, m], m)


def posted(order: Order, local: bool = False) -> Rows:
    """Each rank's passes, sends and receives, for engines that do not wait when they issue a message. A send is directly
    after the pass that makes it; its receive is at the same time on the other rank, before the pass that runs there."""
    # If every pass takes at least 1 µs, the order of passes follows from their times.
    problem = order.schedule.problem
    passes = replace(problem.passes, duration=np.maximum(problem.passes.duration, 1))
    longer = spans_of(replace(order.schedule, problem=replace(problem, passes=passes)))
    ends = [[end for _, end in row] for row in longer]
    position = [{cell: i for i, cell in enumerate(row)} for row in order.rows]
    line = sorted((ends[m.sender][position[m.sender][m.before]], m.sender, m) for m in messages_of(order, local))
    events_at: list[list[list[Event]]] = [[[] for _ in range(len(row) + 1)] for row in order.rows]
    for turn, (time, _, message) in enumerate(line):
        end = order.spans[message.sender][position[message.sender][message.before]][1]
        for word, rank, cell in (("send", message.sender, message.before), ("receive", message.receiver, message.after)):
            events_at[rank][bisect_right(ends[rank], time)].append(Event(word, cell, end, end, message, turn))
    rows: Rows = []
    for row, spans, (first, *others) in zip(order.rows, order.spans, events_at, strict=True):
        rows.append(first)
        for cell, span, events in zip(row, spans, others, strict=True):
            rows[-1] += [Event("run", cell, *span), *events]
    return rows


def blocking(order: Order) -> Rows:
    """Each rank's passes, sends and receives, for engines whose sender and receiver wait for each other. A message is sent
    when both ranks are free; a gradient only after the receiver's previous backward, as DeepSpeed keeps one gradient."""
    return _Rendezvous(order).rows()


class _Rendezvous:
    """List scheduling of passes in their order and of messages, which occupy both ranks. What can start first is next;
    messages go before passes, and those of later ranks first (so 1F1B is no longer than DeepSpeed's `TrainSchedule`)."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.free = [0.0] * len(order.rows)
        self.position = [0] * len(order.rows)
        self.made: dict[Cell, float] = {}  # a message's `after` → when its content was made
        self.waiting: dict[Cell, Message] = {message.after: message for message in messages_of(order)}
        self.of = {message.before: message for message in self.waiting.values()}
        self.backward = [[cell for cell in row if cell.kind != "F"] for row in order.rows]
        self.done = [0] * len(order.rows)  # backwards
        self.lag = _lags(order)
        self.events: Rows = [[] for _ in order.rows]
        self.heap: list[tuple[float, int, int, Cell]] = []

    def rows(self) -> Rows:
        for rank in range(len(self.order.rows)):
            self._offer_pass(rank)
        while self.heap:
            start, is_pass, turn, cell = heappop(self.heap)
            message = None if is_pass else self.waiting[cell]
            ranks = [message.sender, message.receiver] if message else [self.order.placement[cell.stage]]
            later = max([start, *(self.free[rank] for rank in ranks)])
            if later > start:  # a rank was taken since
                heappush(self.heap, (later, is_pass, turn, cell))
            elif is_pass:
                self._run(ranks[0], cell, start)
            else:
                self._send(self.waiting.pop(cell), start)
        return self.events

    def _offer_pass(self, rank: int) -> None:
        row = self.order.rows[rank]
        if self.position[rank] < len(row) and row[self.position[rank]] not in self.waiting:
            heappush(self.heap, (self.free[rank], 1, rank, row[self.position[rank]]))

    def _offer_message(self, message: Message) -> None:
        rank = message.receiver
        turn = message.forward or self.backward[rank][self.done[rank]] == message.after
        if turn and message.after in self.made:
            heappush(self.heap, (self.made[message.after], 0, -rank, message.after))

    def _run(self, rank: int, cell: Cell, start: float) -> None:
        begin, end = self.order.spans[rank][self.position[rank]]
        self.events[rank].append(Event("run", cell, start, start + end - begin))
        self.free[rank] = start + end - begin
        self.position[rank] += 1
        if cell in self.of:
            self.made[self.of[cell].after] = self.free[rank]
            self._offer_message(self.of[cell])
        if cell.kind != "F":
            self.done[rank] += 1
            following = self.backward[rank][self.done[rank] : self.done[rank] + 1]
            if following and following[0] in self.waiting:
                self._offer_message(self.waiting[following[0]])
        self._offer_pass(rank)

    def _send(self, message: Message, start: float) -> None:
        end = start + self.lag.get((message.before, message.after), 0)
        for word, rank, cell in (("send", message.sender, message.before), ("receive", message.receiver, message.after)):
            self.events[rank].append(Event(word, cell, start, end, message))
            self.free[rank] = end
        row, at = self.order.rows[message.receiver], self.position[message.receiver]
        if row[at] == message.after:
            self._offer_pass(message.receiver)


def _lags(order: Order) -> dict[tuple[Cell, Cell], int]:
    """(before, after) of a message → its µs."""
    problem = order.schedule.problem
    e, number = problem.edges, {ours: i for i, ours in enumerate(order.microbatches)}
    p = problem.passes
    away = (p.rank[e.before] != p.rank[e.after]).nonzero()[0]

    def cells(rows: Sequence[int]) -> list[Cell]:
        return [Cell(int(p.stage[i]), p.kind_names[i], number[int(p.microbatch[i])]) for i in rows]

    ends = zip(cells(e.before[away].tolist()), cells(e.after[away].tolist()), strict=True)
    return dict(zip(ends, e.lag[away].tolist(), strict=True))
