"""A rank's GPU in a step: events for times, which are read on the host's clock when all is done; rows of messages between
GPUs, which NCCL moves on streams of their own; and a guard."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class DeviceRows(HostRows):
    """Rows between GPUs. marks: of the step that runs. A row may be written once all is done that was launched when it was
    reserved. Computing waits for a row where a pass takes it, and for sends that are over, whose memory it may use then.
    What an earlier step left is dropped when one begins."""

    def __init__(self, wires: Wires, device: torch.device, marks: Marks) -> None:
        self._wires, self._device, self.marks = wires, device, marks
        self._streams: dict[int, Any] = {}
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
        stream = self._streams.get(source)
        if stream is None:
            stream = self._streams[source] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(coming.free)
        with torch.cuda.stream(stream):
            self._wires.receive(coming.row, source).wait()  # the stream waits; with a timeout the host would
        coming.arrived, coming.there = self.marks.mark(stream), stream.record_event()

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
        for work, _ in self._sent.values():
            work.wait()
        self._sent.clear()


LOOK_SECONDS = 0.2


class RankDevice:
    """The GPU of one rank. actions: of its program; hooks: around them. peak: the most bytes that the last step took beside
    what lay there when it began, as torch's allocator counts. launching: how long its host took to launch all of it, ns."""

    def __init__(self, device: torch.device, peers: Peers, actions: tuple[Action, ...], hooks: Hooks) -> None:
        self.device, self.limit = device, hooks.limit
        self.marks, self.guard = Marks(device), Guard(peers, actions, hooks.announce)
        self.peak = 0
        self.launching = 0
        self._before = 0

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A step runs inside. Where the guard ended the communicators, what raises then is a consequence, and why it did is
        raised. Raises LostRank."""
        try:
            yield
        except Exception:
            if self.guard.cause is not None:
                raise self.guard.cause from None
            raise
        finally:
            self.guard.end()

    def begin(self, record: Record, marks: Marks, missing: int) -> None:
        """A step begins, behind all that was launched before. missing: bytes of gradients that it will make anew. Raises
        LostRank where that is never done."""
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        self.guard.begin(record, marks)
        self.guard.wait(ready)
        marks.begin()
        record.began = time.monotonic_ns()
        self.guard.begin(record, marks)
        self._before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        if self.limit is not None:
            self._allow(self._before + missing + self.limit)

    def finish(self, record: Record, marks: Marks) -> None:
        """Wait until all is done that was launched, and put the times of the device in place of the host's. Raises
        LostRank."""
        over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        over.record()
        self.launching = time.monotonic_ns() - record.began
        self.guard.wait(over)
        if self.limit is not None:
            self._allow(None)
        self.peak = torch.cuda.max_memory_allocated(self.device) - self._before
        read_marks(record, marks)

    def _allow(self, size: int | None) -> None:
        """Let the allocator take so many bytes of the device in all (None: whatever there is); what it keeps unused goes
        before it says that memory is out."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if size is None else min(1.0, size / total), self.device)


def read_marks(record: Record, marks: Marks) -> None:
    """Put the times of the device, which has done all, in place of those of launching: monotonic ns of the host."""
    record.launched = [end - start for start, end in zip(record.start, record.end, strict=True)]
    spans = [(marks.ns(start), marks.ns(end)) for start, end in record.marks]
    record.start, record.end = [span[0] for span in spans], [span[1] for span in spans]
    for i, mark in record.later.items():
        record.end[i] = max(record.end[i], marks.ns(mark))
    record.arrived = [arrived if isinstance(arrived, int) else marks.ns(arrived) for arrived in record.arrived]


def missing_bytes(parameters: Any) -> int:
    """Bytes of the gradients that trained parameters do not have yet."""
    return sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)


class Guard:
    """Looks after one rank. actions: of its program. announce: is told the pass that runs on the device. cause: what ended
    its communicators; None: nothing."""

    def __init__(self, peers: Peers, actions: tuple[Action, ...], announce: Callable[[str], None] | None = None) -> None:
        self.cause: LostRank | None = None
        self._peers, self._actions, self._announce = peers, actions, announce
        self._record: Record | None = None
        self._marks: Marks | None = None
        self._done = 0  # passes of the step that are behind the device
        self._busy = Looker(self.look, LOOK_SECONDS).busy

    def begin(self, record: Record, marks: Marks) -> None:
        """A step begins."""
        self._record, self._marks, self._done = record, marks, 0
        self._since, self._before = time.monotonic(), (0, 0)
        self._busy.set()

    def wait(self, event: Any) -> None:
        """Wait until the device is behind an event, which ends the step. Raises LostRank."""
        try:
            came_true(lambda: event.query() or self.cause is not None, inf)
            if self.cause is not None:
                raise self.cause
        finally:
            self._busy.clear()

    def end(self) -> None:
        """The step has ended, or broke off."""
        self._busy.clear()

    def look(self) -> None:
        """One look: has another rank stopped, or does nothing go on here? (A device that failed says so to the thread that
        uses it. None comes at the process's end, which it would abort.)"""
        if self.cause is not None or self._record is None or self._marks is None:
            return
        try:
            other = self._peers.stopped()
        except Exception:  # the store is gone with its rank: what goes on here says the rest
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
            if self._announce is not None:  # the host is far ahead, and who looks after that must hear that all goes on
                self._announce(self._actions[min(self._done, len(self._actions) - 1)].name)
        limit = self._peers.timeout.total_seconds()
        if time.monotonic() - self._since > limit:
            self._end(self._stuck(record, marks, limit))

    def _end(self, cause: LostRank) -> None:
        self.cause = cause
        self._peers.break_devices()

    def _stuck(self, record: Record, marks: Marks, limit: float) -> LostRank:
        """What the first pass that is not done waits for."""
        action = self._actions[min(self._done, len(self._actions) - 1)]
        if self._done < len(record.marks):
            arrived = record.arrived[self._done] if self._done < len(record.arrived) else None
            if isinstance(action.takes, Message) and not (arrived and marks.done(arrived)):
                text = f"waiting for {action.takes.before} from rank {action.takes.source}: nothing for {limit:g} s"
                return LostRank(f"rank {self._peers.wires.rank}, pass {action.name}: {text}", action.takes.source)
        return LostRank(f"rank {self._peers.wires.rank}, pass {action.name}: not done after {limit:g} s")
