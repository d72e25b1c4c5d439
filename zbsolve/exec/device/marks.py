"""Times of a device: events on its streams, read when the step is over, on the host's clock; and rows of messages between
GPUs, which NCCL moves on streams of their own."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..base.program import Message
from ..transport.wires import Wires

TRIES = 3  # to find how the clocks stand to each other


class Marks:
    """The timed events of one rank. A step takes them from a pool; nothing waits for them before its end.

    fixed: made for one captured graph, whose replays mark the same ones again. An event that a graph captures has a time or
    is waited for, not both, so nothing waits for a mark there. stream: where this step computes; None: on the current one.
    """

    def __init__(self, device: torch.device, fixed: bool = False) -> None:
        self.device, self.fixed = device, fixed
        self.stream: Any = None
        self._pool: list[Any] = []
        self._used = 0
        self._zero: Any = None
        self._zero_ns = 0

    def begin(self) -> None:
        """A step begins, and the device is idle: find how its clock stands to the host's."""
        self._used, best = 0, 1 << 62
        for _ in range(TRIES):
            zero, before = torch.cuda.Event(enable_timing=True), time.monotonic_ns()  # type: ignore[no-untyped-call]
            zero.record()
            zero.synchronize()
            after = time.monotonic_ns()
            if after - before < best:
                best, self._zero, self._zero_ns = after - before, zero, (before + after) // 2

    def event(self) -> Any:
        """A timed event of this step, which was not recorded yet."""
        if self._used == len(self._pool):
            how = {"enable_timing": True, "external": True} if self.fixed else {"enable_timing": True}
            self._pool.append(torch.cuda.Event(**how))  # type: ignore[no-untyped-call]
        self._used += 1
        return self._pool[self._used - 1]

    def mark(self, stream: Any = None) -> Any:
        """What was launched up to here on a stream: where the step computes, where none is named."""
        event = self.event()
        event.record(stream or self.computing)
        return event

    @property
    def computing(self) -> Any:
        """The stream on which this step computes."""
        return torch.cuda.current_stream(self.device) if self.stream is None else self.stream

    def done(self, event: Any) -> bool:
        """Is a mark behind the device in this step? (A replay's mark has happened before, in the replay before.)"""
        if not event.query():
            return False
        try:
            return not self.fixed or (self._zero is not None and bool(self._zero.elapsed_time(event) > 0))
        except RuntimeError:  # no replay has reached it yet
            return False

    def ns(self, event: Any) -> int:
        """When a mark was reached that is `done`, monotonic ns of the host."""
        return self._zero_ns + round(float(self._zero.elapsed_time(event)) * 1e6)


class Coming:
    """A message that comes. free: behind what used the row's memory before. arrived, there: a mark, and what waits, once the
    receive is launched."""

    __slots__ = ("arrived", "free", "row", "there")

    def __init__(self, row: Tensor, free: Any) -> None:
        self.row, self.free = row, free
        self.arrived: Any = None
        self.there: Any = None


class DeviceRows:
    """See `mailbox.Rows`. marks: of the step that runs."""

    def __init__(self, wires: Wires, device: torch.device, marks: Marks) -> None:
        self._wires, self._device, self.marks = wires, device, marks
        self._streams: dict[int, Any] = {}
        self._reserved: dict[int, deque[Coming]] = {}
        self._sent: dict[Message, tuple[Any, Tensor]] = {}

    def begin(self) -> None:
        """What an earlier step left is of no use."""
        self._reserved.clear()
        self._sent.clear()

    def reserve(self, message: Message, row: Tensor) -> Coming:
        """The row may be written once all that is launched now is done."""
        coming = Coming(row, self.marks.computing.record_event())
        self._reserved.setdefault(message.source, deque()).append(coming)
        return coming

    def receive(self, message: Message, coming: Coming) -> None:
        """Launch the receive, behind those before it from its source."""
        while coming.there is None:
            self._launch(message.source, self._reserved[message.source].popleft())

    def _launch(self, source: int, coming: Coming) -> None:
        stream = self._streams.get(source)
        if stream is None:
            stream = self._streams[source] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(coming.free)
        with torch.cuda.stream(stream):
            self._wires.receive(coming.row, source).wait()  # the stream waits; with a timeout the host would
        coming.arrived, coming.there = self.marks.mark(stream), stream.record_event()

    def take(self, message: Message, coming: Coming) -> tuple[Tensor, Any]:
        """From here on computing has it."""
        self.receive(message, coming)
        self.marks.computing.wait_event(coming.there)
        return coming.row, coming.arrived

    def send(self, message: Message, row: Tensor) -> None:
        """Launch the send, behind all that is launched now."""
        self._sent[message] = self._wires.send(row, message.destination), row

    def gone(self, message: Message) -> None:
        """Computing goes on when it has gone, and may use its memory then."""
        work, _ = self._sent.pop(message, (None, None))
        if work is not None:
            work.wait()

    def flush(self) -> None:
        """Computing goes on when everything has gone."""
        for work, _ in self._sent.values():
            work.wait()
        self._sent.clear()
