"""How far a window that some ranks refute can be raised: ever larger ones, by search or by induction."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ..problem import Ints
from .onerank import NOBODY, Answer, Lanes, refute
from .onerank_induct import by_induction, is_long

NARROW, WIDER = 8, 4  # states kept of each set of positions at first, and by how much more a next try keeps


@dataclass
class Climb:
    """The search for the largest window, µs, that some ranks refute: `fits` is known to fit (or of no use), steps double
    while they are refuted (`least` at first), and between the two windows are halved. `breadth` is what the last answer
    took. `incumbent`: see `refute`."""

    lanes: Lanes
    fits: int
    least: int
    step: int = 0
    breadth: int = NARROW
    incumbent: Ints = field(default_factory=lambda: NOBODY)

    @cached_property
    def long(self) -> bool:
        return is_long(self.lanes)

    def window(self, refuted: int, grain: int = 0) -> int | None:
        """The window to try next; None where no more than `grain` is left to gain."""
        if self.fits - refuted <= max(1, grain):
            return None
        window = refuted + max(self.least, self.step)
        return (refuted + self.fits) // 2 if window >= self.fits else window

    def attempt(self, window: int, states: int) -> tuple[Answer, int]:
        """Whether the window is refuted with so many states, and how many were tried. The breadth grows from what it took
        last while that leaves states; of many microbatches induction is asked before it does."""
        breadth, tried = self.breadth, 0
        while True:
            answer, count = refute(self.lanes, window, breadth, states - tried, False, self.incumbent)
            tried += count
            if answer is not Answer.MERGED or tried + count > states:
                break
            if self.long and breadth == self.breadth:
                induced, count = by_induction(self.lanes, window + 1, states - tried, self.incumbent)
                tried += count
                if induced is not Answer.MERGED:
                    answer = induced
                    break
            breadth *= WIDER
        if answer in (Answer.MERGED, Answer.TOO_MANY):
            self.step //= 4
            return answer, tried
        self.breadth = breadth
        if answer is Answer.REFUTED:
            self.step = 2 * max(self.least, self.step)
        else:
            self.fits = window
        return answer, tried
