"""Copies beside computing, one after the other on each copy stream of a rank.

`LaunchedCopies` are a GPU's: launched on a CUDA stream of its own as they begin; the host never waits. `CopyStreams` have a
thread for each stream, for copies that the host does itself, or that wait for another rank's, for which the device cannot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from ..base.torch_private import without_modes


class Copy:
    """A copy that was begun. work: launches or does it; over: called when it is really done. Both are given up then. ended:
    when that was, monotonic ns, 0 until then."""

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
    """The copy streams of one rank, by name. They end with the last reference to this."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queues: dict[str, SimpleQueue[Copy | None]] = {}

    def mark(self) -> Any:
        """An event behind all that computing has launched so far; None on a CPU, which has done it."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def begin(
        self, stream: str, work: Callable[[], None], behind: Sequence[Any], over: Callable[[], None] | None = None
    ) -> Copy:
        """Copy what `work` copies, behind these events and all that was begun on the stream, and call `over`. It never waits
        itself."""
        if stream not in self._queues:
            queue = self._queues[stream] = SimpleQueue()
            threading.Thread(target=_run, args=(queue, self.device), daemon=True, name=f"copies {stream}").start()
        copy = Copy(work, over, behind)
        self._queues[stream].put(copy)
        return copy

    def join(self, copy: Copy, timeout: float) -> None:
        """From here on the copy is done: for all that is launched now, on a GPU. Raises what the copy raised, and
        TimeoutError."""
        if not copy.launched.wait(timeout):
            raise TimeoutError(f"not done after {timeout:g} s")
        if copy.error is not None:
            raise copy.error
        if copy.event is not None:
            torch.cuda.current_stream(self.device).wait_event(copy.event)

    def end(self, copy: Copy, timeout: float) -> int:
        """Wait until the copy is really done. When that was, monotonic ns. Raises as `join`."""
        self.join(copy, timeout)
        if not copy.done.wait(timeout):
            raise TimeoutError(f"not done after {timeout:g} s")
        return copy.ended

    def __del__(self) -> None:
        for queue in self._queues.values():
            queue.put(None)


def _run(queue: SimpleQueue[Copy | None], device: torch.device) -> None:
    """What the thread of a stream does."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    while (copy := queue.get()) is not None:
        try:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                _do(copy, stream)
        except BaseException as error:  # whoever waits for the copy raises it
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
        del copy  # the next one may be long in coming


def _do(copy: Copy, stream: Any) -> None:
    assert copy.work is not None
    if stream is not None:
        for event in copy.behind:
            stream.wait_event(event)
    copy.work()
    if stream is not None:
        copy.event = stream.record_event()


def timed_event() -> Any:
    """An event of the device that has a time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Launched:
    """A copy that was launched. start, end: events with times around it. over: what other streams wait for; one that a
    graph captures can have a time or be waited for, not both."""

    start: Any
    end: Any
    over: Any

    def known(self) -> bool:
        """Is it known to be done? To ask the device would break off a graph's capture."""
        return False


class LaunchedCopies:
    """The copy streams of one rank on a GPU, by name. A CUDA graph can capture them. event: makes those that have a time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.event = device, timed_event
        self._streams: dict[str, Any] = {}

    def mark(self) -> Any:
        """An event behind all that computing has launched so far."""
        return torch.cuda.current_stream(self.device).record_event()

    def begin(self, name: str, work: Callable[[], None], behind: Sequence[Any], over: None = None) -> Launched:
        """Launch what `work` launches, behind these events and all that was begun on the stream."""
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream, start, end = self._streams[name], self.event(), self.event()
        # Views of host memory are no bytes on the device, for one who counts those.
        with without_modes(), torch.no_grad(), torch.cuda.stream(stream):
            for event in behind:
                stream.wait_event(event)
            start.record(stream)
            work()
            end.record(stream)
            return Launched(start, end, stream.record_event())

    def join(self, copy: Launched, timeout: float) -> None:
        """From here on the copy is done, for all that is launched now."""
        torch.cuda.current_stream(self.device).wait_event(copy.over)


class SideWork:
    """What a rank's passes have begun beside computing, by their names: copies and collectives. launched: a GPU's streams do
    it, and no threads. copies: where it is done. seconds: to wait for any of it. begun: what is not settled."""

    def __init__(self, device: torch.device, seconds: float, launched: bool) -> None:
        index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        self.device, self.seconds = torch.device(device.type, index), seconds
        self.copies: Any = (LaunchedCopies if launched else CopyStreams)(self.device)
        self.begun: dict[str, tuple[Copy | Launched, Callable[[], Any]]] = {}
        self.done: dict[str, Copy | Launched] = {}

    @property
    def launched(self) -> bool:
        """Do a GPU's streams do it, so that the host never waits?"""
        return isinstance(self.copies, LaunchedCopies)

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
        """Begin what `work` does for pass `name`, on a stream behind these events (None: all that computing has launched).
        over: what the rank does by itself when that is settled. done: called by the thread that does it, behind it."""
        copy: Copy | Launched = self.copies.begin(stream, work, [self.copies.mark()] if behind is None else behind, done)
        self.begun[name] = copy, over
        return copy

    def settle(self, name: str, sure: bool = True) -> None:
        """From here on the work of pass `name` is done, and what it was from is free. sure: also where that must be waited
        for. Raises TimeoutError, and what the work raised."""
        copy, over = self.begun.get(name, (None, None))
        if copy is None or over is None or not (sure or copy.known()):
            return
        self.copies.join(copy, self.seconds)
        over()
        self.done[name], _ = self.begun.pop(name)

    def ended(self, name: str) -> Any:
        """When the work of pass `name` was done, monotonic ns, waiting for it; where it was launched the event at its end.
        Raises as `settle`."""
        self.settle(name)
        copy = self.done[name]
        return copy.end if isinstance(copy, Launched) else self.copies.end(copy, self.seconds)
