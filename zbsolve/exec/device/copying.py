"""Copies beside computing, one after the other on each of a rank's copy streams.

`LaunchedCopies` are for GPUs: each stream is a CUDA stream, and the host never waits. `CopyStreams` have a
thread for each stream, for copies by the host, or copies that wait for another rank's, for which a device cannot wait.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from ..base.torch_private import without_modes


class Copy:
    """A copy in progress. work: launches it, or does it; over: called when it is done. Both are dropped after use. ended:
    when it was done, monotonic ns; 0 until then."""

    def __init__(self, work: Callable[[], None], over: Callable[[], None] | None, behind: Sequence[Any]) -> None:
        self.work: Callable[[], None] | None = work
        self.over, self.behind, self.event = over, behind, None
        self.ended = 0
        self.error: BaseException | None = None
        self.launched, self.done = threading.Event(), threading.Event()

    def known(self) -> bool:
        """Is it known to be done?"""
        return self.done.is_set()


class CopyStreams:
    """The copy streams of one rank, by name. Their threads end when this object is deleted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queues: dict[str, SimpleQueue[Copy | None]] = {}

    def mark(self) -> Any:
        """An event after all that the compute stream has launched so far; None on a CPU, which has done it all."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def begin(
        self, stream: str, work: Callable[[], None], behind: Sequence[Any], over: Callable[[], None] | None = None
    ) -> Copy:
        """Start a copy: run `work` on the stream after these events and earlier copies, then call `over`. Never waits."""
        if stream not in self._queues:
            queue = self._queues[stream] = SimpleQueue()
            threading.Thread(target=_run, args=(queue, self.device), daemon=True, name=f"copies {stream}").start()
        copy = Copy(work, over, behind)
        self._queues[stream].put(copy)
        return copy

    def join(self, copy: Copy, timeout: float) -> None:
        """Make all that follows (on a GPU: all that is launched from now on) wait for the copy. Raises the copy's exception,
        and TimeoutError."""
        if not copy.launched.wait(timeout):
            raise TimeoutError(f"not done after {timeout:g} s")
        if copy.error is not None:
            raise copy.error
        if copy.event is not None:
            torch.cuda.current_stream(self.device).wait_event(copy.event)

    def end(self, copy: Copy, timeout: float) -> int:
        """Wait until the copy is done on the device, too. Returns when that was, monotonic ns. Raises as `join`."""
        self.join(copy, timeout)
        if not copy.done.wait(timeout):
            raise TimeoutError(f"not done after {timeout:g} s")
        return copy.ended

    def __del__(self) -> None:
        for queue in self._queues.values():
            queue.put(None)


def _run(queue: SimpleQueue[Copy | None], device: torch.device) -> None:
    """The thread of a stream."""
    stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    while (copy := queue.get()) is not None:
        try:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                for event in copy.behind if stream is not None else ():
                    stream.wait_event(event)
                assert copy.work is not None
                copy.work()
                copy.event = None if stream is None else stream.record_event()
        except BaseException as error:  # raised again by `join`
            copy.error = error
        copy.work = None
        copy.launched.set()
        if copy.event is not None:
            copy.event.synchronize()
        if copy.over is not None and copy.error is None:
            copy.over()
            copy.over = None
        copy.ended = time.monotonic_ns()
        copy.done.set()
        del copy  # free it: the next one may take long to come


timed_event = partial(torch.cuda.Event, enable_timing=True)


@dataclass(slots=True)
class Launched:
    """A copy that was launched. start, end: timed events around it. over: an event for other streams to wait for. (An event
    that a graph captures can be timed or waited for, not both.)"""

    start: Any
    end: Any
    over: Any

    def known(self) -> bool:
        """Is it known to be done? Never: asking the device would break a capture."""
        return False


class LaunchedCopies:
    """The copy streams of one rank on a GPU, by name. A CUDA graph can capture them. event: makes timed events."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.event = device, timed_event
        self._streams = defaultdict[str, Any](partial(torch.cuda.Stream, device))

    def mark(self) -> Any:
        """An event after all that the compute stream has launched so far."""
        return torch.cuda.current_stream(self.device).record_event()

    def begin(self, name: str, work: Callable[[], None], behind: Sequence[Any], over: None = None) -> Launched:
        """Launch what `work` launches, after these events and all earlier work on the stream."""
        stream, start, end = self._streams[name], self.event(), self.event()
        # Modes that count bytes must not see views of host memory.
        with without_modes(), torch.no_grad(), torch.cuda.stream(stream):
            for event in behind:
                stream.wait_event(event)
            start.record(stream)
            work()
            end.record(stream)
            return Launched(start, end, stream.record_event())

    def join(self, copy: Launched, timeout: float) -> None:
        """Make all that is launched from now on wait for the copy."""
        torch.cuda.current_stream(self.device).wait_event(copy.over)


class SideWork:
    """Work beside computing that a rank's passes have started, by pass: copies and collectives. launched: on a GPU's
    streams, not by threads: the host never waits. copies: the streams. seconds: to wait for any of it. begun: work not
    settled yet."""

    def __init__(self, device: torch.device, seconds: float, launched: bool) -> None:
        self.device, self.seconds, self.launched = device, seconds, launched
        self.copies: Any = (LaunchedCopies if launched else CopyStreams)(self.device)
        self.begun: dict[str, tuple[Copy | Launched, Callable[[], Any]]] = {}
        self.done: dict[str, Copy | Launched] = {}

    def begin_step(self, marks: Any) -> None:
        """A step begins. marks: see `Part`."""
        self.done.clear()
        self.copies.event = timed_event if marks is None else marks.event

    def start(
        self,
        name: str,
        stream: str,
        work: Callable[[], None],
        over: Callable[[], Any],
        behind: Sequence[Any] | None = None,
        done: Callable[[], None] | None = None,
    ) -> Copy | Launched:
        """Start the work of pass `name` on a stream, after these events (None: after all that the compute stream has
        launched). over: called by the rank when the work is settled. done: called after the work by the thread that does
        it."""
        copy: Copy | Launched = self.copies.begin(stream, work, [self.copies.mark()] if behind is None else behind, done)
        self.begun[name] = copy, over
        return copy

    def settle(self, name: str, sure: bool = True) -> None:
        """Finish the work of pass `name`: what follows may use its result, and its source is free. Not sure: only if it is
        done already. Raises TimeoutError, and the work's exception."""
        copy, over = self.begun.get(name, (None, None))
        if copy is None or over is None or not (sure or copy.known()):
            return
        self.copies.join(copy, self.seconds)
        over()
        self.done[name], _ = self.begun.pop(name)

    def ended(self, name: str) -> Any:
        """Wait for the work of pass `name`. Returns when it was done, monotonic ns; of launched work, the event at its end.
        Raises as `settle`."""
        self.settle(name)
        copy = self.done[name]
        return copy.end if isinstance(copy, Launched) else self.copies.end(copy, self.seconds)
