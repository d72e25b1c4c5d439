"""The source "fewer microbatches": solve a problem of fewer microbatches, then repeat its steady state up to all of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice

import numpy as np

from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph
from ..greedy.blocks.block_arms import RULES, SECONDS_PER_DECODED_PASS
from ..greedy.blocks.steady_state import microbatches_in_flight, microbatches_in_memory, targets_cut_by_time
from ..greedy.decoding import decode, to_schedule
from ..problem import Problem
from ..schedule import Schedule
from .state import State

# Microbatches of small problems, as multiples of the ranks, or of twice the microbatches in flight if that is less. LEAST is
# for steps of more than SHORT_STEP passes in which none of SIZES is small enough.
SIZES, LEAST, SHORT_STEP = (2.5, 2.0, 3.0, 2.25), (1.5,), 400
MAX_SIZE_SHARE = 0.85  # of the microbatches: a larger problem saves too little
SEARCH_SHARES = 0.06, 0.08  # of all time: for one small problem; for one that is worth more (`worth_more`)
WORTH_SHARE = 1 / 3  # of the microbatches: up to so many, a small problem is worth more
MIN_DECODINGS = 2_000  # if the time allows fewer decodings, it is better spent on blocks
CUTS = 16  # parts of a small schedule that are tried as the steady state; the first few are usually the best
CUT_RULES = (RULES[2], RULES[1], RULES[0])
PAUSE = 2.0  # the small search runs for this many times the cost of repeating before its schedule is repeated again

Search = Callable[[State], Iterator[None]]


def sizes_of(problem: Problem) -> list[int]:
    """Sizes, in microbatches, of small problems that are worth solving first. There are none if microbatches differ or take
    several routes, or if passes run on side streams."""
    graph = None if len(problem.side_stream) else microbatch_graph(problem)
    if graph is None or not problem.alike or graph.microbatches != problem.microbatches:
        return []
    most = min(problem.ranks, 2 * microbatches_in_flight(graph))
    numbers = (dict.fromkeys(round(times * most) for times in sizes) for sizes in (SIZES, LEAST))
    usual, least = ([n for n in some if 2 < n <= MAX_SIZE_SHARE * problem.microbatches] for some in numbers)
    return usual or (least if len(problem.passes) > SHORT_STEP else [])


def worth_more(problem: Problem, few: int) -> bool:
    """Whether the problem of `few` microbatches is worth more than a short look: if `few` is a small part of all, or if each
    rank has one stage and little memory. Otherwise searches of the whole problem find more in the same time."""
    graph = microbatch_graph(problem)
    full = graph is not None and microbatches_in_memory(graph) <= microbatches_in_flight(graph)
    return (full and problem.stages == problem.ranks) or few <= WORTH_SHARE * problem.microbatches


def extended(state: State, search: Search) -> Generator[None, None, int]:
    """Offer schedules of small problems with their steady states repeated, one size after the other as long as that gains,
    and two sizes at least where they are worth more. search: solves a small problem, step by step. Returns the size,
    in microbatches, to search on beside other sources; 0: none."""
    total = state.clock.left
    few_decodings = total < MIN_DECODINGS * len(state.problem.passes) * SECONDS_PER_DECODED_PASS
    sizes, best = [] if few_decodings else sizes_of(state.problem), 0
    for tried, few in enumerate(sizes, 1):
        before, worth = state.value, worth_more(state.problem, few)
        yield from repeated(state, few, SEARCH_SHARES[worth] * total, search)
        gained = state.value != before
        if worth and (gained or not best):
            best = few
        if state.done or (not gained and (tried > 1 or not worth)):
            break
    return best


def repeated(state: State, few: int, seconds: float, search: Search) -> Iterator[None]:
    """Search the problem of `few` microbatches for so many seconds. Now and then, and at the end, repeat the steady state of
    its best schedule and offer the result."""
    g = microbatch_graph(state.problem)
    if g is None:
        return
    pause = PAUSE * CUTS * len(CUT_RULES) * g.passes.size * SECONDS_PER_DECODED_PASS
    last, when, small = -1, 0.0, None
    for small in state.beside(state.problem.head(few), seconds, search):
        if small.value != last and small.clock.used - when > pause:
            last, when = small.value, small.clock.used
            _offer_repeated(state, g, small.schedule)
        yield
    if small is not None and small.value != last and not state.done:
        _offer_repeated(state, g, small.schedule)


def _offer_repeated(state: State, g: MicrobatchGraph, small: Schedule | None) -> None:
    """Repeat the steady state of a small schedule in several ways, and offer the shortest result, if there is one."""
    small_graph = None if small is None else microbatch_graph(small.problem)
    if small is None or small_graph is None:
        return
    start, best = np.asarray(small.timeline().start)[small_graph.passes], None
    targets = targets_cut_by_time(start, g.microbatches, state.bound.value, microbatches_in_flight(g))
    for target in islice(targets, CUTS):
        for rule in CUT_RULES:
            decoded = decode(g, target, rule)
            state.clock.spend(g.passes.size * SECONDS_PER_DECODED_PASS)
            if decoded is not None and (best is None or decoded.value < best.value):
                best = decoded
    if best is not None:
        state.offer(to_schedule(state.problem, g, best.order), "extension")
