"""Times of a device: events on its streams, read when the step is over, on the host's clock."""

from __future__ import annotations

import time
from typing import Any

import torch

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
