"""A schedule of few microbatches, its steady state repeated: what a small search finds, for many microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph
from ..greedy.blocks.block_arms import RULES, SECONDS_PER_DECODED_PASS
from ..greedy.blocks.steady_state import targets_cut_by_time
from ..greedy.targets.decoding import Decoded, decode, to_schedule
from ..problem import Problem
from ..schedule import Schedule
from ..util.clock import Clock
from .state import State

SIZES = (2.5, 2.0, 3.0, 2.25)  # times the ranks: microbatches of small problems
MAX_SIZE_SHARE = 0.85  # of the microbatches: a larger problem saves too little
SEARCH_SHARE, EXTENSION_SHARE = 0.06, 0.015  # of all time for one small problem, and for repeating what it gives
MIN_DECODINGS = 10_000  # that there is time for: with fewer the time is better spent on blocks
CUT_RULES = (RULES[2], RULES[1], RULES[0])


def sizes_of(problem: Problem) -> list[int]:
    """Numbers of microbatches of small problems that are worth solving first; none where microbatches differ, or where
    passes run beside compute."""
    if not problem.alike or len(problem.side_stream):
        return []
    few = dict.fromkeys(round(times * problem.ranks) for times in SIZES)
    return [one for one in few if 2 < one <= MAX_SIZE_SHARE * problem.microbatches]


def extended(state: State, search: Callable[[State], Iterator[None]]) -> Iterator[None]:
    """Offer schedules of small problems with their steady states repeated, as long as that gains. `search` solves a small
    problem, step by step."""
    g, total = microbatch_graph(state.problem), state.clock.left
    if g is None or total < MIN_DECODINGS * g.passes.size * SECONDS_PER_DECODED_PASS:
        return
    for few in sizes_of(state.problem):
        before = state.value
        small = state.beside(state.problem.head(few), SEARCH_SHARE * total, search)
        yield
        if small is not None and not state.done:
            best = _repeated(g, small, state.clock, EXTENSION_SHARE * total)
            if best is not None:
                state.offer(to_schedule(state.problem, g, best.order), "extension")
            yield
        if state.done or state.value == before:
            return


def _repeated(g: MicrobatchGraph, small: Schedule, clock: Clock, seconds: float) -> Decoded | None:
    """The best schedule with a steady state of `small` repeated that is found in so many seconds."""
    few = microbatch_graph(small.problem)
    assert few is not None
    start, until = np.asarray(small.timeline().start)[few.passes], clock.used + seconds
    best: Decoded | None = None
    for target in targets_cut_by_time(start, g.microbatches):
        for rule in CUT_RULES:
            found = decode(g, target, rule)
            clock.spend(g.passes.size * SECONDS_PER_DECODED_PASS)
            if found is not None and (best is None or found.value < best.value):
                best = found
        if clock.used > until:
            break
    return best
