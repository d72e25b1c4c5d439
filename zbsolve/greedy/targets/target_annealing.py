"""Simulated annealing over single target starts. A trial counts by what it is decoded to, so each is a legal schedule."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import kernel
from ..arrays.microbatch import MicrobatchGraph
from .decoding import Decoded, DecodeRule, decode_fast


class Annealing(NamedTuple):
    """How long and how hot to anneal.

    shifts: by how much a move may shift target starts, µs; target: the value, µs, at which to stop; rounds: trials;
    heat: µs of loss that are taken lightly at first; seed: of the random numbers.
    """

    shifts: Ints
    target: int
    rounds: int
    heat: float
    seed: int


@kernel
def total_length(g: MicrobatchGraph, start: Ints) -> int:
    """Sum over ranks of the last end (less the first start where the objective is the span), µs, of start times of shape
    (lanes, microbatches). Among schedules of one value the annealings prefer a small one."""
    total = 0
    for rank in range(len(g.capacity)):
        first, last = 1 << 60, 0
        for h in range(g.rank_lane_first[rank], g.rank_lane_first[rank + 1]):
            lane = g.rank_lanes[h]
            first = min(first, start[lane, 0])
            last = max(last, start[lane, -1] + g.duration[lane])
        total += last - (first if g.span else 0)
    return total


@kernel
def _shift(g: MicrobatchGraph, target: Ints, shifts: Ints) -> None:
    """Shift some target starts, in place: of one lane, of a rank, of its sinks, or of all lanes from one on; in one
    microbatch, in some in a row, or in all from one on."""
    lanes, m = target.shape
    step = shifts[np.random.randint(len(shifts))]
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
        target[lane, a:z] += step
    elif what == 3:
        target[lane:, a:z] += step
    else:
        rank = g.rank[lane]
        for h in range(g.rank_lane_first[rank], g.rank_lane_first[rank + 1]):
            if what == 4 or g.sink[g.rank_lanes[h]] == 1:
                target[g.rank_lanes[h], a:z] += step


@kernel
def _anneal_targets(g: MicrobatchGraph, begin: Decoded, annealing: Annealing) -> tuple[int, Ints, Ints, DecodeRule]:
    """`anneal_targets`, compiled: value, start, order and rule of the best schedule found. The value is −1 where what it
    begins with does not fit the memory."""
    np.random.seed(annealing.seed)
    rounds, cool = annealing.rounds, max(annealing.heat / 50, 1e-3)
    heat = max(annealing.heat, cool)
    share = 8.0 * len(g.capacity)
    rule = begin.rule
    value, now, order = decode_fast(g, begin.start, rule)
    top = (value, now, order, rule)
    if value < 0:
        return top
    cost = value + total_length(g, now) / share
    best = cost
    target = now.copy()
    for turn in range(rounds):
        if top[0] <= annealing.target:
            break
        target[:] = now
        trial = rule
        if np.random.randint(40) == 0:
            trial = DecodeRule(np.random.randint(3), np.random.randint(0, 17), 1 + np.random.randint(2))
        for _ in range(1 + np.random.randint(2)):
            _shift(g, target, annealing.shifts)
        value, found, order = decode_fast(g, target, trial)
        if value < 0:
            continue
        new = value + total_length(g, found) / share
        warm = heat * (cool / heat) ** (turn / rounds)
        if new <= cost or np.random.random() < np.exp((cost - new) / warm):
            cost, now, rule = new, found, trial
            if new < best:
                best, top = new, (value, found, order, trial)
    return top


def anneal_targets(g: MicrobatchGraph, begin: Decoded, annealing: Annealing) -> Decoded:
    """The best schedule that annealing over target starts finds from those of `begin`; `begin` itself where none is
    better."""
    value, start, order, rule = _anneal_targets(g, begin, annealing)
    return begin if value < 0 or value > begin.value else Decoded(int(value), start, order, DecodeRule(*rule))
