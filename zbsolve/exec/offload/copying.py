"""Copies beside computing: a thread for each copy stream of a rank, which does one copy after the other.

On a GPU the thread launches the copy on a CUDA stream of its own, behind what was launched when the copy was begun; who
needs it lets the device wait, and goes on. Elsewhere the thread copies by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch


class Copy:
    """A copy that was begun. work: launches or does it; over: called when it is really done. Both are given up then. ended:
    when that was, monotonic ns, 0 until then."""

    def __init__(self, work: Callable[[], None], over: Callable[[], None] | None, behind: Any) -> None:
        self.work: Callable[[], None] | None = work
        self.over, self.behind, self.event = over, behind, None
        self.ended = 0
        self.error: BaseException | None = None
        self.launched, self.done = threading.Event(), threading.Event()


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
