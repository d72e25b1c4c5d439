"""How long a search may take: in real seconds, or in counted work so that every machine stops at the same place."""

from __future__ import annotations

import time

from .errors import BadInput


class TimeUp(Exception):
    """No time is left: what was begun is given up."""


class Clock:
    """`left` and `used` in seconds. With `effort`, one unit is about one second of work on one core of today's machines,
    counted by `spend`, and real time plays no part. Raises BadInput for a budget that is not positive."""

    def __init__(self, seconds: float, effort: float | None = None) -> None:
        for name, value in (("seconds", seconds), ("effort", effort)):
            if value is not None and not value > 0:
                raise BadInput(f"{name}: {value} is not a positive time")
        self.counted = effort is not None
        self._total = seconds if effort is None else effort
        self._began = time.monotonic()
        self._spent = 0.0
        self._stopped = False
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
        self._stopped = True

    def pause(self) -> None:
        """Real time does not count from now on, until `go_on`."""
        self._paused = time.monotonic()

    def go_on(self) -> None:
        """Real time counts again."""
        if self._paused is not None:
            self._began += time.monotonic() - self._paused
            self._paused = None

    @property
    def used(self) -> float:
        """Seconds so far."""
        now = time.monotonic() if self._paused is None else self._paused
        return self._spent if self.counted else now - self._began

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return 0.0 if self._stopped else max(0.0, self._total - self.used)
