"""A bound from the idle time of the first rank and of another rank, both taken together.

It is for steps whose ranks run three passes of each microbatch, equal for all microbatches: one that takes memory (F), one
on the way back (B), and one that no other rank waits for (W). docs/notes/tight-memory.md proves it as theorem 4. In flight
is a microbatch between F and B on a rank; its weight gradient waits between B and W.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph
from ...greedy.blocks.building_block import longest_ways
from ...problem import Ints, Problem
from .bound import IDLE, Bound

MAX_WINDOWS = 1_000_000  # states of the first rank times microbatches: with more, idle time before its last F counts as 0
MAX_STATES = 30_000_000  # states of both ranks: with more, there is no bound
FAR = 1 << 60  # µs


class _Rank(NamedTuple):
    """One rank. F, B, W: µs of its passes of a microbatch. taken: bytes that F takes; w: bytes that W frees; capacity: bytes
    that there are. lanes: those of F, B and W."""

    F: int
    B: int
    W: int
    taken: int
    w: int
    capacity: int
    lanes: tuple[int, ...]

    @property
    def work(self) -> int:
        """µs of one microbatch."""
        return self.F + self.B + self.W

    @property
    def fits(self) -> int:
        """How many whole microbatches fit."""
        return self.capacity // self.taken

    def most_waiting(self, flying: int, begun: int) -> int:
        """The most of `begun` microbatches whose weight gradients wait, with `flying` others and one more in flight."""
        free = self.capacity - (flying + 1) * self.taken
        return min(begun, free // self.w) if self.w else begun


class _States(NamedTuple):
    """What the first rank may have left when it starts an F, one value a state, without that microbatch. x: microbatches in
    flight; y: weight gradients that wait; left: µs of work for both. States ascend by `left`."""

    x: Ints
    y: Ints
    left: Ints


def idle_of_two(problem: Problem, times: int = 1) -> Iterator[Bound]:
    """The bounds of the first rank with the last one, and with the one that has most work. times: the step has so many times
    the problem's microbatches."""
    g = _plain(problem)
    if g is None:
        return
    g, away = g._replace(microbatches=times * g.microbatches), _away(g)
    ranks = [rank for rank in (_rank(g, away, r) for r in range(problem.ranks)) if rank is not None]
    if len(ranks) < problem.ranks or 0 not in ranks[g.rank[0]].lanes or ranks[g.rank[0]].fits >= g.microbatches:
        return
    first = int(g.rank[0])
    last = max(range(len(ranks)), key=lambda r: ranks[r].lanes)
    busiest = max(range(len(ranks)), key=lambda r: ranks[r].work)
    for other in dict.fromkeys((last, busiest)):
        if other != first and _few_states(ranks[first], ranks[other], g.microbatches):
            waits = f"whatever waits for the end of the step on rank {first}"
            proof = f"ranks {first} and {other}: {waits}, one of them is idle so long"
            yield Bound(_least(g, away, ranks[first], ranks[other]), proof, IDLE, (first, other))


def _few_states(first: _Rank, other: _Rank, m: int) -> bool:
    """Whether the states of both ranks are few enough to try them all."""
    waiting = other.most_waiting(0, m - 1) + 1
    return waiting * first.fits * (first.most_waiting(0, m - 1) + 1) <= MAX_STATES


def _plain(problem: Problem) -> MicrobatchGraph | None:
    """The graph of a microbatch of three passes a rank, where each has one stream and the objective is the makespan."""
    if problem.objective != "makespan" or problem.capacity is None or problem.pools or len(problem.side_stream):
        return None
    g = microbatch_graph(problem) if len(problem.streams) == problem.ranks else None
    return g if g is not None and len(g.duration) == 3 * problem.ranks else None


def _rank(g: MicrobatchGraph, away: Ints, rank: int) -> _Rank | None:
    """One rank as this bound needs it; None if its passes do not come or take memory in this way."""
    lanes = np.sort(g.rank_lanes[g.rank_lane_first[rank] : g.rank_lane_first[rank + 1]])
    if len(lanes) != 3 or away[lanes[1], lanes[0]] < 0 or away[lanes[2], lanes[1]] < 0:
        return None
    taken, freed = g.taken[lanes].tolist(), g.freed[lanes].tolist()
    if not 0 < taken[0] <= g.capacity[rank] or taken[1:] != [0, 0] or freed[0] or sum(freed) != taken[0]:
        return None
    F, B, W = g.duration[lanes].tolist()
    return _Rank(F, B, W, taken[0], freed[2], int(g.capacity[rank]), tuple(lanes.tolist()))


def _away(g: MicrobatchGraph) -> Ints:
    """The longest path of a microbatch from the start of each lane's pass (column) to that of each lane's (row), µs, shape
    (lanes, lanes); below 0 where there is none."""
    ways = longest_ways(g, np.arange(len(g.duration)))
    return np.where(ways < 0, -FAR, ways - g.duration[:, None])


def _least(g: MicrobatchGraph, away: Ints, first: _Rank, other: _Rank) -> int:
    """The bound of theorem 4, µs, for ranks that may differ; 0 where it says nothing. Names are those of the proof:

    * H: idle time of the first rank before its first B, as it runs at most the F that fit until then. A: the same of the
      other rank, or the time before its first F, if that is longer.
    * P: the least time from the end of an F on the first rank to the start of its B on the other; Z: from there to the first
      rank's B; D: from the end of F to the start of B on the first rank.
    * The start of the other rank's last B is counted in two ways: its idle time A + J and its work before; or the first
      rank's idle time H + J₀ and its work, then P and a delay δ ≥ 0. So δ = J − J₀ + f, which defines f; `late` is f if no
      weight gradient waits there.
    """
    m, (F, B, _), (F_l, B_l, _) = g.microbatches, first.lanes, other.lanes
    begin, onwards, back = away[:, 0], away[:, F], away[:, B_l]
    D, P, Z = int(onwards[B]) - first.F, int(onwards[B_l]) - first.F, int(back[B])
    if min(P, Z, begin[F_l]) < 0:
        return 0
    H = max(0, int(begin[B]) - first.fits * first.F)
    A = max(int(begin[F_l]), int(begin[B_l]) - other.fits * other.F)
    s = _states(first, m)
    lost = _lost_before_last(s, first, m, D, int(begin[F_l]) + other.F + Z + first.B - H, other.F + other.B)
    late = A - P - H + m * (other.work - first.work) - other.B - other.W + first.B + first.W + s.left
    least = FAR
    for waiting in range(other.most_waiting(0, m - 1) + 1):
        f = late - waiting * other.W
        tail = max(0, Z + first.B + first.W - other.B - (waiting + 1) * other.W)
        here = m * first.work + H + np.maximum(lost + np.maximum(0, D - s.left), P + Z + f - s.left)
        there = m * other.work + A + tail + np.maximum(0, lost - f)
        least = min(least, int(np.maximum(here, there).min()))
    return least


def _states(first: _Rank, m: int) -> _States:
    """All states that fit the memory and the microbatches."""
    flying = range(min(first.fits, m))
    x, y = np.array([(x, y) for x in flying for y in range(first.most_waiting(x, m - 1 - x) + 1)], np.int64).T
    left = x * (first.B + first.W) + y * first.W
    by = np.argsort(left, kind="stable")
    return _States(x[by], y[by], left[by])


def _lost_before_last(s: _States, first: _Rank, m: int, D: int, soonest: int, rate: int) -> Ints:
    """A lower bound, µs, on the first rank's idle time before its last F, beyond H, for each state that this F may find.

    If the F of microbatch j finds x in flight, the B of i = j − 1 − x has ended, at `soonest` + i · `rate` or later (H is
    not in it). If i does not fit beside all microbatches before it, theorem 2 says what is lost between the F of i and that
    of j. Tables have a row for each i. Column k is for states from the k-th on (enough: the least idle time up to the F of
    i) or before (short: that idle time less the work left, of which there is too little).
    """
    n, S = first.fits, len(s.x)
    if S * m > MAX_WINDOWS:
        return np.zeros(S, np.int64)
    needed = D - s.x * first.F + (s.y - 1) * first.W
    place = np.searchsorted(s.left, needed)
    short, enough = np.full((m, S + 1), FAR), np.full((m, S + 1), FAR)
    lost = np.zeros(S, np.int64)
    for j in range(n, m):
        i = j - 1 - s.x
        done = j * first.F + (i + 1) * first.B + (i + 1 - s.y) * first.W
        lost = np.maximum(0, soonest + i * rate - done)
        window = np.minimum(short[i, place] + needed, enough[i, place])
        lost = np.where(i >= n, np.maximum(lost, window), lost)
        here = np.where(s.x + s.y <= j, lost, FAR)
        np.minimum.accumulate(here - s.left, out=short[j, 1:])
        enough[j, :-1] = np.minimum.accumulate(here[::-1])[::-1]
    return lost
