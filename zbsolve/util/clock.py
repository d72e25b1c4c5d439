"""A search's time budget: in real seconds, or in counted work so that every machine stops at the same point.

Shares of that time are computed only here. Real time passes between two lines of code, so a share may be used up by the
next line: then its time left is 0, never negative, and nothing rejects it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import BadInput

LEAST_TIME = 0.01  # seconds, or effort, minimum of a nested search: it always yields a first schedule


class TimeUp(Exception):
    """No time is left: the work in progress is abandoned."""


class Clock:
    """`total`, `left` and `used` in seconds. With `effort` a unit is about a second of work on one core of today's machines,
    counted by `spend`, and real time is ignored. Raises BadInput for a budget that is not positive."""

    def __init__(self, seconds: float, effort: float | None = None) -> None:
        for name, value in (("seconds", seconds), ("effort", effort)):
            if value is not None and not value > 0:
                raise BadInput(f"{name}: {value} is not a positive time")
        self.counted = effort is not None
        self.total = seconds if effort is None else effort
        self._began = time.monotonic()
        self._spent = 0.0
        self.ended = np.zeros(1, np.int64)  # 1 after `stop`; compiled code reads it too
        self._paused: float | None = None

    def spend(self, seconds: float) -> None:
        """Count work of about this many seconds; no effect on real clocks."""
        self._spent += seconds

    def check(self) -> None:
        """Raise TimeUp if no real time is left. Counted work goes on: results would otherwise depend on its division."""
        if not self.counted and self.left <= 0:
            raise TimeUp

    def stop(self) -> None:
        """End the time now."""
        self.ended[0] = 1

    def pause(self) -> None:
        """Stop counting real time until `go_on`."""
        self._paused = time.monotonic()

    def go_on(self) -> None:
        """Count real time again."""
        if self._paused is not None:
            self._began += time.monotonic() - self._paused
            self._paused = None

    def share(self, seconds: float) -> TimeShare:
        """A share of the next `seconds` of this clock, empty if that is negative."""
        return TimeShare(self, self.used + max(0.0, seconds))

    def part(self, fraction: float) -> TimeShare:
        """A share of this fraction of the time left; fraction: at most 1."""
        return self.share(fraction * self.left)

    def apart(self, seconds: float) -> Clock:
        """A separate clock of the same kind that starts now, with this many seconds; with none left if negative."""
        clock = Clock(LEAST_TIME, LEAST_TIME if self.counted else None)
        clock.total = max(0.0, seconds)
        return clock

    def limit(self, seconds: float) -> dict[str, Any]:
        """The keyword argument that gives a nested search this many seconds: `seconds`, or `effort`."""
        return limit_of(seconds, self.counted)

    @property
    def used(self) -> float:
        """Seconds so far."""
        now = time.monotonic() if self._paused is None else self._paused
        return self._spent if self.counted else now - self._began

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return 0.0 if self.ended[0] else max(0.0, self.total - self.used)


def limit_of(seconds: float, counted: bool) -> dict[str, Any]:
    """The keyword argument that gives a nested search this many seconds, or this much effort if that is counted."""
    return {"effort" if counted else "seconds": max(LEAST_TIME, seconds)}


@dataclass(frozen=True)
class TimeShare:
    """A share of a clock's time. ends: the clock's `used` at which it is used up."""

    clock: Clock
    ends: float

    @property
    def left(self) -> float:
        """Seconds until the share or the clock ends, never negative."""
        return max(0.0, min(self.ends - self.clock.used, self.clock.left))

    @property
    def over(self) -> bool:
        """Whether the share or its clock is used up."""
        return self.left <= 0
