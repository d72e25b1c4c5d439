"""How far a window that some ranks refute can be raised: ever larger ones, by search or by induction."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ...problem import Ints
from ..bounds.memory_arcs import INFINITE
from .induction import has_many_waves, refute_by_induction
from .lanes import Lanes
from .refutation import NO_INCUMBENT, Answer, refute

FIRST_BREADTH, BREADTH_FACTOR = 8, 4  # states kept with the same positions at first; how many times as many a next try keeps


@dataclass
class WindowSearch:
    """The search for the largest window, µs, that some ranks refute.

    fits: a window that is known to fit, or to be of no use. Steps double while windows are refuted (`min_step` at first),
    and between a refuted window and `fits` they are halved. breadth: what the last answer took. incumbent: see `refute`.
    hard: the window that had no answer last, with `hard_states` partial orders.
    """

    lanes: Lanes
    fits: int
    min_step: int
    step: int = 0
    breadth: int = FIRST_BREADTH
    incumbent: Ints = field(default_factory=lambda: NO_INCUMBENT)
    hard: int = INFINITE
    hard_states: int = 0

    @cached_property
    def long(self) -> bool:
        """Whether induction is worth a try: there are many waves of microbatches."""
        return has_many_waves(self.lanes)

    def next_window(self, refuted: int, grain: int, states: int) -> int | None:
        """The window, µs, to try next with so many states; None where no more than `grain` is left to gain."""
        end = self.fits if states > self.hard_states else min(self.fits, self.hard)
        if end - refuted <= max(1, grain):
            return None
        window = refuted + max(self.min_step, self.step)
        return (refuted + end) // 2 if window >= end else window

    def attempt(self, window: int, states: int) -> tuple[Answer, int]:
        """Whether the window is refuted with so many states, and how many were tried.

        The breadth grows from what it took last while that leaves states. Of many microbatches induction is asked first.
        """
        breadth, tried = self.breadth, 0
        while True:
            answer, count = refute(self.lanes, window, breadth, states - tried, False, self.incumbent)
            tried += count
            if answer is not Answer.MERGED or tried + count > states:
                break
            if self.long and breadth == self.breadth:
                induced, count = refute_by_induction(self.lanes, window + 1, states - tried, self.incumbent)
                tried += count
                if induced is not Answer.MERGED:
                    answer = induced
                    break
            breadth *= BREADTH_FACTOR
        if answer in (Answer.MERGED, Answer.TOO_MANY):
            self.step, self.hard, self.hard_states = self.step // 4, window, states
            return answer, tried
        self.breadth = breadth
        if answer is Answer.REFUTED:
            self.step = 2 * max(self.min_step, self.step)
        else:
            self.fits = window
        return answer, tried
