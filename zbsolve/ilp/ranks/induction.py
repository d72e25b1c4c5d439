"""Bounds for some ranks (`lanes`) by induction over microbatches: from those for fewer microbatches follows one for n.

Let P(n) be the problem of the last n passes of every lane, with lags, tails, and one machine and the memory of each rank.
c(m) is the value to prove, and c(n) = c(n − shift) + later for each n = m − shift, m − 2 shift, … . The claim, proven for
each n in turn, from the least: every schedule of P(n) takes at least c(n) µs from the start of lane 0's first pass. Then the
whole problem takes at least c(m), since its schedules obey P(m). The proof has three parts:

* Tails from fewer microbatches. The passes from microbatch j on form a schedule of P(n − j), since removing passes frees
  memory and time. So pass j of lane 0 starts at least c(n − j) before the end. What comes before it, by lags or memory,
  ends earlier still (`_tails`).
* Dominance by an earlier wave. Let s be a partial order of P(n), and u one with `shift` fewer passes of every lane, such
  that s is nowhere earlier than u plus `later`. Suppose that passes complete s within c(n) − 1. Moved earlier by `later`,
  they complete u in P(n − shift) within c(n − shift) − 1, which is refuted. So s is dropped. This needs three things. u is
  a partial order of P(n − shift) too: it begins by the same rules, and its passes end early enough there for their tails
  (`behind`: pass k of P(n − shift) has the tail of pass k + shift of P(n)). u is exact, not merged. Ranks hold the same
  bytes after s as after u, which is so where each microbatch frees all that it takes.
* Several n at once. As long as no lane comes to pass n, a search depends on n only by its tails and its window. With the
  weakest of these over several n (tail minus window: `_weakest`), it refutes each of them that is larger than the most
  passes of a lane it placed. Numbers n that are close enough (`ALIKE_SHARE`) are tested together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ..bounds.memory_arcs import INFINITE
from .end_losses import MAX_WINDOW, NO_INCUMBENT, Answer, refute
from .lanes import Lanes, no_windows
from .order_search import Induction, Limits, search_orders
from .search_tables import NOTHING_KNOWN
from .times_to_go import TimesToGo

UNMERGED = 1 << 40  # a breadth with which no states are merged
MAX_BREADTH = 1024  # a search ends if more states have the same positions, since comparing them takes too long
MAX_FIRST_STATES = 50_000  # most states of one search for the value of the fewest microbatches
MANY_WAVES = 12  # more waves of microbatches than this are many
ALIKE_SHARE = 0.75  # numbers of microbatches down to this share of the largest are refuted together
FIRST_PARTS = 500  # the value of the fewest microbatches is found up to an error of the value divided by this
MIN_WAVES = 3  # the fewest waves of microbatches for an induction
FIRST_SHARE = 8  # the search for that value may try all states divided by this


class Waves(NamedTuple):
    """The lanes as the induction uses them. A wave is as many microbatches as memory can hold at once.

    far: shape (lanes, lanes), the least time, µs, from the end of a lane's pass to the start of the other's of equal number,
    by lags (−1: none leads there). waits: rows of (lane t, lane f, k): pass j + k of t waits for pass j of f, for memory.
    shift: microbatches of a wave. begin: when lane 0 starts at the earliest, µs.
    """

    lanes: Lanes
    far: Ints
    waits: list[tuple[int, int, int]]
    shift: int
    begin: int


class _Question(NamedTuple):
    """Whether every order takes at least `value` µs. states: how many may be tried; incumbent: as in `refute`."""

    value: int
    states: int
    incumbent: Ints


def waves_of(lanes: Lanes) -> Waves | None:
    """The waves of these lanes. None where no induction is possible: it needs that all lanes come after lane 0, that memory
    delays lane 0, and that each microbatch frees what it takes."""
    count, m = lanes.head.shape
    if m < MIN_WAVES:
        return None
    far, duration = lanes.lag.copy(), lanes.duration
    for k in range(count):
        into, out = far[:, k, None], far[k]
        np.maximum(far, np.where((into >= 0) & (out >= 0), into + duration[k] + out, -1), out=far)
    taken, freed = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for t, f, size, _ in lanes.held.tolist():
        taken[t] += size
        freed[f] += size
        if far[t, f] < 0:
            return None
    whole = (taken == lanes.taken).all() and (freed == lanes.freed).all()
    if not whole or (far[0, 1:] < 0).any():
        return None
    waits = _memory_waits(lanes, far)
    shift = min((k for t, _, k in waits if t == 0), default=0)
    if shift == 0 or m < MIN_WAVES * shift:
        return None
    return Waves(lanes, far, waits, shift, int(lanes.head[0, 0]))


def has_many_waves(lanes: Lanes) -> bool:
    """Whether the lanes have more than `MANY_WAVES` waves of microbatches."""
    w = waves_of(lanes)
    return w is not None and lanes.head.shape[1] > w.shift * (1 + MANY_WAVES) + lanes.head.shape[1] % w.shift


def _memory_waits(lanes: Lanes, far: Ints) -> list[tuple[int, int, int]]:
    """Rows (t, f, k): pass j + k of lane t starts after pass j of lane f has ended. Otherwise each of the microbatches j
    … j + k holds all that lanes up to t take and lanes from f on free, and so many microbatches exceed the capacity."""
    waits = []
    for rank, capacity in enumerate(lanes.capacity.tolist()):
        taker, freer, size, _ = lanes.held[lanes.rank[lanes.held[:, 0]] == rank].T
        takers, freers = np.unique(taker), np.unique(freer)
        takes = (taker == takers[:, None]) | (far[taker[None], takers[:, None]] >= 0)
        frees = (freer[:, None] == freers) | (far[freers[None], freer[:, None]] >= 0)
        held = (takes * size) @ frees.astype(np.int64)
        for a, b in np.argwhere(held > 0).tolist():
            waits.append((int(takers[a]), int(freers[b]), capacity // int(held[a, b])))
    return waits


def refute_by_induction(lanes: Lanes, value: int, states: int, incumbent: Ints = NO_INCUMBENT) -> tuple[Answer, int]:
    """Whether every order of the passes takes `value` µs or more (REFUTED: none takes less), and how many partial orders
    were tried, `states` at most. Other answers say nothing. The search ends when the incumbent (see `refute`) takes less."""
    w = waves_of(lanes)
    if w is None:
        return Answer.MERGED, 0
    m, target = lanes.head.shape[1], value - w.begin
    least = w.shift + m % w.shift
    first, tried = _value_of_fewest(w, least, states)
    steps = (m - least) // w.shift
    later = -((first - target) // steps)  # rounded up: c(least) is no more than `first`
    if target <= first:
        return Answer.MERGED, tried
    claims = {m - i * w.shift: target - i * later for i in range(steps + 1)}
    tail, left = _tails(w, claims), sorted((n for n in claims if n > least), reverse=True)
    while left:
        at_once = [left[0], *(n for n in left[1:] if n - w.shift >= ALIKE_SHARE * left[0])]
        question = _Question(value, states - tried, incumbent)
        answer, count, front = _refute_claims(w, at_once, _weakest(tail, claims, at_once), claims, later, question)
        tried += count
        if answer is not Answer.REFUTED:
            return answer, tried
        left = [n for n in left[1:] if n not in at_once or n <= front]
    return Answer.REFUTED, tried


def _refute_claims(
    w: Waves, numbers: list[int], tail: Ints, claims: dict[int, int], later: int, question: _Question
) -> tuple[Answer, int, int]:
    """Whether every order of P(n) takes as long as claimed, for the greatest n of `numbers`; how many partial orders were
    tried; and the most passes of a lane that one of them placed. A refutation also holds for each other number above those
    (see the module), as `tail` holds for all, and what does not is left out."""
    n = max(numbers)
    lanes = _last_microbatches(w, n, tail)
    if len(numbers) > 1:
        lanes = lanes._replace(held=lanes.held[:0], slack=np.full_like(lanes.slack, INFINITE))
    if claims[n] >= MAX_WINDOW:
        return Answer.TOO_MANY, 0, 0
    induction = Induction(_behind(w, numbers, claims), w.shift, later)
    limits = Limits(MAX_BREADTH, question.states, False)
    better = question.incumbent, question.value
    answer, tried, front = search_orders(lanes, claims[n] - 1, limits, induction, *better, NOTHING_KNOWN)
    return Answer(answer), int(tried), int(front)


def _behind(w: Waves, numbers: list[int], claims: dict[int, int]) -> Ints:
    """The longest tails, µs, in P(n − shift) over `numbers`, to the end of the greatest n's window. Shape (lanes, n)."""
    n, m = max(numbers), w.lanes.tail.shape[1]
    result = np.full((len(w.lanes.tail), n), -INFINITE)
    for fewer in (number - w.shift for number in numbers):
        tail = w.lanes.tail[:, m - fewer :] + claims[n] - claims[fewer]
        result[:, :fewer] = np.maximum(result[:, :fewer], tail)
    return result


def _last_microbatches(w: Waves, n: int, tail: Ints) -> Lanes:
    """P(n) with these tails. Heads follow from the lags behind lane 0."""
    begin = np.where(w.far[0] >= 0, w.lanes.duration[0] + w.far[0], 0)
    head = begin[:, None] + np.arange(n) * w.lanes.duration[:, None]
    return w.lanes._replace(head=head, tail=tail, windows=no_windows(head.shape, len(w.lanes.capacity)))


def _value_of_fewest(w: Waves, n: int, states: int) -> tuple[int, int]:
    """A lower bound for P(n), µs, found by bisection; and how many partial orders were tried."""
    lanes = _last_microbatches(w, n, _own_tails(_tails(w, {}), n))
    low, tried = int((lanes.head + lanes.duration[:, None] + lanes.tail).max()), 0
    high, step = None, max(1, low // 50)
    while (high is None or high - low > max(1, low // FIRST_PARTS)) and tried < states // FIRST_SHARE:
        window = low + step if high is None else (low + high) // 2
        answer, count = refute(lanes, window - 1, UNMERGED, min(MAX_FIRST_STATES, states - tried))
        tried += count
        if answer is Answer.REFUTED:
            low, step = window, 2 * step
        else:
            high = window
    return low, tried


def _tails(w: Waves, claims: dict[int, int]) -> Ints:
    """The least time after each pass of all microbatches, µs, shape (lanes, microbatches). It follows from the claims for
    fewer microbatches, from lags, from the order within lanes, and from waits for memory."""
    count, m = w.lanes.head.shape
    duration = w.lanes.duration.tolist()
    ways = [[(b, w.far[a, b] + duration[b]) for b in range(count) if w.far[a, b] >= 0] for a in range(count)]
    waits = [[(t, k) for t, f, k in w.waits if f == a and k > 0] for a in range(count)]
    tail = w.lanes.tail.tolist()
    for j in range(m - 1, -1, -1):
        for a in range(count - 1, -1, -1):
            least = max([tail[a][j], *(far + tail[b][j] for b, far in ways[a])])
            if j + 1 < m:
                least = max(
                    [least, duration[a] + tail[a][j + 1], *(duration[t] + tail[t][j + k] for t, k in waits[a] if j + k < m)]
                )
            if a == 0 and m - j in claims:
                least = max(least, claims[m - j] - duration[0])
            tail[a][j] = least
    return np.array(tail, np.int64)


def _own_tails(tail: Ints, n: int) -> Ints:
    """The tails of P(n). The claim for n is in that of lane 0's first pass, so the least one of the lane replaces it."""
    tails = tail[:, tail.shape[1] - n :].copy()
    tails[0, 0] = tails[0].min()
    return tails


def _weakest(tail: Ints, claims: dict[int, int], numbers: list[int]) -> Ints:
    """The shortest tails, µs, in P(n) over `numbers`, to the end of the greatest n's window. Shape (lanes, n)."""
    most = max(numbers)
    result = _own_tails(tail, most)
    for n in numbers:
        result[:, :n] = np.minimum(result[:, :n], _own_tails(tail, n) + claims[most] - claims[n])
    return result


# --- The largest window that some ranks refute: larger windows are tried, by search or by induction ---


FIRST_BREADTH, BREADTH_FACTOR = 8, 4  # states kept with the same positions at first; the factor of each further try


@dataclass
class WindowSearch:
    """The search for the largest window, µs, that some ranks refute.

    fits: a window that is known to fit, or to be of no use. Steps begin at `min_step` and double while windows are refuted;
    a step beyond `fits` is half of what is left. breadth: that of the last answer. incumbent: see `refute`. times: times to
    go of single ranks. hard: the last window that had no answer, with `hard_states` partial orders.
    """

    lanes: Lanes
    fits: int
    min_step: int
    step: int = 0
    breadth: int = FIRST_BREADTH
    incumbent: Ints = field(default_factory=lambda: NO_INCUMBENT)
    times: TimesToGo = field(default_factory=TimesToGo)
    hard: int = INFINITE
    hard_states: int = 0

    @cached_property
    def long(self) -> bool:
        """Whether induction is tried: there are many waves of microbatches."""
        return has_many_waves(self.lanes)

    def next_window(self, refuted: int, grain: int, states: int) -> int | None:
        """The window, µs, to try next with so many states; None if only `grain` µs or less are left above `refuted`."""
        end = self.fits if states > self.hard_states else min(self.fits, self.hard)
        if end - refuted <= max(1, grain):
            return None
        window = refuted + max(self.min_step, self.step)
        return (refuted + end) // 2 if window >= end else window

    def attempt(self, window: int, states: int) -> tuple[Answer, int]:
        """Whether the window is refuted with so many states, and how many were tried.

        The breadth begins with the last answer's and grows while states are left; with many waves, induction is tried first.
        """
        breadth = self.breadth
        to_go, tried = self.times.of(self.lanes, window, self.fits, states)
        while True:
            answer, count = refute(self.lanes, window, breadth, states - tried, False, self.incumbent, to_go)
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
