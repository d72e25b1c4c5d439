"""A lower bound over every way to divide a batch into microbatches: of any sizes, in any order, in several numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...problem import Ints, Problem
from ...timeline import Floats
from .any_choice import longest

MOST_STATES = 30_000_000  # of the dynamic program over all windows; with more, only windows of whole streams count


class Window(NamedTuple):
    """Some passes of a microbatch on one stream. ends: the least path before one of them plus the least path behind one, by
    the microbatch's size, µs, shape (sizes,). fixed, each: their work is at least fixed + each · size µs."""

    ends: Floats
    fixed: float
    each: float

    def below(self, other: Window) -> bool:
        """Whether the other window is at least as strong in all cases."""
        return bool((self.ends <= other.ends).all()) and self.fixed <= other.fixed and self.each <= other.each


def bound_over_sizes(steps: Sequence[Problem], batch: int, numbers: Sequence[int]) -> int:
    """A lower bound of a step of `batch` sequences over all sizes and orders of its microbatches, µs.

    steps: the step of one microbatch of 1, 2, … sequences.
    batch: sequences of a step.
    numbers: allowed numbers of microbatches, ascending.

    Each microbatch has the same passes, and paths before and behind them, as when it is alone. So some passes on one stream,
    of all microbatches of σ sequences or more, take the least path before one of size σ, plus their work, plus the least
    path behind one. Take sizes from the largest down: k microbatches with n sequences together, the last of size σ, need the
    longest such window for k, n and σ, and what the first k − 1 needed. Dynamic programming finds the least for k of
    `numbers` and n = `batch`. Memory is ignored. For the span it is the work of the busiest rank.
    """
    sizes = min(len(steps), batch)
    whole, windows = _windows(steps[:sizes])
    if len(windows) * sizes * batch * numbers[-1] > MOST_STATES:
        whole, windows = _windows(steps[:sizes], all_of_it=True)
    size, many = np.arange(1, sizes + 1), np.arange(batch + 1)
    state = np.full((sizes, batch + 1), np.inf)
    least, state[:, 0] = np.inf, 0.0
    for count in range(1, numbers[-1] + 1):
        larger = np.minimum.accumulate(state[::-1])[::-1] if count > 1 else state
        state = np.full((sizes, batch + 1), np.inf)
        for row, sequences in enumerate(size.tolist()):
            state[row, sequences:] = np.maximum(larger[row, : batch + 1 - sequences], whole[row] if count == 1 else 0.0)
        for window in windows:
            np.maximum(state, window.ends[:, None] + (window.fixed * count + window.each * many), out=state)
        if count in numbers:
            least = min(least, state[:, batch].min())
    return int(np.ceil(least - 1e-6))


def _windows(steps: Sequence[Problem], all_of_it: bool = False) -> tuple[Floats, list[Window]]:
    """The longest path of one microbatch by its size, and the windows that no other dominates. all_of_it: only windows of
    whole streams."""
    problem, makespan = steps[0], steps[0].objective == "makespan"
    duration = np.array([step.passes.duration for step in steps], np.float64)
    head, tail = (np.array([longest(step, step.passes.duration, back) for step in steps], float) for back in (False, True))
    # Rounding may make a larger size shorter: with the least over larger sizes, bounds never fall as the size grows.
    duration, head, tail = (np.minimum.accumulate(rows[::-1])[::-1] for rows in (duration, head, tail))
    path = (duration + head + tail).max(axis=1) if makespan else duration.max(axis=1)
    windows = list[Window]()
    for rows in problem.members.values():
        rows = rows[problem.in_microbatch[rows]]
        for some in _subsets(rows, head[0], tail[0], all_of_it or not makespan):
            ends = head[:, some].min(axis=1) + tail[:, some].min(axis=1) if makespan else np.zeros(len(steps))
            window = Window(ends, *_line(duration[:, some].sum(axis=1)))
            if not any(window.below(other) for other in windows):
                windows = [other for other in windows if not other.below(window)] + [window]
    return path, windows


def _subsets(rows: Ints, head: Floats, tail: Floats, all_of_it: bool) -> Iterator[Ints]:
    """Sets of passes of a stream: those with at least some path before them, and at least some path behind."""
    for first in (head[rows].min(initial=np.inf),) if all_of_it else np.unique(head[rows]):
        for last in (tail[rows].min(initial=np.inf),) if all_of_it else np.unique(tail[rows]):
            some = rows[(head[rows] >= first) & (tail[rows] >= last)]
            if len(some):
                yield some


def _line(work: Floats) -> tuple[float, float]:
    """A line that is never above the work by size: its value at size 0, and its slope. work: µs, shape (sizes,)."""
    each = (work[-1] - work[0]) / max(1, len(work) - 1)
    return float((work - each * np.arange(1, len(work) + 1)).min()), float(each)
