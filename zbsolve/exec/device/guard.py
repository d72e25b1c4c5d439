"""A thread that looks after a rank whose host or device may wait for another rank.

On a GPU a rank notices nothing of a peer that stopped: its kernels wait, and its host with them, in any call that waits for
the device. So the thread reads the notes of the others and looks whether passes go on. Where not, it ends the rank's
communicators: kernels and calls that wait come back, and the rank says what happened.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..base.program import Action, Message
from ..base.state import Record
from ..transport.failure import LostRank
from ..transport.peers import Peers
from .marks import Marks

LOOK_SECONDS = 0.2
SHORTEST, LONGEST = 1e-5, 1e-3  # seconds between two looks at the device


class Guard:
    """Looks after one rank. actions: of its program. announce: is told the pass that runs on the device. cause: what ended
    its communicators; None: nothing."""

    def __init__(self, peers: Peers, actions: tuple[Action, ...], announce: Callable[[str], None] | None = None) -> None:
        self.cause: LostRank | None = None
        self._peers, self._actions, self._announce = peers, actions, announce
        self._record: Record | None = None
        self._marks: Marks | None = None
        self._done = 0  # passes of the step that are behind the device
        self._busy, self._closed = threading.Event(), threading.Event()
        looking = threading.Thread(target=_look, args=(weakref.ref(self), self._busy, self._closed), daemon=True)
        looking.start()
        weakref.finalize(self, _close, self._busy, self._closed)

    def begin(self, record: Record, marks: Marks) -> None:
        """A step begins."""
        self._record, self._marks, self._done = record, marks, 0
        self._since, self._before = time.monotonic(), (0, 0)
        self._busy.set()

    def wait(self, event: Any) -> None:
        """Wait until the device is behind an event, which ends the step. Raises LostRank."""
        pause = SHORTEST
        try:
            while not event.query():
                if self.cause is not None:
                    raise self.cause
                time.sleep(pause)
                pause = min(1.2 * pause, LONGEST)
            if self.cause is not None:
                raise self.cause
        finally:
            self._busy.clear()

    def end(self) -> None:
        """The step has ended, or broke off."""
        self._busy.clear()

    def look(self) -> None:
        """One look: has another rank stopped, or does nothing go on here?"""
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


def _look(guard: weakref.ref[Guard], busy: threading.Event, closed: threading.Event) -> None:
    """The thread's work, until `closed`."""
    while not closed.is_set():
        busy.wait()
        closed.wait(LOOK_SECONDS)
        one: Callable[[], None] | None = getattr(guard(), "look", None)
        if one is None:
            return
        if busy.is_set():
            with suppress(Exception):  # a device that failed says so to the thread that uses it
                one()
        del one


def _close(busy: threading.Event, closed: threading.Event) -> None:
    closed.set()
    busy.set()
