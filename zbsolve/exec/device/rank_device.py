"""A rank's GPU in a step: timed events, read in the host's time when everything is done; messages between GPUs, which NCCL
moves on streams of their own; and a guard against hanging."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from ...util.errors import LostRank
from ..base.part import Hooks, Record
from ..base.program import Action, Message
from ..transport.mailbox import HostRows, Looker
from ..transport.peers import Peers
from ..transport.wires import Wires, came_true

TRIES = 3  # to measure the offset between the clocks


class Marks:
    """The timed events of one rank. A step takes them from a pool; nothing waits for them before its end.

    fixed: for one captured graph, whose replays record the same events again. An event that a graph captures can be timed or
    waited for, not both, so nothing waits for a mark there. stream: where this step computes; None: the current stream.
    """

    def __init__(self, device: torch.device, fixed: bool = False) -> None:
        self.device, self.fixed = device, fixed
        self.stream: Any = None
        self._pool: list[Any] = []
        self._used = 0
        self._zero: Any = None
        self._zero_ns = 0

    def begin(self) -> None:
        """A step begins, with the device idle: measure the offset of its clock to the host's."""
        self._used, best = 0, 1 << 62
        for _ in range(TRIES):
            zero, before = torch.cuda.Event(enable_timing=True), time.monotonic_ns()  # type: ignore[no-untyped-call]
            zero.record()
            zero.synchronize()
            after = time.monotonic_ns()
            if after - before < best:
                best, self._zero, self._zero_ns = after - before, zero, (before + after) // 2

    def event(self) -> Any:
        """A timed event of this step that was not used yet."""
        if self._used == len(self._pool):
            self._pool.append(torch.cuda.Event(enable_timing=True, external=self.fixed))  # type: ignore[no-untyped-call]
        self._used += 1
        return self._pool[self._used - 1]

    def mark(self, stream: Any = None) -> Any:
        """Record an event on a stream (None: the one on which the step computes), after all that is launched there."""
        event = self.event()
        event.record(stream or self.computing)
        return event

    @property
    def computing(self) -> Any:
        """The stream on which this step computes."""
        return torch.cuda.current_stream(self.device) if self.stream is None else self.stream

    def done(self, event: Any) -> bool:
        """Has the device reached a mark in this step? (In a replay, marks have been reached by the replay before.)"""
        if not event.query():
            return False
        try:
            return not self.fixed or (self._zero is not None and bool(self._zero.elapsed_time(event) > 0))
        except RuntimeError:  # not recorded yet
            return False

    def ns(self, event: Any) -> int:
        """When the device reached a mark that is `done`, in the host's monotonic ns."""
        return self._zero_ns + round(float(self._zero.elapsed_time(event)) * 1e6)


@dataclass(slots=True)
class Coming:
    """A message to receive into `row`. free: an event after the last use of the row's memory. Once the receive is launched:
    arrived: a mark at its end, there: an event at its end to wait for."""

    row: Tensor
    free: Any
    arrived: Any = None
    there: Any = None


class DeviceRows(HostRows):
    """Rows between GPUs. marks: of the current step. A row may be written when all work is done that was launched before its
    reservation. The compute stream waits for a row when a pass takes it, and for sends that have left, whose memory it may
    reuse then. At the start of a step, rows of an earlier one are dropped."""

    def __init__(self, wires: Wires, device: torch.device, marks: Marks) -> None:
        self._wires, self._device, self.marks = wires, device, marks
        self._streams = defaultdict[int, Any](partial(torch.cuda.Stream, device))
        self._reserved: dict[int, deque[Coming]] = {}
        self._sent: dict[Message, tuple[Any, Tensor]] = {}

    def begin(self) -> None:
        self._reserved.clear()
        self._sent.clear()

    def reserve(self, message: Message, row: Tensor) -> Coming:
        coming = Coming(row, self.marks.computing.record_event())
        self._reserved.setdefault(message.source, deque()).append(coming)
        return coming

    def receive(self, message: Message, coming: Coming) -> None:
        while coming.there is None:
            self._launch(message.source, self._reserved[message.source].popleft())

    def _launch(self, source: int, coming: Coming) -> None:
        stream = self._streams[source]
        stream.wait_event(coming.free)
        with torch.cuda.stream(stream):
            self._wires.receive(coming.row, source).wait()  # the stream waits; with a timeout the host would
        coming.arrived = self.marks.mark(stream)
        coming.there = stream.record_event() if self.marks.fixed else coming.arrived

    def take(self, message: Message, coming: Coming) -> tuple[Tensor, Any]:
        self.receive(message, coming)
        self.marks.computing.wait_event(coming.there)
        return coming.row, coming.arrived

    def send(self, message: Message, row: Tensor) -> None:
        self._sent[message] = self._wires.send(row, message.destination), row

    def gone(self, message: Message) -> None:
        work, _ = self._sent.pop(message, (None, None))
        if work is not None:
            work.wait()

    def flush(self) -> None:
        for message in list(self._sent):
            self.gone(message)


LOOK_SECONDS = 0.2


class RankDevice:
    """The GPU of one rank. actions: of its program; hooks: around them. peak: bytes that the last step allocated at most,
    beside those at its start, by torch's allocator. launching: the host's time to launch the step, ns."""

    def __init__(self, device: torch.device, peers: Peers, actions: tuple[Action, ...], hooks: Hooks) -> None:
        self.device, self.limit = device, hooks.limit
        self.marks, self.guard = Marks(device), Guard(peers, actions, hooks.announce, device)
        self.peak = self.launching = self._before = 0

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A step runs inside. If the guard ended the communicators, an exception is a consequence of that, and the guard's
        cause is raised instead. Raises LostRank."""
        try:
            yield
        except Exception:
            if self.guard.cause is not None:
                raise self.guard.cause from None
            raise
        finally:
            self.guard.end()

    def begin(self, record: Record, marks: Marks, missing: int) -> None:
        """A step begins, after all earlier work on the device. missing: bytes of gradients that it will allocate. Raises
        LostRank where that work never ends."""
        ready = torch.cuda.current_stream(self.device).record_event()
        self.guard.begin(record, marks)
        self.guard.wait(ready)
        marks.begin()
        record.began = time.monotonic_ns()
        self.guard.begin(record, marks)
        self._before = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["current"]
        torch.cuda.reset_peak_memory_stats(self.device)
        if self.limit is not None:
            self._allow(self._before + missing + self.limit)

    def finish(self, record: Record, marks: Marks) -> None:
        """Wait until everything launched is done, and replace the record's times by those of the device. Raises LostRank."""
        over = torch.cuda.current_stream(self.device).record_event()
        self.launching = time.monotonic_ns() - record.began
        self.guard.wait(over)
        if self.limit is not None:
            self._allow(None)
        # (`max_memory_allocated` flattens and sorts all statistics for one of them.)
        self.peak = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["peak"] - self._before
        read_marks(record, marks)

    def _allow(self, size: int | None) -> None:
        """Limit the allocator to this many bytes of the device in total (None: no limit). It frees its cached blocks before
        it reports that memory is out."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if size is None else min(1.0, size / total), self.device)


def read_marks(record: Record, marks: Marks) -> None:
    """Replace the times of launching by those of the device, which has done everything: monotonic ns of the host."""
    record.launched = [end - start for start, end in zip(record.start, record.end, strict=True)]
    spans = [(marks.ns(start), marks.ns(end)) for start, end in record.marks]
    record.start, record.end = [span[0] for span in spans], [span[1] for span in spans]
    for i, mark in record.later.items():
        record.end[i] = max(record.end[i], marks.ns(mark))
    record.arrived = [arrived if isinstance(arrived, int) else marks.ns(arrived) for arrived in record.arrived]


class Guard:
    """Watches one rank from a thread, and ends its communicators if another rank has stopped or nothing happens. actions: of
    its program. announce: called with the pass that runs on the device. device: the GPU that the thread makes its current
    one; else CUDA would take memory of the first GPU for it. cause: why communicators were ended, or None."""

    def __init__(self, peers: Peers, actions: tuple[Action, ...], announce: Any = None, device: Any = None) -> None:
        self.cause: LostRank | None = None
        self._peers, self._actions, self._announce = peers, actions, announce
        self._record: Record | None = None
        self._marks: Marks | None = None
        self._done = 0  # passes of the step that the device has done
        first = (lambda: None) if device is None else partial(torch.cuda.set_device, device)
        self._busy = Looker(self.look, LOOK_SECONDS, first).busy

    def begin(self, record: Record, marks: Marks) -> None:
        """A step begins."""
        self._record, self._marks, self._done = record, marks, 0
        self._since, self._before = time.monotonic(), (0, 0)
        self._busy.set()

    def wait(self, event: Any) -> None:
        """Wait until the device reaches the event at the end of the step. Raises LostRank."""
        came_true(lambda: event.query() or self.cause is not None, inf)
        if self.cause is not None:
            raise self.cause

    def end(self) -> None:
        """The step has ended, or failed."""
        self._busy.clear()

    def look(self) -> None:
        """Check once: has another rank stopped, or does nothing happen here? (A failed device raises in the thread that uses
        it.)"""
        if self.cause is not None or self._record is None or self._marks is None:
            return
        try:
            other = self._peers.stopped()
        except Exception:  # the store is gone with its rank
            other = None
        if other is not None:
            self._end(LostRank("it waits for ranks that stopped", other))
            return
        marks, record = self._marks, self._record
        while self._done < len(record.marks) and marks.done(record.marks[self._done][1]):
            self._done += 1
        now = len(record.marks), self._done
        if now != self._before:
            self._before, self._since = now, time.monotonic()
            if self._announce is not None:  # the host is far ahead of the device, whose progress this reports
                self._announce(self._actions[min(self._done, len(self._actions) - 1)].name)
        limit = self._peers.timeout.total_seconds()
        if time.monotonic() - self._since > limit:
            self._end(self._stuck(record, marks, limit))

    def _end(self, cause: LostRank) -> None:
        self.cause = cause
        self._peers.break_devices()

    def _stuck(self, record: Record, marks: Marks, limit: float) -> LostRank:
        """The error that names what the first unfinished pass waits for."""
        action = self._actions[min(self._done, len(self._actions) - 1)]
        if self._done < len(record.marks):
            arrived = record.arrived[self._done] if self._done < len(record.arrived) else None
            if isinstance(action.takes, Message) and not (arrived and marks.done(arrived)):
                text = f"waiting for {action.takes.before} from rank {action.takes.source}: nothing for {limit:g} s"
                return LostRank(f"rank {self._peers.wires.rank}, pass {action.name}: {text}", action.takes.source)
        return LostRank(f"rank {self._peers.wires.rank}, pass {action.name}: not done after {limit:g} s")
