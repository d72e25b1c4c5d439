"""Rows of messages between ranks on CPUs: received ahead, and sent without waiting.

The thread that runs the passes receives and waits itself: handing a message from one thread to another costs more than the
message.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any

from torch import Tensor

from ..base.program import Message
from .failure import LostRank
from .wires import Wires, reason

POLL_SECONDS = 0.001  # between looks at what was sent
SMALL_BYTES, SMALL_COUNT = 1 << 12, 16  # what was sent is not worth a look up to here
Coming = tuple[Any, Tensor]


class HostRows:
    """See `mailbox.Rows`. timeout: to wait for a message."""

    def __init__(self, wires: Wires, timeout: timedelta) -> None:
        self._wires, self._timeout = wires, timeout
        self.sent = Sent(timeout)

    def begin(self) -> None:
        """There is nothing to do."""

    def reserve(self, message: Message, row: Tensor) -> Coming:
        """Receive from now on."""
        return self._wires.receive(row, message.source), row

    def receive(self, message: Message, coming: Coming) -> None:
        """It does already."""

    def take(self, message: Message, coming: Coming) -> tuple[Tensor, int]:
        """Wait for it; and when it was here, monotonic ns."""
        work, row = coming
        work.wait(self._timeout)
        return row, time.monotonic_ns()

    def send(self, message: Message, row: Tensor) -> None:
        """Start sending."""
        self.sent.keep(self._wires.send(row, message.destination), row)

    def gone(self, message: Message) -> None:
        """A thread looks after what was sent."""

    def flush(self) -> None:
        """Wait until everything has gone."""
        self.sent.flush()


class Sent:
    """Keeps what was sent until it has gone. gloo's work objects cannot be asked, so a thread waits for them. It looks from
    time to time: waking it for every message would cost the thread that runs the passes more than the message."""

    def __init__(self, timeout: timedelta) -> None:
        self._open: deque[tuple[Any, Tensor]] = deque()
        self._broken: list[str] = []
        self._looking = Lock()
        self._busy = Event()
        self._timeout = timeout
        closed = Event()
        everything = self._open, self._broken, self._looking, self._busy, closed, timeout
        Thread(target=_look, args=everything, daemon=True).start()
        weakref.finalize(self, _close, self._busy, closed)

    def keep(self, work: Any, tensor: Tensor) -> None:
        """Keep `tensor` until `work` is done (None: it is), or a few small ones until `flush`."""
        if work is None:
            return
        self._open.append((work, tensor))
        if (tensor.nbytes > SMALL_BYTES or len(self._open) > SMALL_COUNT) and not self._busy.is_set():
            self._busy.set()

    def flush(self) -> None:
        """Wait for all of it. Raises LostRank."""
        if not self._looking.acquire(timeout=self._timeout.total_seconds()):
            raise LostRank(f"sending: not taken for {self._timeout.total_seconds():g} s")
        try:
            _wait_for(self._open, self._broken, self._timeout)
            self._busy.clear()
        finally:
            self._looking.release()
        if self._broken:
            raise LostRank(f"sending: {self._broken[0]}")


def _look(
    sent: deque[tuple[Any, Tensor]], broken: list[str], looking: Lock, busy: Event, closed: Event, timeout: timedelta
) -> None:
    """The thread's work, until `closed`; it sleeps while nothing is on its way."""
    while busy.wait() and not closed.is_set():
        with looking:
            _wait_for(sent, broken, timeout)
        time.sleep(POLL_SECONDS)


def _wait_for(sent: deque[tuple[Any, Tensor]], broken: list[str], timeout: timedelta) -> None:
    while sent:
        work, tensor = sent[0]
        try:
            work.wait(timeout)
        except Exception as error:
            broken.append(reason(error))
        del work, tensor
        sent.popleft()


def _close(busy: Event, closed: Event) -> None:
    closed.set()
    busy.set()
