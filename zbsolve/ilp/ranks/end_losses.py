"""A bound from the memory that one rank loses at both ends of a step, by a search over how its passes begin and one over how
they end.

Let E be the sum, over all that a rank's passes hold, of bytes times least lifespan; C the rank's capacity; and T the time
from its first start to its last end. Then C · T ≥ E. In fact more time is needed, since memory fills slowly, and waiting
passes hold bytes for longer than they must. Starting many microbatches early fills memory soon, but leaves no room to go on.

**Loss.** Other ranks count as lags. Take an order of the rank's passes, and a moment t at which it has run some of them. For
each pair of passes that hold bytes, the order gives the least time r that these are held after t: 0 where the second pass
has run; until the least end of the second one where the first has begun; else the least lifespan l. The loss up to t is C ·
t − Σ bytes · (l − r): the part of C · t that was not used.

**Searches.** Let t₁ be the start of the first pass of a microbatch ≥ k. The first search proves that the loss up to t₁ is at
least C · b in every schedule. It is the search for orders (`order_search`) with memory's energy as its only limit: it drops
a partial order whose loss is larger than that, and it must drop all of them before a lane comes to microbatch k. The second
search does the same with time reversed. It proves a loss of at least C · e after t₂, the last end of a pass of a microbatch
< m − n.

**Both add up** where k + n < m. *Proof.* All passes of microbatch k start at t₁ or later, and end by t₂: t₁ ≤ t₂. All
microbatches before k have ended by t₂, and those from m − n on start after t₁. So these parts of lifespans lie between t₁
and t₂: at least r of microbatches before k, the reversed r of those from m − n on, and l of the others. All that is held
there takes at most C · (t₂ − t₁). Add C · t₁ = loss + Σ bytes · (l − r) of the first ones, and the same of the last ones: C
· T ≥ E + C · (b + e). ∎

**Any timing.** In the search passes start as early as their order allows. In another timing of the same order t₁ is later by
some δ, and no least end is earlier, so each r falls by at most δ. The loss grows by δ · C, and it falls by at most δ times
the bytes held at t₁, which are at most C.

**Orders that are left out.** The search leaves out an order where another one is as good (`order_search._next_level`), since
both then fit. The same holds here: the other one's loss up to its t₁ is no larger. The loss grows with time and falls where
passes start earlier. This covers a partial order that is nowhere later than another, or merged from several; a pass that
moves to an earlier gap; and a pass that changes places with one before it that no pass waits for: either both have run by
t₁, or the first pass of microbatch k is the one that moves, and comes earlier. Lanes that take turns with twins can lose
more; rising tails keep these apart.
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

NO_INCUMBENT = np.full(1, INFINITE)  # the value, µs, shape (1,), that stands for no incumbent
MAX_WINDOW = 1 << 28  # µs: the search keeps times in 32 bits


class Answer(Enum):
    """The answer of a search over orders for a window. REFUTED: no order fits. FITS: an order of the relaxation fits, or the
    incumbent does. MERGED: undecided, since states were merged. TOO_MANY: undecided, since no allowed states are left."""

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
    """Search whether any order of the lanes' passes fits `window` µs. Returns the answer and how many states were tried.

    breadth: the most states kept with the same positions. states: the most states tried in all. steady: at each level at
    most twice as many as `states` allows on average. incumbent: the value, µs, shape (1,), of the best known schedule,
    which another thread may lower meanwhile; the search ends where it is within the window. to_go: known times of single
    ranks (see `times_to_go`).
    """
    if window >= MAX_WINDOW:
        return Answer.TOO_MANY, 0
    limits, alone = Limits(breadth, states, steady), Induction(lanes.tail, 0, 0)
    answer, tried, _ = search_orders(lanes, window, limits, alone, incumbent, window + 1, to_go)
    return Answer(answer), int(tried)


KINDS_OF_GROUPS = ENDS, ALONE, LEAN, WHOLE, OWN = "both ends of one", "alone", "lean", "whole", "in their own windows"
# States in one try: at first; the factor for a kind's next turn; and the most (a few GB of memory at worst).
FIRST_STATES, STATES_FACTOR, MAX_STATES = 3_000, 6, 8_000_000
FAIR_PART = 0.25  # share of the whole gain added to each kind's own, since a kind may gain later with more states


@dataclass
class Share:
    """The turns of one kind of groups. states: how many each try of its next turn may take; tried: the states of all its
    tries so far; gained: µs by which these raised the bound."""

    states: int = FIRST_STATES
    tried: int = 0
    gained: int = 0

    @property
    def first(self) -> bool:
        """Whether it had no turn yet."""
        return self.states == FIRST_STATES

    def count(self, gained: int, tried: int) -> None:
        """Count one more turn. gained: µs that the bound rose; tried: states."""
        self.states *= STATES_FACTOR
        self.gained += gained
        self.tried += tried


def next_kind(shares: dict[str, Share], alone: bool) -> str | None:
    """The kind whose turn is next; None if no kind is left. Each has one turn first. Then it is the kind that has tried the
    fewest states for its share of the gain. alone: whether single ranks may have more than one turn."""
    left = [kind for kind, share in shares.items() if share.states <= MAX_STATES and (kind != ALONE or alone or share.first)]
    gained = max(1, sum(shares[kind].gained for kind in left))

    def taken(kind: str) -> float:
        share = shares[kind]
        return -1.0 if share.first else share.tried / (FAIR_PART + share.gained / gained)

    return min(left, key=taken, default=None)


WINDOW = MAX_WINDOW - 1  # µs: longer than any order, so that only energy limits the search
MAX_MICROBATCHES = 255  # the most in one search
PARTS = 1_000  # the loss is found to the time that memory must be held, divided by this
MAX_BREADTH, BREADTH_FACTOR = 1024, 4  # the most breadth, and the factor on it where a search ended with merged states
HELD_SHARE = 0.8  # both ends are searched where memory must be held for at least this share of a bound
ENOUGH_LEFT = 4  # a wider try is made where it may take this many times the states of the last one


@dataclass
class End:
    """One end of a step. lanes: in the direction of time that begins at this end; loss: proven so far, as µs of the whole
    capacity; reached: the most microbatches that its proof looked at; breadth, step (µs more of loss): of the next try."""

    lanes: Lanes
    step: int
    loss: int = 0
    reached: int = 0
    breadth: int = 1

    def raise_loss(self, states: int, allowed: int, grain: int, most: int) -> int:
        """Raise the loss in steps down to `grain` µs. states: in each try; allowed: states in all; most: microbatches in
        each try. Returns how many states were tried."""
        tried, self.step = 0, max(self.step, grain)
        while self.step >= grain and tried < allowed and self.loss < WINDOW:  # a loss without limit: nothing fits the memory
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
        """Search whether every order loses `loss` µs before it comes to a microbatch after the first `most` (REFUTED: none
        loses less). Returns the answer, the states tried, and the most microbatches that they came to."""
        lanes = _without_ends(self.lanes, most + 1)
        need, room = energy_each(lanes) * (most + 1), int(lanes.capacity[0])
        left = np.array([[[0.0, float(need + (loss - WINDOW) * room), float(room)]]])
        limits, alone = Limits(self.breadth, states, False), Induction(lanes.tail, 0, 0)
        result = search_orders(lanes._replace(end_energy=left), WINDOW, limits, alone, NO_INCUMBENT, 0, NOTHING_KNOWN)
        answer, tried, front = Answer(result[0]), int(result[1]), int(result[2])
        return Answer.MERGED if answer is Answer.REFUTED and front > most else answer, tried, front


class BothEnds:
    """The least time that one rank's memory is held, and the losses at both ends that are proven so far."""

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
        """The bound that follows."""
        first, last = (end.loss for end in self.ends)
        proof = (
            f"rank {self.rank}: what its passes must hold takes {self.room} bytes for {self.held} µs, and every order loses "
            f"{first} µs of them while memory fills and {last} µs while it empties"
        )
        return Bound(self.held + first + last + self.around, proof, BOTH_ENDS, (self.rank,))

    def raise_losses(self, states: int, allowed: int = INFINITE) -> int:
        """Search for higher losses. states: in each try; allowed: states in all. Returns how many were tried."""
        tried, grain = 0, max(1, self.held // PARTS)
        for end, other in (self.ends, self.ends[::-1]):
            others = other.reached or self.microbatches // 2
            most = min(MAX_MICROBATCHES, self.microbatches - 1 - others)
            tried += end.raise_loss(states, (allowed - tried) // (2 if tried == 0 else 1), grain, most)
        return tried


def both_ends_of_fullest(problem: Problem, least: int) -> BothEnds | None:
    """Both ends of the rank whose memory alone gives the highest closed form. None where its memory must be held for less
    than `HELD_SHARE` of `least` µs."""
    forms = [bound for bound in all_closed_forms(problem) if bound.kind == AREA and 0 < len(bound.ranks) <= 2]
    fullest = max(forms, key=lambda form: form.value, default=None)
    both = None if fullest is None else both_ends(problem, fullest.ranks[-1])
    return both if both is not None and both.held >= HELD_SHARE * least else None


def both_ends(problem: Problem, rank: int) -> BothEnds | None:
    """Both ends of this rank, with no loss proven yet; None where passes allow no search, or microbatches are too few."""
    lanes = lanes_of(problem, (rank,))
    if lanes is None or len(lanes.held) == 0 or lanes.capacity[0] <= 0 or lanes.head.shape[1] < 3:
        return None
    longest = int(lanes.duration.sum() + lanes.lag[lanes.lag > 0].sum())
    return None if longest * lanes.head.shape[1] >= WINDOW // 2 else BothEnds(problem, rank, lanes)


def proven_again(problem: Problem, rank: int, value: int, states: int) -> Bound | None:
    """The bound of this rank, where searches with `states` in all prove `value` µs or more; else None."""
    both, each = both_ends(problem, rank), FIRST_STATES
    while both is not None and both.bound.value < value and each <= MAX_STATES and states > 0:
        states -= both.raise_losses(each, states)
        each *= STATES_FACTOR
    return both.bound if both is not None and both.bound.value >= value else None


def energy_each(lanes: Lanes) -> int:
    """Byte·µs that one microbatch must at least hold."""
    return sum(size * least for _, _, size, least in lanes.held.tolist())


def mirrored(lanes: Lanes) -> Lanes:
    """The lanes of one rank with time reversed; heads and tails are left as they are."""
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
    """The lanes of one rank with this many microbatches, without heads and with tails that limit nothing. Tails rise, so
    that no two lanes are twins."""
    shape = len(lanes.rank), microbatches
    tail = np.tile(np.arange(microbatches), (len(lanes.rank), 1))
    return lanes._replace(
        head=np.zeros(shape, np.int64), tail=tail, slack=np.zeros(1, np.int64), windows=no_windows(shape, 1)
    )
