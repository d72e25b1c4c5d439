"""Copies beside computing, one after the other on each copy stream of a rank.

`LaunchedCopies` are a GPU's: launched on a CUDA stream of its own as they begin; the host never waits. `CopyStreams` have a
thread for each stream, for copies that the host does itself, or that wait for another rank's, for which the device cannot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from ..base.torch_private import without_modes


class Copy:
    """A copy that was begun. work: launches or does it; over: called when it is really done. Both are given up then. ended:
    when that was, monotonic ns, 0 until then."""

    def __init__(self, work: Callable[[], None], over: Callable[[], None] | None, behind: Any) -> None:
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

    def begin(self, stream: str, work: Callable[[], None], over: Callable[[], None] | None = None) -> Copy:
        """Copy what `work` copies, behind all that was begun on the stream, and call `over`. It never waits itself."""
        if stream not in self._queues:
            queue = self._queues[stream] = SimpleQueue()
            threading.Thread(target=_run, args=(queue, self.device), daemon=True, name=f"copies {stream}").start()
        behind = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
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
        stream.wait_event(copy.behind)
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
    """The copy streams of one rank on a GPU, by name. A CUDA graph can capture them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, Any] = {}

    def mark(self) -> Any:
        """An event behind all that computing has launched so far."""
        return torch.cuda.current_stream(self.device).record_event()

    def begin(
        self, name: str, work: Callable[[], None], behind: Iterable[Any], event: Callable[[], Any] = timed_event
    ) -> Launched:
        """Launch what `work` launches, behind these events and all that was begun on the stream. event: makes those that
        have a time."""
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream, start, end = self._streams[name], event(), event()
        # Views of host memory are no bytes on the device, for one who counts those.
        with without_modes(), torch.no_grad(), torch.cuda.stream(stream):
            for one in behind:
                stream.wait_event(one)
            start.record(stream)
            work()
            end.record(stream)
            return Launched(start, end, stream.record_event())

    def join(self, copy: Launched, timeout: float) -> None:
        """From here on the copy is done, for all that is launched now."""
        torch.cuda.current_stream(self.device).wait_event(copy.over)


class Begun(NamedTuple):
    """Work that is not settled. over: what the rank does by itself when it is."""

    copy: Copy | Launched
    over: Callable[[], Any]


class SideWork:
    """What a rank's passes have begun beside computing, by their names: copies and collectives. launched: a GPU's streams do
    it, and no threads. copies: where it is done. seconds: to wait for any of it. begun: what is not settled."""

    def __init__(self, device: torch.device, seconds: float, launched: bool) -> None:
        index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        self.device, self.seconds = torch.device(device.type, index), seconds
        self.copies: Any = (LaunchedCopies if launched else CopyStreams)(self.device)
        self.begun: dict[str, Begun] = {}
        self.done: dict[str, Copy | Launched] = {}

    def settle(self, name: str, sure: bool = True) -> None:
        """From here on the work of pass `name` is done, and what it was from is free. sure: also where that must be waited
        for. Raises TimeoutError, and what the work raised."""
        begun = self.begun.get(name)
        if begun is None or not (sure or begun.copy.known()):
            return
        self.copies.join(begun.copy, self.seconds)
        begun.over()
        self.done[name] = self.begun.pop(name).copy

    def ended(self, name: str) -> Any:
        """When the work of pass `name` was done, monotonic ns, waiting for it; where it was launched the event at its end.
        Raises as `settle`."""
        self.settle(name)
        copy = self.done[name]
        return copy.end if isinstance(copy, Launched) else self.copies.end(copy, self.seconds)
