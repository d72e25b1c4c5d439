"""Rows of messages between GPUs: NCCL moves them, on streams of their own, and the host never waits.

A row's memory is taken from the computing stream's where the schedule has it, so receiving waits for what was launched
before that place and for nothing later. The host starts the receive at the message's place in the one order of all ranks
(docs/nccl.md). What was sent stays until the schedule has it gone: the computing stream waits then, and may use its memory.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..base.program import Message
from ..transport.wires import Wires
from .marks import Marks


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
