"""The time limit of a search: in real seconds, or in counted work, so that every machine stops at the same point.

Only this module divides the time into shares. Real time passes between two lines of code, so a share may be over when it is
read again: then 0 seconds are left, never a negative time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import BadInput

LEAST_TIME = 0.01  # seconds, or effort, of a nested search at least: it finds its first schedule in any time


class TimeUp(Exception):
    """No time is left; the current work is abandoned."""


class Clock:
    """A time limit; `total`, `left` and `used` are in seconds. With `effort` real time does not count: work is counted by
    `spend`, and a unit is about a second of one core of a current machine. Raises BadInput for limits not above 0."""

    def __init__(self, seconds: float, effort: float | None = None) -> None:
        for name, value in (("seconds", seconds), ("effort", effort)):
            if value is not None and not value > 0:
                raise BadInput(f"{name}: {value} is not a positive time")
        self.counted = effort is not None
        self.total = seconds if effort is None else effort
        self._began = time.monotonic()
        self._spent = 0.0
        self.ended = np.zeros(1, np.int64)  # set to 1 by `stop`; compiled code reads it too
        self._paused: float | None = None

    def spend(self, seconds: float) -> None:
        """Count work of about so many seconds. Clocks of real time ignore it."""
        self._spent += seconds

    def check(self) -> None:
        """Raise TimeUp if no real time is left. Counted work is never abandoned halfway: results would depend on how it is
        divided into steps."""
        if not self.counted and self.left <= 0:
            raise TimeUp

    def stop(self) -> None:
        """No time is left from now on."""
        self.ended[0] = 1

    def pause(self) -> None:
        """Real time does not count from now on, until `go_on`."""
        self._paused = time.monotonic()

    def go_on(self) -> None:
        """Real time counts again."""
        if self._paused is not None:
            self._began += time.monotonic() - self._paused
            self._paused = None

    def share(self, seconds: float) -> TimeShare:
        """A share of the next so many seconds of this clock; 0 if that is negative."""
        return TimeShare(self, self.used + max(0.0, seconds))

    def part(self, fraction: float) -> TimeShare:
        """A share of a fraction (at most 1) of the time that is left."""
        return self.share(fraction * self.left)

    def apart(self, seconds: float) -> Clock:
        """A separate clock of the same kind, from now on, with so many seconds; with none if that is not positive."""
        clock = Clock(LEAST_TIME, LEAST_TIME if self.counted else None)
        clock.total = max(0.0, seconds)
        return clock

    def limit(self, seconds: float) -> dict[str, Any]:
        """The option of a nested search with so many seconds of this clock: `seconds`, or `effort`."""
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
    """The option of a nested search: `seconds`, or `effort` if the clock is counted."""
    return {"effort" if counted else "seconds": max(LEAST_TIME, seconds)}


@dataclass(frozen=True)
class TimeShare:
    """A share of a clock's time. ends: the clock's used seconds at which the share is over."""

    clock: Clock
    ends: float

    @property
    def left(self) -> float:
        """Seconds until the share or the clock ends, never negative."""
        return max(0.0, min(self.ends - self.clock.used, self.clock.left))

    @property
    def over(self) -> bool:
        """It is used up, or its clock is."""
        return self.left <= 0
