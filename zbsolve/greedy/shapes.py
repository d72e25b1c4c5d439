"""Annealing over the shape of a block: what its repetition decodes to is what counts.

`modulo` asks of a block that it repeats as it is; here all microbatches are only wished alike, or alike in turn, and
`unroll` mends overlaps and memory. There are few unknowns (an offset a lane, the period), each shift moves the whole
steady state, and every trial is a legal schedule. Ramps gain from shifts of single passes afterwards (`ramps`).
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from ..problem import Ints
from .ramps import Walk, spread
from .template import Template
from .unroll import Habit, decode_fast, repeat_fast


class Shape(NamedTuple):
    """Wished offsets, µs, shape (k, lanes): microbatch j takes row j mod k, and starts j periods (µs) later. The habit it
    is walked with."""

    offset: Ints
    period: int
    habit: Habit


@numba.njit(cache=True, nogil=True)
def _bend(t, offset, step):  # type: ignore[no-untyped-def]
    """Shift one lane, all from one on (at once or more and more), some in a row, or weight gradients; in all rows or one."""
    rows, lanes = offset.shape
    first, last = 0, rows
    if rows > 1 and np.random.randint(2) == 0:
        first = np.random.randint(rows)
        last = first + 1
    kind = np.random.randint(8)
    a = np.random.randint(lanes)
    z = min(lanes, a + 2 + np.random.randint(len(t.room)))
    for row in offset[first:last]:
        if kind <= 1:
            row[a] += step
        elif kind <= 3:
            row[(0 if kind == 3 and last - first < rows else a) :] += step
        elif kind == 4:
            for lane in range(a, lanes):
                row[lane] += step * (min(lane, z) - a) // (z - a)
        elif kind == 5:
            row[a:z] += step
        else:
            for lane in range(lanes):
                if t.leaf[lane] == 1 and (kind == 6 or t.rank[lane] == t.rank[a]):
                    row[lane] += step


@numba.njit(cache=True, nogil=True)
def _improve_shape(t, now, period, habits, steps, target, rounds, heat, seed, start, order):  # type: ignore[no-untyped-def]
    """Annealing from the shape `now` with the last of `habits`; now and habits[-1] become the best found, start and order
    its walk. Value (−1 where none held the memory) and period."""
    np.random.seed(seed)
    share = 8.0 * len(t.room)
    current, offset, best = now.copy(), now.copy(), now.copy()
    habit, trial = habits[-1].copy(), habits[-1].copy()
    wish = np.empty_like(start)
    cost, best_cost, best_value, best_period = np.inf, np.inf, np.int64(-1), period
    for turn in range(rounds):
        if 0 <= best_value <= target:
            break
        offset[:] = current
        trial[:] = habit
        shifted = period
        for _ in range(0 if turn == 0 else 1 + np.random.randint(2)):
            step = steps[np.random.randint(len(steps))]
            if np.random.randint(2) == 0:
                step = max(1, step // (1 + np.random.randint(16)))
            if np.random.randint(2) == 0:
                step = -step
            kind = np.random.randint(10)
            if kind == 0:
                shifted = max(0, shifted + step // 4)
            elif kind == 1:
                trial[:] = habits[np.random.randint(len(habits))]
            else:
                _bend(t, offset, step)
        repeat_fast(offset, shifted, wish)
        value, found, row = decode_fast(t, wish, trial[0], trial[1], trial[2])
        if value < 0:
            continue
        new = value + spread(t, found) / share
        if new <= cost or np.random.random() < np.exp((cost - new) / (heat * (1.0 - turn / rounds))):
            cost, period = new, shifted
            current[:] = offset
            habit[:] = trial
            if new < best_cost:
                best_cost, best_value, best_period = new, value, shifted
                best[:] = offset
                start[:] = found
                order[:] = row
                habits[-1] = trial
    now[:] = best
    return best_value, best_period


def improve_shape(
    t: Template, begin: Shape, habits: tuple[Habit, ...], steps: Ints, target: int, rounds: int, heat: float, seed: int
) -> tuple[Shape, Walk] | None:
    """The best shape and its walk that `rounds` trials of annealing find from `begin`, None where none holds the memory.
    `habits`: what else to try; `heat`: µs of loss at first taken lightly. Stops at value `target`."""
    offset, tried = begin.offset.copy(), np.array([*habits, begin.habit], np.int64)
    start = np.empty((len(t.rank), t.microbatches), np.int64)
    order = np.empty(start.size, np.int64)
    value, period = _improve_shape(t, offset, begin.period, tried, steps, target, rounds, heat, seed, start, order)
    if value < 0:
        return None
    habit = Habit(*tried[-1].tolist())
    return Shape(offset, int(period), habit), Walk(int(value), start, order, habit)
