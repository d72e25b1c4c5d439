"""Prices for what a rank holds and runs at one moment: energy of memory that knows of whole microbatches.

Bytes times time say little where few microbatches fit: of 24 bytes, three times 6 and one pass that needs 2 leave 4 that
nothing can use. So not bytes are counted here, but prices.

At each moment each microbatch is in a *state*: which of the rank's passes have ended (with each pass all before it), and
perhaps one that runs. The state tells its bytes. At most one pass of the rank runs; all other microbatches are between
passes. Intervals are those from the start of a pass to the end of the same or a later pass of the microbatch, so the state
also tells which intervals it is in. Each interval has a price, 0 or more, and a life: the longest path between its ends.
Let `most` be the highest sum of prices over all sets of states that fit the capacity with at most one that runs.

**Bound.** T · most ≥ Σ price · life, over all intervals of all microbatches. *Proof.* At each moment the prices of all
intervals that are open add up to `most` or less. Integrated over the window they are Σ price · (how long each is open), and
no interval is open for less than its life. As no price is below 0, an order that holds for longer only adds. ∎

So prices take the place of bytes and `most` that of the capacity, in every bound by energy, also while memory fills and
empties: parts of the sum are at most `most`, too. If prices are bytes, it is the usual bound; if each pass has price 1,
it is the rank's work.

**Prices** that give most are the dual of a cutting-stock problem: the least time in which sets of states keep each interval
open for its life (Gilmore and Gomory, *A linear programming approach to the cutting-stock problem*, 1961). Each set comes
from a knapsack. Prices are rounded to whole numbers and `most` is found for these, so nothing depends on the precision of
that search.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...greedy.arrays.microbatch import MicrobatchGraph, rank_work
from ...greedy.blocks.building_block import longest_ways
from ...problem import UNLIMITED, Ints
from ...problem.tables import Bools
from ...util.kernels import kernel

Floats = NDArray[np.float64]
MAX_RANKS = 16  # with more, only some ranks have prices
MAX_STATES, MAX_ROOM = 500, 2_000  # states of a microbatch on a rank; units of its capacity (beyond, they are coarser)
MAX_STEPS, DENOMINATORS = 400, 240  # steps of the search for prices; fractions that are looked for in its prices
GRAIN = 10_000  # prices that are no such fractions are rounded down to multiples of 1 / GRAIN


class Prices(NamedTuple):
    """Prices of one rank's intervals. first, last: their lanes; price; life, µs: the longest path from the start of the
    first lane's pass to the end of the last one's; one value an interval each. most: that prices of one moment add up to."""

    first: Ints
    last: Ints
    price: Ints
    life: Ints
    most: int

    @property
    def time(self) -> float:
        """µs that each microbatch takes at least, if there are very many."""
        return float(self.price @ self.life) / self.most


class _States(NamedTuple):
    """What one microbatch may hold on a rank: the weight of each state, in units of the room, and in which intervals it is
    (1, else 0), shape (states, intervals). between: states without a pass that runs, which any number of microbatches may
    have; running: those with one."""

    between: tuple[Ints, Floats]
    running: tuple[Ints, Floats]
    room: int

    def of(self, intervals: Bools) -> _States:
        """The same with only these intervals."""
        (weight, opened), (runs, with_run) = self.between, self.running
        return _States((weight, opened[:, intervals]), (runs, with_run[:, intervals]), self.room)


def best_prices(g: MicrobatchGraph) -> Iterator[tuple[int, Prices]]:
    """The ranks whose prices say more than work does, and their prices. Of many ranks only the outer and the fullest."""
    ranks, busiest = len(g.capacity), float(rank_work(g).max())
    tried = list(range(ranks))
    if ranks > MAX_RANKS:
        held = g.bytes * longest_ways(g, g.before)[g.after, np.arange(len(g.before))]
        full = np.bincount(g.rank[g.before], held, ranks) / np.maximum(g.capacity, 1)
        tried = list(dict.fromkeys([0, ranks - 1, int(full.argmax())]))
    for rank in tried:
        prices = prices_of(g, rank)
        if prices is not None and prices.time > busiest:
            yield rank, prices


def prices_of(g: MicrobatchGraph, rank: int) -> Prices | None:
    """The prices of a rank that give most for very many microbatches, for the intervals of its edges with bytes and of its
    passes; None where a microbatch has too many states, or the memory has no limit."""
    lanes, room = g.rank_lanes[g.rank_lane_first[rank] : g.rank_lane_first[rank + 1]], int(g.capacity[rank])
    ways = longest_ways(g, lanes)[lanes]  # [to, from]
    states = _sets_of_passes(ways >= 0) if 0 < room < UNLIMITED else None
    if states is None:
        return None
    place = np.full(len(g.duration), -1, np.int64)
    place[lanes] = np.arange(len(lanes))
    held = np.flatnonzero((g.bytes > 0) & (g.rank[g.before] == rank))
    edges = place[g.before[held]], place[g.after[held]], g.bytes[held]
    first, last = np.unique([[*edges[0], *place[lanes]], [*edges[1], *place[lanes]]], axis=1)
    found = _weighed(states, edges, (first, last), room)
    counted = ~(found.between[1][found.between[0] == 0] > 0).any(axis=0)  # else any number is open at once
    found, life = found.of(counted), ways[last, first][counted]
    price, most = _whole(found, _best_prices(found, life))
    used = price > 0
    begin, end = (lanes[one[counted][used]] for one in (first, last))
    return Prices(begin, end, price[used], life[used], most) if most > 0 else None


def _sets_of_passes(after: Bools) -> tuple[Bools, Ints] | None:
    """The states of a microbatch whose pass j may only start once pass i has ended, where after[j, i]: which passes have
    ended, shape (states, passes), and which runs (−1: none). None where there are too many."""
    count, needs = len(after), [sum(1 << i for i in np.flatnonzero(row).tolist() if i != j) for j, row in enumerate(after)]
    seen, states = [0], list[tuple[int, int]]()
    for ended in seen:  # grows
        if len(states) > MAX_STATES:
            return None
        ready = [j for j in range(count) if not ended >> j & 1 and needs[j] & ended == needs[j]]
        states += [(ended, j) for j in (-1, *ready)]
        seen += [new for j in ready if (new := ended | 1 << j) not in seen]
    table = np.array([[ended >> i & 1 for i in range(count)] for ended, _ in states], bool)
    return table, np.array([running for _, running in states], np.int64)


def _weighed(states: tuple[Bools, Ints], edges: tuple[Ints, Ints, Ints], ends: tuple[Ints, Ints], room: int) -> _States:
    """The states with their bytes, in units of which at most `MAX_ROOM` fit, and their intervals. A unit that does not
    divide all bytes only makes states lighter: sums of whole units are not above the room's."""
    ended, running = states
    begun, runs = ended.copy(), running >= 0
    begun[runs, running[runs]] = True
    size = (begun[:, edges[0]] & ~ended[:, edges[1]]) @ edges[2]
    unit = max(reduce(gcd, size.tolist(), 0), 1)
    unit = unit if room // unit <= MAX_ROOM else -(-room // MAX_ROOM)
    weight, opened = size // unit, (begun[:, ends[0]] & ~ended[:, ends[1]]).astype(float)
    fits = weight <= room // unit
    between, with_run = ((weight[kind & fits], opened[kind & fits]) for kind in (~runs & opened.any(axis=1), runs))
    return _States(between, with_run, room // unit)


def _best_prices(states: _States, life: Ints) -> Floats:
    """The prices, per interval, that give most: each step replaces one set of states in the basis by the set whose prices
    add up to most. Prices of any step are good, so the best so far is kept."""
    count, best, value = len(life), np.zeros(len(life)), 0.0
    basis, cost, time = np.eye(count), np.ones(count), life.astype(float)  # `basis` is kept inverted
    for _ in range(MAX_STEPS):
        price = cost @ basis
        most, enters = _fullest(states, np.maximum(price, 0.0))
        if most > 0 and (now := float(np.maximum(price, 0.0) @ life) / most) > value:  # 0: these fit nowhere
            best, value = np.maximum(price, 0.0) / most, now
        lowest, new_cost = int(price.argmin()), 1.0
        if price[lowest] < -1e-9:
            enters, new_cost = -np.eye(count)[lowest], 0.0
        column = basis @ enters
        if (new_cost > 0 and most <= 1 + 1e-9) or column.max() <= 1e-9:
            break
        ratio = np.where(column > 1e-9, time / np.where(column > 1e-9, column, 1.0), np.inf)
        leaves = int(ratio.argmin())
        basis[leaves] /= column[leaves]
        time[leaves] /= column[leaves]
        others = np.arange(count) != leaves
        basis[others] -= np.outer(column[others], basis[leaves])
        time[others] = np.maximum(0.0, time[others] - column[others] * time[leaves])
        cost[leaves] = new_cost
    return best


def _whole(states: _States, price: Floats) -> tuple[Ints, int]:
    """Whole prices in these proportions, and the most that they add up to at a moment."""
    scale = next((d for d in range(1, DENOMINATORS) if np.abs(price * d - np.rint(price * d)).max(initial=0) < 1e-6), 0)
    whole = np.rint(price * scale) if scale else np.floor(price * GRAIN)
    return whole.astype(np.int64), round(_fullest(states, whole)[0])


def _fullest(states: _States, price: Floats) -> tuple[float, Floats]:
    """The most that prices add up to in a set of states that fits, with one that runs or none; and how often each interval
    is open there."""
    (weight, opened), (runs, with_run) = states.between, states.running
    value, worth = opened @ price, with_run @ price
    best, taken = _packed(weight, value, states.room)
    sums = np.append(worth + best[states.room - runs], best[states.room])
    top = int(sums.argmax())
    left, seen = states.room, np.zeros(len(price))
    if top < len(runs):
        left, seen = left - int(runs[top]), seen + with_run[top]
    while left > 0:
        seen += opened[taken[left]] if taken[left] >= 0 else 0
        left -= int(weight[taken[left]]) if taken[left] >= 0 else 1
    return float(sums[top]), seen


@kernel
def _packed(weight: Ints, value: Floats, room: int) -> tuple[Floats, Ints]:
    """For each size up to `room` the greatest value of items that fit, each any number of times, and one of these items (−1:
    none, one unit is free). Items of weight 0 have no value."""
    best, taken = np.zeros(room + 1), np.full(room + 1, -1, np.int64)
    for size in range(1, room + 1):
        best[size] = best[size - 1]
        for k in range(len(weight)):
            if 0 < weight[k] <= size and best[size - weight[k]] + value[k] > best[size]:
                best[size], taken[size] = best[size - weight[k]] + value[k], k
    return best, taken
