"""What a search for very many microbatches has, and its best so far: an order of few, with rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np

from ..greedy.arrays.microbatch import MicrobatchGraph
from ..greedy.blocks.block_arms import SECONDS_PER_DECODED_PASS
from ..greedy.blocks.steady_state import microbatches_in_flight
from ..handover import lacking
from ..ilp.bounds.bound import Bound
from ..long_steps.check import earliest_starts, value_of
from ..long_steps.repeated import RepeatedSchedule, Round, find_round
from ..problem import Ints, Problem
from ..util.clock import Clock

EVERY = (1, 2, 3, 4, 6, 8, 12)  # microbatches of a round that are looked for
MULTIPLE = 24  # what all of them divide: microbatches that are left for rounds
MAX_MULTIPLE = 512  # microbatches that are left for rounds of as many as there are ranks at most: beyond, none are
SECONDS_PER_SHOWN_PASS = 2e-6  # that decoding may take at the worst: with less time left it does not begin

Progress = Callable[[str], None]


@dataclass
class FewFound:
    """An order with rounds: microbatches, the lanes of each rank, the round, and what the whole takes, µs."""

    few: int
    order: tuple[Ints, ...]
    round: Round
    value: int


@dataclass
class ManySearch:
    """What the search has: the step of one microbatch, how many there are, the bound, the time; and its best so far."""

    one: Problem
    microbatches: int
    graph: MicrobatchGraph
    bound: Bound
    clock: Clock
    seed: int
    progress: Progress
    best: FewFound | None = None
    solver: str = ""
    shown: int = 0  # offers that had rounds

    @property
    def done(self) -> bool:
        """Whether nothing is left to find, or no time."""
        return self.clock.left <= 0 or (self.best is not None and self.best.value <= self.bound.value)

    @cached_property
    def every(self) -> tuple[int, ...]:
        """Microbatches of a round that are looked for: few, as many as are in flight at once, and as many as ranks."""
        return (*EVERY, microbatches_in_flight(self.graph), self.one.ranks)

    def length(self, wanted: float) -> int:
        """About so many microbatches, as many as leave whole rounds."""
        few, groups = max(MULTIPLE, round(wanted)), lcm(MULTIPLE, self.one.ranks)
        return few + (self.microbatches - few) % (groups if groups <= MAX_MULTIPLE else MULTIPLE)

    def time_to_show(self, few: int) -> bool:
        """Whether decoding so many microbatches ends about in time, or nothing was found yet."""
        return self.best is None or self.clock.left > few * self.graph.rank.size * SECONDS_PER_SHOWN_PASS

    def offer(self, few: int, lanes: Ints, solver: str, rounds: tuple[int, ...] = ()) -> None:
        """Keep an order of `few` microbatches, rank after rank, where it has rounds, is better, and its messages fit.
        rounds: how many microbatches these may have; empty: any number that is looked for."""
        ends = np.cumsum(np.bincount(self.one.passes.rank, minlength=self.one.ranks) * few)[:-1]
        order = tuple(np.split(lanes, ends))
        start = earliest_starts(self.one, few, order)
        self.clock.spend(lanes.size * SECONDS_PER_DECODED_PASS)
        few_found = _with_rounds(self, order, start, rounds or self.every)
        self.shown += few_found is not None
        if (
            few_found is None
            or (self.best is not None and few_found.value >= self.best.value)
            or not self._messages_fit(few_found)
        ):
            return
        self.best, self.solver = few_found, solver
        gap = 1 - self.bound.value / few_found.value
        self.progress(
            f"{few_found.value / 1e3:,.3f} ms, gap {gap:.2%}: {few} microbatches, rounds of {few_found.round.every}"
        )

    def _messages_fit(self, found: FewFound) -> bool:
        """Whether messages that wait fit: rounds repeat, so those of few microbatches show it."""
        if self.one.messages is None:
            return True
        long = RepeatedSchedule(self.one, self.microbatches, found.few, found.order, found.round)
        return not lacking(long.sample()).any()


def _with_rounds(search: ManySearch, order: tuple[Ints, ...], start: Ints, rounds: tuple[int, ...]) -> FewFound | None:
    """The order with its rounds of fewest microbatches; None where it has none. start: µs, shape (lanes, few)."""
    one, microbatches, few = search.one, search.microbatches, start.shape[1]
    if start.min() < 0 or few > microbatches:
        return None
    for every in rounds:
        round = None if (microbatches - few) % every else find_round(one, order, start, every)
        if round is not None:
            whole = value_of(one, start) + (microbatches - few) // every * round.period
            return FewFound(few, order, round, whole)
    return None
