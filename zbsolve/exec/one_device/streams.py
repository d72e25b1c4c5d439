"""Streams of one process, one a rank, that take turns: what `OneDevice` runs on.

Work on one stream runs in the order of its launches. It waits for another stream's only where it was told to.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..transport.failure import RunFailed

Work = Callable[[], object]


class Turn:
    """A launch of `Turns`. start, end: monotonic ns, None until then."""

    __slots__ = ("after", "end", "start", "work")

    def __init__(self, work: Work, after: Sequence[Turn]) -> None:
        self.work = work
        self.after = tuple(after)
        self.start: int | None = None
        self.end: int | None = None

    @property
    def waits(self) -> bool:
        """Has something before it not ended yet?"""
        return any(one.end is None for one in self.after)


class Turns:
    """Streams on the CPU. Nothing runs before `finish`, which runs one launch at a time, of any stream that need not wait.
    So every order that streams may take can be had, but nothing overlaps.

    pick: chooses among the streams that can go on (None: the one with the fewest launches so far). facts: JSON values for
    the trace.
    """

    def __init__(self, ranks: int, pick: Callable[[Sequence[int]], int] | None = None) -> None:
        self.facts: dict[str, Any] = {"streams": "cpu, taking turns: no two passes overlap", "partitions": ranks}
        self._ahead: list[deque[Turn]] = [deque() for _ in range(ranks)]
        self._runs = [0] * ranks
        self._pick = pick or (lambda ready: min(ready, key=self._runs.__getitem__))
        self._zero = 0

    def begin(self) -> None:
        """Time 0 is now."""
        self._zero = time.monotonic_ns()

    def launch(self, rank: int, work: Work, after: Sequence[Turn] = ()) -> Turn:
        """Note the work for `finish`."""
        turn = Turn(work, after)
        self._ahead[rank].append(turn)
        return turn

    def finish(self) -> None:
        """Run all launches. Raises RunFailed where streams wait for each other."""
        while ready := [rank for rank, ahead in enumerate(self._ahead) if ahead and not ahead[0].waits]:
            rank = self._pick(ready)
            self._runs[rank] += 1
            turn = self._ahead[rank].popleft()
            turn.start = time.monotonic_ns()
            turn.work()
            turn.end = time.monotonic_ns()
        stuck = [rank for rank, ahead in enumerate(self._ahead) if ahead]
        if stuck:
            raise RunFailed(f"the streams of ranks {stuck} wait for each other")

    def span(self, launch: Turn) -> tuple[float, float]:
        """When a launch began and ended, µs since the step began."""
        assert launch.start is not None
        assert launch.end is not None
        return (launch.start - self._zero) / 1000, (launch.end - self._zero) / 1000
