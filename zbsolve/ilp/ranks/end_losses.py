"""What the memory of one rank loses at both ends of a step: a search over how its passes begin, and one over how they end.

Let E be the sum, over what a rank's passes hold, of bytes times least lifespan, C the rank's capacity, and T the time from
its first start to its last end. So C · T ≥ E. More is needed, for memory fills slowly, and what waits holds bytes for longer
than it must. The first passes of many microbatches fill memory soon, but then nothing has room that could go on.

**Loss.** Other ranks are lags. Take an order of the rank's passes, and a moment t at which it has run some of them. Of each
pair of passes that hold bytes, the order says how long these are held after t at least: not at all where the second pass has
run; until the least end of the second one where the first has begun; else for the least lifespan l. Call that r. The loss up
to t is C · t − Σ bytes · (l − r): it says how much less than C · t has been of use.

**Searches.** Let t₁ be the start of the first pass of a microbatch ≥ k. The first search shows that the loss up to t₁ is C ·
b or more in every schedule. It is the search for orders (`order_search`) with memory's energy as its only limit: it drops a
partial order where the loss is larger than that, and it must drop all of them before a lane comes to microbatch k. In the
same way the second search, with time turned round, shows a loss of C · e or more behind t₂, the last end of a pass of a
microbatch < m − n.

**Both add up** where k + n < m. *Proof.* All passes of microbatch k start at t₁ or later, and end by t₂: t₁ ≤ t₂. All
microbatches before k have ended by t₂, and those from m − n on start behind t₁. So of the lifespans these lie between t₁ and
t₂: r or more of microbatches before k, what r is turned round of those from m − n on, and l of the others. All that is held
there takes C · (t₂ − t₁) at most. Add C · t₁ = loss + Σ bytes · (l − r) of the first ones, and the same of the last ones: C
· T ≥ E + C · (b + e). ∎

**Any timing.** The search has passes as early as their order allows. In another timing of the same order t₁ is later by some
δ, and each least end is no sooner, so each r falls by δ at most. The loss grows by δ · C and falls by δ times the bytes that
are held at t₁, which are C at most.

**Orders that are left out.** The search leaves out an order where another one is as good (`order_search._next_level`). Both
fit then, and so it is here: the other one's loss up to its t₁ is no larger. The loss grows with time, and it falls where
passes start earlier. That shows it where a partial order is nowhere later than another, or merged from several; where a pass
moves to an earlier gap; and where a pass changes places with one before it that no pass waits for, as both have run by t₁,
or the first pass of microbatch k is the one that moves, and comes sooner. Lanes that take turns with twins can lose more:
tails that rise keep these.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from ...problem import Ints, Problem
from ..bounds.bound import AREA, BOTH_ENDS, Bound
from ..bounds.closed_forms import all_closed_forms
from ..bounds.memory_arcs import INFINITE
from ..bounds.necessary_arcs import WHOLE_STEP, heads_and_tails, ordered_passes
from . import order_search
from .lanes import Lanes, lanes_of, no_windows
from .order_search import Induction, Limits, search_orders
from .search_tables import NOTHING_KNOWN, ToGo

NO_INCUMBENT = np.full(1, INFINITE)  # the incumbent's value, µs, shape (1,), where there is none that others improve
MAX_WINDOW = 1 << 28  # µs: the search keeps times in 32 bits


class Answer(Enum):
    """What a search over orders says of a window. FITS: one fits (within the relaxation), or the incumbent does. MERGED: too
    few states were kept with the same positions to tell. TOO_MANY: there were more partial orders in all than allowed."""

    REFUTED = order_search.REFUTED
    FITS = order_search.FITS
    MERGED = order_search.MERGED
    TOO_MANY = order_search.TOO_MANY


def refute(
    lanes: Lanes,
    window: int,
    breadth: int,
    states: int,
    steady: bool = False,
    incumbent: Ints = NO_INCUMBENT,
    to_go: ToGo = NOTHING_KNOWN,
) -> tuple[Answer, int]:
    """Whether no order of the lanes' passes fits `window` µs, and how many partial orders were tried.

    At most `breadth` states with the same positions are kept, and at most `states` partial orders are tried in all;
    steady: no more than twice as many at any time as that allows in the mean. incumbent: the value, µs, shape (1,), of the
    best schedule known, which another thread may lower meanwhile; where it falls into the window, the search ends. to_go:
    what is known of single ranks (see `times_to_go`).
    """
    if window >= MAX_WINDOW:
        return Answer.TOO_MANY, 0
    limits, alone = Limits(breadth, states, steady), Induction(lanes.tail, 0, 0)
    answer, tried, _ = search_orders(lanes, window, limits, alone, incumbent, window + 1, to_go)
    return Answer(answer), int(tried)


KINDS_OF_GROUPS = ENDS, ALONE, LEAN, WHOLE, OWN = "both ends of one", "alone", "lean", "whole", "in their own windows"
# Partial orders in one try: at first, how many times as many in a kind's next turn, at most (a few GB at worst).
FIRST_STATES, STATES_FACTOR, MAX_STATES = 3_000, 6, 8_000_000
FAIR_PART = 0.25  # of all that was gained, is added to what each kind gained: the others may gain with more states


@dataclass
class Share:
    """What one kind of groups has had: how many partial orders one try may take in its next turn, how many all took so far,
    and what the bound gained by them, µs."""

    states: int = FIRST_STATES
    tried: int = 0
    gained: int = 0

    @property
    def first(self) -> bool:
        """Whether it had no turn yet."""
        return self.states == FIRST_STATES

    def count(self, gained: int, tried: int) -> None:
        """One more turn, in which the bound gained so many µs by so many partial orders."""
        self.states *= STATES_FACTOR
        self.gained += gained
        self.tried += tried


def next_kind(shares: dict[str, Share], alone: bool) -> str | None:
    """The kind whose turn it is, that of the fewest partial orders for its part of what was gained; each has one turn before
    any has two. alone: whether single ranks may have more than one; None where no kind is left."""
    left = {
        kind: share
        for kind, share in shares.items()
        if share.states <= MAX_STATES and (kind != ALONE or alone or share.first)
    }
    gained = max(1, sum(share.gained for share in left.values()))

    def taken(kind: str) -> float:
        share = left[kind]
        return -1.0 if share.first else share.tried / (FAIR_PART + share.gained / gained)

    return min(left, key=taken, default=None)


WINDOW = MAX_WINDOW - 1  # µs: longer than any order, so that energy alone limits the search
MAX_MICROBATCHES = 255  # that one search knows of
PARTS = 1_000  # of all that must be held, in µs: to such a part the loss is found
MAX_BREADTH, BREADTH_FACTOR = 1024, 4  # times as many states with the same positions where merged ones fit
HELD_SHARE = 0.8  # of a bound must be the time that memory must be held for, so that both ends are worth a look
ENOUGH_LEFT = 4  # such a try is made where it may take so many times the partial orders of the last one


@dataclass
class End:
    """One end of a step, as `lanes` that begin there: loss, µs of the whole capacity that are lost there at least; reached,
    how many microbatches the proof of that knows of; breadth and step, µs, of the next try."""

    lanes: Lanes
    step: int
    loss: int = 0
    reached: int = 0
    breadth: int = 1

    def raise_loss(self, states: int, allowed: int, grain: int, most: int) -> int:
        """A higher loss, to `grain` µs, by tries of `most` microbatches at most: so many partial orders in one, `allowed` in
        all; how many were tried."""
        tried, self.step = 0, max(self.step, grain)
        while self.step >= grain and tried < allowed and self.loss < WINDOW:  # more is lost where nothing fits the memory
            answer, count, reached = self.attempt(self.loss + self.step, min(states, allowed - tried), most)
            tried += count
            if answer is Answer.REFUTED:
                self.loss, self.reached, self.step = self.loss + self.step, reached, 2 * self.step
            elif answer is Answer.MERGED and self.breadth < MAX_BREADTH and ENOUGH_LEFT * count <= states:
                self.breadth *= BREADTH_FACTOR
            else:
                self.step //= 2
        return tried

    def attempt(self, loss: int, states: int, most: int) -> tuple[Answer, int, int]:
        """Whether every order loses so many µs (REFUTED: none loses less) before it comes to the first microbatch behind
        `most` ones; how many partial orders were tried, and the most microbatches that they came to."""
        lanes = _without_ends(self.lanes, most + 1)
        need, room = energy_each(lanes) * (most + 1), int(lanes.capacity[0])
        left = np.array([[[0.0, float(need + (loss - WINDOW) * room), float(room)]]])
        limits, alone = Limits(self.breadth, states, False), Induction(lanes.tail, 0, 0)
        result = search_orders(lanes._replace(end_energy=left), WINDOW, limits, alone, NO_INCUMBENT, 0, NOTHING_KNOWN)
        answer, tried, front = Answer(result[0]), int(result[1]), int(result[2])
        return Answer.MERGED if answer is Answer.REFUTED and front > most else answer, tried, front


class BothEnds:
    """What one rank's memory must hold, and what it loses at both ends as far as it is known."""

    def __init__(self, problem: Problem, rank: int, lanes: Lanes) -> None:
        self.rank, self.room, self.microbatches = rank, int(lanes.capacity[0]), lanes.head.shape[1]
        self.held = -(-energy_each(lanes) * self.microbatches // self.room)
        self.ends = [End(way, self.held // self.microbatches) for way in (lanes, mirrored(lanes))]
        self.around = 0
        if problem.objective == "makespan":
            passes = ordered_passes(problem, rank)
            self.around = sum(int(times[passes].min()) for times in heads_and_tails(problem, WHOLE_STEP))

    @property
    def bound(self) -> Bound:
        """What this proves."""
        first, last = (end.loss for end in self.ends)
        proof = (
            f"rank {self.rank}: what its passes must hold takes {self.room} bytes for {self.held} µs, and every order loses "
            f"{first} µs of them while memory fills and {last} µs while it empties"
        )
        return Bound(self.held + first + last + self.around, proof, BOTH_ENDS, (self.rank,))

    def raise_losses(self, states: int, allowed: int = INFINITE) -> int:
        """Search for higher losses, with `states` partial orders a try and `allowed` in all. Returns how many were tried."""
        tried, grain = 0, max(1, self.held // PARTS)
        for end, other in (self.ends, self.ends[::-1]):
            others = other.reached or self.microbatches // 2
            most = min(MAX_MICROBATCHES, self.microbatches - 1 - others)
            tried += end.raise_loss(states, (allowed - tried) // (2 if tried == 0 else 1), grain, most)
        return tried


def both_ends_of_fullest(problem: Problem, least: int) -> BothEnds | None:
    """The losses of one rank: the one whose memory alone gives the highest closed form. None where that rank's passes need
    all its memory for only a small part (`HELD_SHARE`) of `least` µs."""
    forms = [bound for bound in all_closed_forms(problem) if bound.kind == AREA and 0 < len(bound.ranks) <= 2]
    fullest = max(forms, key=lambda form: form.value, default=None)
    both = None if fullest is None else both_ends(problem, fullest.ranks[-1])
    return both if both is not None and both.held >= HELD_SHARE * least else None


def both_ends(problem: Problem, rank: int) -> BothEnds | None:
    """What this rank's memory must hold and loses at both ends; None where its passes allow no search, or where it has too
    few microbatches."""
    lanes = lanes_of(problem, (rank,))
    if lanes is None or len(lanes.held) == 0 or lanes.capacity[0] <= 0 or lanes.head.shape[1] < 3:
        return None
    longest = int(lanes.duration.sum() + lanes.lag[lanes.lag > 0].sum())
    return None if longest * lanes.head.shape[1] >= WINDOW // 2 else BothEnds(problem, rank, lanes)


def proven_again(problem: Problem, rank: int, value: int, states: int) -> Bound | None:
    """The bound of this rank, where a search with `states` partial orders proves `value` µs or more; else None."""
    both, each = both_ends(problem, rank), FIRST_STATES
    while both is not None and both.bound.value < value and each <= MAX_STATES and states > 0:
        states -= both.raise_losses(each, states)
        each *= STATES_FACTOR
    return both.bound if both is not None and both.bound.value >= value else None


def energy_each(lanes: Lanes) -> int:
    """Byte·µs that one microbatch must hold."""
    return sum(size * least for _, _, size, least in lanes.held.tolist())


def mirrored(lanes: Lanes) -> Lanes:
    """The lanes of one rank with time turned round; without what is known of heads and tails."""
    last = len(lanes.rank) - 1
    held = lanes.held[:, [1, 0, 2, 3]].copy()
    held[:, :2] = last - held[:, :2]
    return lanes._replace(
        duration=lanes.duration[::-1].copy(),
        taken=lanes.freed[::-1].copy(),
        freed=lanes.taken[::-1].copy(),
        lag=lanes.lag[::-1, ::-1].T.copy(),
        held=held,
    )


def _without_ends(lanes: Lanes, microbatches: int) -> Lanes:
    """The lanes of so many microbatches, of one rank, without heads and with tails that limit nothing. Tails rise, so that
    no two lanes are twins."""
    shape = len(lanes.rank), microbatches
    tail = np.tile(np.arange(microbatches), (len(lanes.rank), 1))
    return lanes._replace(
        head=np.zeros(shape, np.int64), tail=tail, slack=np.zeros(1, np.int64), windows=no_windows(shape, 1)
    )
