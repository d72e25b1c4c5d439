"""Prices for what a rank holds and runs at one moment: energy of memory that knows of whole microbatches.

Bytes times time say little where few microbatches fit: of 24 bytes, three times 6 and one pass that needs 2 leave 4 that
nothing can use. So not bytes are counted here, but prices.

At each moment each microbatch is in a *state*: which of the rank's passes have ended (with each pass all before it), and
which run. The state tells its bytes. At most one pass runs on each of the rank's streams. Intervals are those from the start
of a pass to the end of the same or a later pass of the microbatch, so the state also tells which intervals it is in. Each
interval has a price, 0 or more, and a life: the longest path between its ends.

*Edges beside microbatches* (gathered parameters, gradients that are not exchanged yet) hold bytes from the start of a pass x
to the end of a pass y, where x or y is of no microbatch. Such an edge is open while a microbatch has begun a pass to whose
lane's first pass a path leads from x, and has not ended a pass from whose lane's last pass a path leads to y: lanes run by
number. While it is open, its bytes are taken off the capacity. Of equal edges for parts of the microbatches one counts. An
interval is *late* for the edge if a path leads from x to the first pass of the lane that ends it, but none to that of the
lane that begins it, and one from the last of its ends to y. If it is open while the edge is not, x has not started, and the
interval stays open until x starts. So it is one of the first n microbatches, where n of them fit. For these, late intervals
are not counted, and without the edge no late one is open.

Let `most` be the highest sum of prices over all sets of states that fit the capacity and run one pass a stream at most.

**Bound.** T · most ≥ Σ price · life, over all intervals of all microbatches. *Proof.* At each moment the prices of all
intervals that are open add up to `most` or less. Integrated over the window they are Σ price · (how long each is open), and
no interval is open for less than its life. As no price is below 0, an order that holds for longer only adds. ∎

So prices take the place of bytes and `most` that of the capacity in every bound by energy, also while memory fills and
empties: parts of the sum are at most `most`, too. With bytes as prices it is the usual bound.

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

from ...greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph, rank_work
from ...greedy.arrays.problem_arrays import arrays_of
from ...greedy.blocks.building_block import longest_ways
from ...greedy.blocks.memory_packing import BlockPools, pools_of
from ...greedy.blocks.period_search import paced_graph
from ...problem import UNLIMITED, Ints, Problem
from ...problem.tables import Bools
from ...util.kernels import kernel
from .memory_arcs import passes_between
from .necessary_arcs import necessary_arcs_of

Floats = NDArray[np.float64]
MAX_RANKS = 16  # with more, only some ranks have prices
MAX_STATES, MAX_ROOM = 500, 2_000  # states of a microbatch on a rank; units of its capacity (beyond, they are coarser)
MAX_STREAMS, MAX_BESIDE = 3, 6  # of a rank: streams that run one pass at most; edges beside microbatches that count
MAX_STEPS, DENOMINATORS = 400, 240  # steps of the search for prices; fractions that are looked for in its prices
GRAIN = 10_000  # prices that are no such fractions are rounded down to multiples of 1 / GRAIN


class Prices(NamedTuple):
    """Prices of one rank's intervals. first, last: the passes at their ends, shape (intervals, microbatches). price; life,
    µs: the longest path from the start of the first pass to the end of the last one; skipped: of so many first microbatches
    the interval does not count; one value an interval each. most: that prices of one moment add up to."""

    first: Ints
    last: Ints
    price: Ints
    life: Ints
    skipped: Ints
    most: int

    @property
    def time(self) -> float:
        """µs that each microbatch takes at least, if there are very many."""
        return float(self.price @ self.life) / self.most


class Microbatches(NamedTuple):
    """A problem of equal microbatches: the graph of one on all streams, and the memory that it holds."""

    problem: Problem
    g: MicrobatchGraph
    pools: BlockPools

    @classmethod
    def of(cls, problem: Problem) -> Microbatches | None:
        """None where microbatches differ, no memory has a limit, or a rank has no pass of a microbatch."""
        inside, e, lane = problem.in_microbatch, problem.edges, arrays_of(problem).lane
        if problem.capacity is None or len(np.unique(problem.passes.rank[inside])) < problem.ranks:
            return None
        g = microbatch_graph(problem) if inside.all() else None
        if g is None and (g := paced_graph(problem)) is not None:  # it ignores bytes
            rows = np.flatnonzero(inside[e.before] & inside[e.after])
            columns = np.stack([lane[e.before], lane[e.after], problem.device_bytes, problem.passes.microbatch[e.before]])
            each = columns[:, rows[np.lexsort(columns[:, rows])]][:3].reshape(3, g.microbatches, -1)
            g = g if (each == each[:, :1]).all() else None
        return None if g is None else cls(problem, g, pools_of(problem, g))


def best_prices(problem: Problem) -> Iterator[tuple[int, Prices]]:
    """The ranks whose prices say more than work does, and their prices. Of many ranks only the outer and the fullest."""
    alike = Microbatches.of(problem)
    if alike is None:
        return
    ranks, busiest, held = problem.ranks, float(rank_work(alike.g).max()), alike.pools.edges
    tried = list(range(ranks))
    if ranks > MAX_RANKS:
        energy = [float((held.bytes * alike.pools.least)[held.first[r] : held.first[r + 1]].sum()) for r in tried]
        tried = list(dict.fromkeys([0, ranks - 1, int((energy / np.maximum(problem.room[:ranks], 1)).argmax())]))
    for rank in tried:
        yield from ((rank, prices) for prices in prices_of(alike, rank, busiest) if prices.time > busiest)


def prices_of(alike: Microbatches, rank: int, enough: float = 0.0) -> Iterator[Prices]:
    """The prices of a rank that give most for very many microbatches, for the intervals of its edges with bytes and of its
    passes; where some are late, once with these counted as others are, and once not. There are none where a microbatch has
    too many states, or the memory has no limit. enough: µs; the search ends if no prices give more."""
    problem, g, held = alike.problem, alike.g, alike.pools.edges
    lanes, room = np.flatnonzero(problem.passes.rank[g.passes[:, 0]] == rank), int(problem.room[rank])
    ways = longest_ways(g, lanes)[lanes]  # [to, from]
    states = _states(ways >= 0, g.rank[lanes]) if 0 < room < UNLIMITED else None
    if states is None:
        return
    place = np.full(len(g.duration), -1, np.int64)
    place[lanes] = np.arange(len(lanes))
    rows = slice(held.first[rank], held.first[rank + 1])
    edges = np.array([place[held.before[rows]], place[held.after[rows]]])
    size = states.within(*edges) @ held.bytes[rows]
    unit = max(reduce(gcd, size.tolist(), 0), 1)
    unit = unit if room // unit <= MAX_ROOM else -(-room // MAX_ROOM)  # parts of units only make states lighter
    size, room = size // unit, room // unit
    ends = np.unique(np.hstack([edges, np.tile(np.arange(len(lanes)), (2, 1))]), axis=1)
    ends = ends[:, ~states.within(*ends)[(size == 0) & (states.streams == 0)].any(axis=0)]  # of others any number is open
    beside = _beside(problem, g.passes[lanes], rank, unit)
    for late in {False, any(one.late(*ends).any() for one in beside)} if ends.size else ():
        found, skipped = _moments(states, size, ends, room, beside, late)
        life = ways[ends[1], ends[0]]
        price, most = _whole(found, _best_prices(found, life, enough))
        used = price > 0
        first, last = g.passes[lanes[ends[:, used]]]
        if most > 0:
            yield Prices(first, last, price[used], life[used], skipped[used], most)


# --- States of one microbatch ---


class _States(NamedTuple):
    """The states of a microbatch: which passes have begun and which have ended, shape (states, passes); and the streams that
    run one, as bits. Any number of microbatches may be in a state that runs none."""

    begun: Bools
    ended: Bools
    streams: Ints

    def within(self, first: Ints, last: Ints) -> Bools:
        """Which states are between the start of a pass `first` and the end of a pass `last`, shape (states, pairs)."""
        return self.begun[:, first] & ~self.ended[:, last]


def _states(after: Bools, stream: Ints) -> _States | None:
    """The states of a microbatch whose pass j may only start once pass i has ended, where after[j, i]; None where there are
    too many. stream: of each pass."""
    count, needs = len(after), [sum(1 << i for i in np.flatnonzero(row).tolist() if i != j) for j, row in enumerate(after)]
    number = np.unique(stream, return_inverse=True)[1]
    bits = np.where(number < MAX_STREAMS, 1 << number, 0).tolist()  # further streams may run any number of passes
    seen, states = [0], list[tuple[int, int, int]]()
    for done in seen:  # grows
        ready = [j for j in range(count) if not done >> j & 1 and needs[j] & done == needs[j]]
        running = [(done, 0)]
        for j in ready:
            running += [(with_it | 1 << j, busy | bits[j]) for with_it, busy in running if not busy & bits[j]]
        states += [(with_it, done, busy) for with_it, busy in running]
        seen += [new for j in ready if (new := done | 1 << j) not in seen]
        if len(states) > MAX_STATES:
            return None
    begun, ended = (np.array([[state[k] >> i & 1 for i in range(count)] for state in states], bool) for k in (0, 1))
    return _States(begun, ended, np.array([busy for *_, busy in states], np.int64))


class _Beside(NamedTuple):
    """An edge beside microbatches, or equal ones for a part of the microbatches each. size: in units. alone: whether it is
    one, and lanes run by number. One value for each of the rank's lanes: begins, whether each of its passes is behind the
    start of the microbatch's edge; ends, whether it is before its end."""

    size: int
    alone: bool
    begins: Bools
    ends: Bools

    def late(self, first: Ints, last: Ints) -> Bools:
        """Which intervals between these passes are late for the edge."""
        return np.asarray(self.alone & ~self.begins[first] & self.begins[last] & self.ends[last])

    def held(self, states: _States) -> Bools:
        """The states in which it is open."""
        return np.asarray(states.begun[:, self.begins].any(axis=1) & ~states.ended[:, self.ends].all(axis=1))


def _beside(problem: Problem, passes: Ints, rank: int, unit: int) -> list[_Beside]:
    """The largest edges beside microbatches on a rank. passes: of its lanes, shape (lanes, microbatches)."""
    e, inside, a = problem.edges, problem.in_microbatch, necessary_arcs_of(problem)
    own = (problem.device_bytes > 0) & (problem.passes.rank[e.before] == rank)
    equal = dict[tuple[int, ...], list[int]]()
    for row in np.flatnonzero(own & ~(inside[e.before] & inside[e.after])).tolist():
        equal.setdefault((-int(e.bytes[row]), int(a.lane[e.before[row]]), int(a.lane[e.after[row]])), []).append(row)
    found = []
    for key, rows in sorted(equal.items()):
        ways = [passes_between((a.out_first, a.out_pass, a.order), int(e.before[row]), int(e.after[row])) for row in rows]
        begins, ends = (np.array([way[side][passes] for way in ways]) for side in (0, 1))  # [edge, lane, microbatch]
        fits = np.where(begins.any(axis=1) & ends.any(axis=1), begins.sum(axis=1) + ends.sum(axis=1), 0).argmax(axis=0)
        every = [np.asarray(side[fits, :, np.arange(passes.shape[1])].all(axis=0)) for side in (begins, ends)]
        if every[0].any() and every[1].any():
            found.append(_Beside(-key[0] // unit, len(rows) == 1 and a.shift.size > 0, *every))
    return found[:MAX_BESIDE]


# --- Sets of states that fit ---


class _Moment(NamedTuple):
    """What a rank may hold at some moments: the units of memory for microbatches; and, one row a state, its weight in these
    units, the intervals in which it is (1, else 0), and the streams that it uses, as bits."""

    room: int
    weight: Ints
    opened: Floats
    streams: Ints


def _moments(
    states: _States, size: Ints, ends: Ints, room: int, beside: list[_Beside], late: bool
) -> tuple[list[_Moment], Ints]:
    """The moments of each set of edges beside microbatches that are open; and of how many microbatches each interval does
    not count. size: of states, in units. ends: of intervals, shape (2, intervals). late: if late ones are told apart."""
    opened, skipped = states.within(*ends), np.zeros(ends.shape[1], np.int64)
    rooms = [(room, size <= room, skipped == 0)]  # units; the states that there may be; the intervals that count
    for one in beside:
        held, apart = one.held(states), one.late(*ends) & late
        least = np.where(opened & ~held[:, None], size[:, None], room + 1).min(axis=0)
        apart &= least > 0
        skipped = np.maximum(skipped, np.where(apart, room // np.maximum(least, 1), 0))
        both = ((left, may, count, may & ~held) for left, may, count in rooms)
        rooms = [
            new
            for left, may, count, free in both
            for new in ((left, free, count & ~apart), (left - one.size, may & (size <= left - one.size), count))
            if new[1].any() and (new[0] == left or apart.any() or (free != may).any())
        ]
    found = [
        _Moment(left, size[may], (opened & count)[may].astype(float), states.streams[may]) for left, may, count in rooms
    ]
    return [_without_worse(moment) for moment in found], skipped


def _without_worse(s: _Moment) -> _Moment:
    """The states without those that another can take the place of: one no heavier, in all of its intervals, on no further
    stream."""
    lighter = (s.weight[None] <= s.weight[:, None]) & (s.streams[None] & ~s.streams[:, None] == 0)
    better = lighter & (s.opened[None] >= s.opened[:, None]).all(axis=2)
    earlier = np.tri(len(s.weight), k=-1, dtype=bool)
    kept = ~(better & (~better.T | earlier)).any(axis=1)
    return s._replace(weight=s.weight[kept], opened=s.opened[kept], streams=s.streams[kept])


def _best_prices(moments: list[_Moment], life: Ints, enough: float) -> Floats:
    """The prices, per interval, that give most: each step replaces one set of states in the basis by the set whose prices
    add up to most. Prices of any step are good, so the best so far is kept. No prices give more than the time of the sets in
    the basis, so the search ends where that is `enough`."""
    count, best, value = len(life), np.zeros(len(life)), 0.0
    basis, cost, time = np.eye(count), np.ones(count), life.astype(float)  # `basis` is kept inverted
    for _ in range(MAX_STEPS):
        price = cost @ basis
        most, enters = _fullest(moments, np.maximum(price, 0.0))
        if most > 0 and (now := float(np.maximum(price, 0.0) @ life) / most) > value:  # 0: these fit nowhere
            best, value = np.maximum(price, 0.0) / most, now
        lowest, new_cost = int(price.argmin()), 1.0
        if price[lowest] < -1e-9:
            enters, new_cost = -np.eye(count)[lowest], 0.0
        column = basis @ enters
        if (new_cost > 0 and most <= 1 + 1e-9) or column.max() <= 1e-9 or cost @ time <= enough:
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


def _whole(moments: list[_Moment], price: Floats) -> tuple[Ints, int]:
    """Whole prices in these proportions, and the most that they add up to at a moment."""
    scale = next((d for d in range(1, DENOMINATORS) if np.abs(price * d - np.rint(price * d)).max(initial=0) < 1e-6), 0)
    whole = np.rint(price * scale) if scale else np.floor(price * GRAIN)
    return whole.astype(np.int64), round(_fullest(moments, whole)[0])


def _fullest(moments: list[_Moment], price: Floats) -> tuple[float, Floats]:
    """The most that prices add up to in a set of states that fits; and how often each interval is open there."""
    most, fullest = 0.0, np.zeros(len(price))
    for s in moments:
        streams = int(np.bitwise_or.reduce(s.streams, initial=0))
        value, taken = _packed(s.weight, s.opened @ price, s.streams, s.room, streams)
        if value > most:
            most, fullest = value, taken @ s.opened
    return most, fullest


@kernel
def _packed(weight: Ints, value: Floats, streams: Ints, room: int, every: int) -> tuple[float, Floats]:
    """The greatest value of states that fit together, and how often each is taken: any number of times if it runs nothing
    (those of weight 0 have no value), and otherwise on streams that no other uses. every: all streams, as bits."""
    best, taken = np.zeros((every + 1, room + 1)), np.full((every + 1, room + 1), -1)
    for free in range(every + 1):  # the streams that states may use
        for size in range(room + 1):
            if size > 0:
                best[free, size] = best[free, size - 1]
            for k in range(len(weight)):
                used = streams[k]
                if weight[k] <= size and used & ~free == 0 and (used > 0 or weight[k] > 0):
                    now = best[free ^ used, size - weight[k]] + value[k]
                    if now > best[free, size]:
                        best[free, size], taken[free, size] = now, k
    count, free, size = np.zeros(len(weight)), every, room
    while size > 0 or taken[free, size] >= 0:
        k = taken[free, size]
        if k >= 0:
            count[k] += 1
            free, size = free ^ streams[k], size - weight[k]
        else:
            size -= 1
    return best[every, room], count
