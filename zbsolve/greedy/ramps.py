"""Annealing over wished times: what `unroll` makes of them is what counts, so every trial is a legal schedule."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from ..problem import Ints
from .template import Template
from .unroll import PLAIN, Habit, decode, decode_fast


@numba.njit(cache=True, nogil=True)
def spread(t, start):  # type: ignore[no-untyped-def]
    """Sum over ranks of the last end (less the first start where the objective is span), µs: breaks ties."""
    total = np.int64(0)
    for rank in range(len(t.room)):
        first, last = np.int64(1) << 60, np.int64(0)
        for h in range(t.home_first[rank], t.home_first[rank + 1]):
            lane = t.home_lanes[h]
            first = min(first, start[lane, 0])
            last = max(last, start[lane, -1] + t.duration[lane])
        total += last - (first if t.span else 0)
    return total


@numba.njit(cache=True, nogil=True)
def _shift(t, wish, steps):  # type: ignore[no-untyped-def]
    """Move some wished times: of one lane, a rank's, its weight gradients, or all lanes from one on; of one microbatch,
    some in a row, or all from one on."""
    lanes, m = wish.shape
    step = steps[np.random.randint(len(steps))]
    if np.random.randint(2) == 0:
        step = -step
    if np.random.randint(3) == 0:
        step *= 1 + np.random.randint(4)
    a = np.random.randint(m)
    how = np.random.randint(4)
    z = a + 1
    if how == 1:
        z = min(m, a + 1 + np.random.randint(4))
    elif how == 2:
        z = m
    elif how == 3:
        a, z = 0, a + 1
    lane = np.random.randint(lanes)
    what = np.random.randint(6)
    if what <= 2:
        wish[lane, a:z] += step
    elif what == 3:
        wish[lane:, a:z] += step
    else:
        rank = t.rank[lane]
        for h in range(t.home_first[rank], t.home_first[rank + 1]):
            if what == 4 or t.leaf[t.home_lanes[h]] == 1:
                wish[t.home_lanes[h], a:z] += step


@numba.njit(cache=True, nogil=True)
def _improve(t, start, order, steps, target, rounds, heat, cool, habit, seed):  # type: ignore[no-untyped-def]
    """Annealing over wished times from `start`; start, order and habit become the best found. Its value."""
    np.random.seed(seed)
    share = 8.0 * len(t.room)
    value, now, row = decode_fast(t, start, habit[0], habit[1], habit[2])
    if value < 0:
        return value
    cost = value + spread(t, now) / share
    best, best_value = cost, value
    start[:] = now
    order[:] = row
    current = habit.copy()
    trial = habit.copy()
    wish = now.copy()
    for turn in range(rounds):
        if best_value <= target:
            break
        wish[:] = now
        trial[:] = current
        if np.random.randint(40) == 0:
            trial[0], trial[1], trial[2] = np.random.randint(3), np.random.randint(0, 17), 1 + np.random.randint(2)
        for _ in range(1 + np.random.randint(2)):
            _shift(t, wish, steps)
        value, found, row = decode_fast(t, wish, trial[0], trial[1], trial[2])
        if value < 0:
            continue
        new = value + spread(t, found) / share
        warm = heat * (cool / heat) ** (turn / rounds)
        if new <= cost or np.random.random() < np.exp((cost - new) / warm):
            cost, now = new, found
            current[:] = trial
            if new < best:
                best, best_value = new, value
                start[:] = found
                order[:] = row
                habit[:] = trial
    return best_value


class Walk(NamedTuple):
    """A decoded schedule: value (µs), start times (lanes, microbatches), order, and the habit it was walked with."""

    value: int
    start: Ints
    order: Ints
    habit: Habit


def walk(t: Template, wish: Ints, habit: Habit = PLAIN) -> Walk | None:
    """`decode` as one record, or None where the wished order breaks the memory."""
    value, start, order = decode(t, wish, habit)
    return None if value < 0 else Walk(value, start, order, habit)


def improve(t: Template, begin: Walk, steps: Ints, target: int, rounds: int, heat: float, seed: int) -> Walk:
    """A better walk by `rounds` trials of annealing over wished times; `heat`: µs of loss at first taken lightly.
    Stops at value `target`."""
    start, order, habit = begin.start.copy(), begin.order.copy(), np.array(begin.habit, np.int64)
    cool = max(heat / 50, 1e-3)
    value = int(_improve(t, start, order, steps, target, rounds, max(heat, cool), cool, habit, seed))
    return begin if value < 0 or value > begin.value else Walk(value, start, order, Habit(*habit.tolist()))
