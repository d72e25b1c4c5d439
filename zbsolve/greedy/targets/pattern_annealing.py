"""Simulated annealing over periodic patterns of target starts. A pattern counts by what its repetition is decoded to.

A building block must be legal where it is repeated as it is. Here microbatches only have alike targets, or alike ones in
turn, and decoding mends overlaps and memory. There are few unknowns (an offset a lane, the period), each move shifts the
whole steady state, and every trial is a legal schedule. Ramps gain from shifts of single passes afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import kernel
from ..arrays.microbatch import MicrobatchGraph
from .decoding import Decoded, DecodeRule, decode_fast, repeat_rows
from .target_annealing import Annealing, total_length


class Pattern(NamedTuple):
    """Target offsets, µs, shape (k, lanes): microbatch j takes row j mod k, and starts j periods (µs) later. `rule` is what
    it is decoded with."""

    offset: Ints
    period: int
    rule: DecodeRule


@kernel
def _bend(g: MicrobatchGraph, offset: Ints, step: int) -> None:
    """Shift offsets by `step` µs, in place: of one lane, of all from one on (at once or more and more), of some in a row,
    or of sinks; in all rows or in one."""
    rows, lanes = offset.shape
    first, last = 0, rows
    if rows > 1 and np.random.randint(2) == 0:
        first = np.random.randint(rows)
        last = first + 1
    kind = np.random.randint(8)
    a = np.random.randint(lanes)
    z = min(lanes, a + 2 + np.random.randint(len(g.capacity)))
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
                if g.sink[lane] == 1 and (kind == 6 or g.rank[lane] == g.rank[a]):
                    row[lane] += step


@kernel
def _anneal_pattern(
    g: MicrobatchGraph, begin: Pattern, rules: Ints, annealing: Annealing, best: Ints
) -> tuple[int, Ints, Ints, int]:
    """`anneal_pattern`, compiled: value (−1 where no trial fits the memory), start, order and period of the best pattern.

    Its offsets are written to `best`, shape (k, lanes). rules: shape (n, 3), a `DecodeRule` a row. The last row is the best
    pattern's rule, at first that of `begin`; a move may choose it as any other.
    """
    np.random.seed(annealing.seed)
    shifts, rounds, share = annealing.shifts, annealing.rounds, 8.0 * len(g.capacity)
    current, offset = begin.offset.copy(), begin.offset.copy()
    period, rule = begin.period, begin.rule
    target = np.empty((len(g.rank), g.microbatches), np.int64)
    top = (-1, target, np.empty(0, np.int64), period)
    cost = best_cost = np.inf
    for turn in range(rounds):
        if 0 <= top[0] <= annealing.target:
            break
        offset[:] = current
        trial, shifted = rule, period
        for _ in range(0 if turn == 0 else 1 + np.random.randint(2)):
            step = shifts[np.random.randint(len(shifts))]
            if np.random.randint(2) == 0:
                step = max(1, step // (1 + np.random.randint(16)))
            if np.random.randint(2) == 0:
                step = -step
            kind = np.random.randint(10)
            if kind == 0:
                shifted = max(0, shifted + step // 4)
            elif kind == 1:
                row = rules[np.random.randint(len(rules))]
                trial = DecodeRule(row[0], row[1], row[2])
            else:
                _bend(g, offset, step)
        repeat_rows(offset, shifted, target)
        value, found, order = decode_fast(g, target, trial)
        if value < 0:
            continue
        new = value + total_length(g, found) / share
        if new <= cost or np.random.random() < np.exp((cost - new) / (annealing.heat * (1.0 - turn / rounds))):
            cost, period, rule = new, shifted, trial
            current[:] = offset
            if new < best_cost:
                best_cost, top = new, (value, found, order, shifted)
                best[:] = offset
                rules[-1, 0], rules[-1, 1], rules[-1, 2] = trial
    return top


def anneal_pattern(
    g: MicrobatchGraph, begin: Pattern, rules: tuple[DecodeRule, ...], annealing: Annealing
) -> tuple[Pattern, Decoded] | None:
    """The best pattern that annealing finds from `begin`, and the schedule that it is decoded to; None where no trial fits
    the memory. `rules`: what else to decode with."""
    offset = begin.offset.copy()
    tried = np.array([*rules, begin.rule], np.int64)
    value, start, order, period = _anneal_pattern(g, begin, tried, annealing, offset)
    if value < 0:
        return None
    rule = DecodeRule(*tried[-1].tolist())
    return Pattern(offset, int(period), rule), Decoded(int(value), start, order, rule)
