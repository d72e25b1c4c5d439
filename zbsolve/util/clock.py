"""How long a search may take: in real seconds, or in counted work so that every machine stops at the same place.

Shares of that time are made here and nowhere else. Real time goes on between two lines, so what is left of a share may be
gone when the next line reads it: then it is 0, never less, and nobody refuses it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import BadInput

LEAST_TIME = 0.01  # seconds, or effort, that a search of its own gets at least: its first schedule comes in any time


class TimeUp(Exception):
    """No time is left: what was begun is given up."""


class Clock:
    """`total`, `left` and `used` in seconds. With `effort` a unit is about a second of work on one core of today's machines,
    counted by `spend`, and real time plays no part. Raises BadInput for a budget that is not positive."""

    def __init__(self, seconds: float, effort: float | None = None) -> None:
        for name, value in (("seconds", seconds), ("effort", effort)):
            if value is not None and not value > 0:
                raise BadInput(f"{name}: {value} is not a positive time")
        self.counted = effort is not None
        self.total = seconds if effort is None else effort
        self._began = time.monotonic()
        self._spent = 0.0
        self.ended = np.zeros(1, np.int64)  # 1 from `stop` on: compiled code reads it, too
        self._paused: float | None = None

    def spend(self, seconds: float) -> None:
        """Count work that takes about so many seconds; real clocks count by themselves."""
        self._spent += seconds

    def check(self) -> None:
        """Raise TimeUp where no real time is left. Counted work is never given up in the middle: it would then depend on how
        it is cut into steps."""
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
        """The next so many seconds of this clock, none where that is negative."""
        return TimeShare(self, self.used + max(0.0, seconds))

    def part(self, fraction: float) -> TimeShare:
        """The next part of what is left; fraction: at most 1."""
        return self.share(fraction * self.left)

    def apart(self, seconds: float) -> Clock:
        """A clock of its own that counts as this one does, from now on, with so many seconds; with none left where that is
        not positive."""
        clock = Clock(LEAST_TIME, LEAST_TIME if self.counted else None)
        clock.total = max(0.0, seconds)
        return clock

    def limit(self, seconds: float) -> dict[str, Any]:
        """The option that gives a search of its own so many of these seconds: `seconds`, or `effort`."""
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
    """The option that gives a search of its own so many seconds, or so much effort where that is counted."""
    return {"effort" if counted else "seconds": max(LEAST_TIME, seconds)}


@dataclass(frozen=True)
class TimeShare:
    """A share of a clock's time. ends: where it is used up, in seconds that the clock has used."""

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
